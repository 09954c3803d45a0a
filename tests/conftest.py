"""Surroundings of every test: one thread per process for torch, no hub, an own cache, and nothing left behind.

After each test and at the end of the session, threads, asyncio tasks and child processes that a test started and did
not end fail it, by name. Processes are found by a marker in their environment, so that one whose parent died (p2pd of
a killed server) is found as well.
"""

import gc
import inspect
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swarmllm.files import PrivateDirectory

MARKER = "SWARMLLM_TEST_SESSION"
SESSION = uuid.uuid4().hex
PRIVATE = PrivateDirectory()
CACHE = str(PRIVATE.path / "cache")
TEMPORARY = PRIVATE.path / "tmp"
TEMPORARY.mkdir()
Path(CACHE).mkdir()

# Before torch, transformers and hivemind are imported: they read these once. Servers that tests start inherit them.
os.environ.update(
    {
        MARKER: SESSION,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": CACHE,
        "SWARMLLM_CACHE": CACHE,
        "SWARMLLM_STATE_DIR": str(PRIVATE.path / "machine"),  # else clients would find the agent of this machine
        # What tests leave for later, `tmp_path` of those that fail, goes where it always does; all else ends with them.
        "PYTEST_DEBUG_TEMPROOT": tempfile.gettempdir(),
        "TMPDIR": str(TEMPORARY),
    }
)
tempfile.tempdir = None  # so that TMPDIR is read again
for name in ("HF_TOKEN", "SWARMLLM_INITIAL_PEERS", "SWARMLLM_LOG_LEVEL"):
    os.environ.pop(name, None)

import psutil  # noqa: E402
import pytest  # noqa: E402
import uvloop  # noqa: E402
from hypothesis import settings  # noqa: E402
from packaging.version import Version  # noqa: E402
from tests import forked  # noqa: E402
from tests.left_tasks import GRACE_S, no_task_left_behind  # noqa: E402

from swarmllm.demo import local_swarm  # noqa: E402

pytest_plugins = ["tests.selection"]
REPO = Path(__file__).resolve().parent.parent
START_S = STOP_S = 240.0
"""Seconds for servers. Only what hangs takes so long."""
UNIT_BUDGET_S = 0.25

# No deadline: the machine is shared, and tests never assert a time.
settings.register_profile("swarmllm", deadline=None, print_blob=True)
settings.load_profile("swarmllm")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads or, in the rooms that start some, processes behind."""
    starts_processes = request.path.relative_to(REPO).parts[1] in ("swarm", "faults", "gateway")
    threads = set(threading.enumerate())
    processes = set(session_processes()) if starts_processes else set()
    if inspect.iscoroutinefunction(getattr(request.node, "function", None)):
        request.getfixturevalue("_no_task_left_behind")
    yield
    left = wait_for_none(lambda: [thread for thread in threading.enumerate() if leaked_thread(thread, threads)])
    if left:
        pytest.fail(f"threads left running: {left}", pytrace=False)
    if starts_processes:
        fail_for_processes(lambda: [one for one in session_processes() if one not in processes and not is_shared(one)])


_no_task_left_behind = pytest.fixture(no_task_left_behind)


@pytest.fixture(autouse=True)
def _log_levels_restored() -> Iterator[None]:
    """Commands that are called in this process set them, and what other tests wait for would not be logged."""
    before = {name: logger.level for name, logger in own_loggers()}
    yield
    for name, logger in own_loggers():
        if logger.level != (level := before.get(name, logging.NOTSET)):
            logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _servers_are_forked() -> None:
    """Servers of LocalSwarm come from a process that has imported what they need."""
    local_swarm.Popen = forked.popen  # type: ignore[attr-defined]
    local_swarm.START_TIMEOUT_S, local_swarm.STOP_TIMEOUT_S = START_S, STOP_S


@pytest.fixture(autouse=True, scope="session")
def _session_leaves_no_process() -> Iterator[None]:
    """The end of the session: fixtures of wider scopes have been torn down, so nothing may run any more."""
    yield
    fail_for_processes(session_processes)


def pytest_collection_finish() -> None:
    """Have the garbage collector skip modules and collected tests: each full collection took up to a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    forked.stop_warm_process()
    PRIVATE.remove()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows why tests were run again, and names the unit tests over their budget: a busy machine is no failure."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"failed at first: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
    slow = [
        (report.duration, report.nodeid)
        for report in terminalreporter.getreports("passed")
        if report.when == "call" and report.nodeid.startswith("tests/unit/") and report.duration > UNIT_BUDGET_S
    ]
    if slow:
        terminalreporter.section(f"unit tests over {UNIT_BUDGET_S} s")
        for duration, nodeid in sorted(slow, reverse=True):
            terminalreporter.write_line(f"{duration:6.2f} s  {nodeid}")


def session_processes() -> list[psutil.Process]:
    """Every live process that this session started, also through others, also orphans."""
    found = []
    for process in psutil.process_iter():
        if process.pid in (os.getpid(), forked.warm_pid()):
            continue
        try:
            marked = process.environ().get(MARKER) == SESSION
            if marked and process.status() != psutil.STATUS_ZOMBIE and not is_resource_tracker(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def own_loggers() -> list[tuple[str, logging.Logger]]:
    """Loggers of swarmllm that exist, by name."""
    known = list(logging.root.manager.loggerDict.items())
    return [(name, one) for name, one in known if isinstance(one, logging.Logger) and name.startswith("swarmllm")]


def is_resource_tracker(process: psutil.Process) -> bool:
    """Python's own helper of multiprocessing: it lives as long as its parent, by design."""
    return any("multiprocessing.resource_tracker" in part for part in process.cmdline())


def is_shared(process: psutil.Process) -> bool:
    """True if it belongs to a gateway that many tests share, which starts it when it is needed."""
    try:
        return any("gateway.engine.chat_templates" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return True


def leaked_thread(thread: threading.Thread, before: set[threading.Thread]) -> bool:
    """True if a test started this thread and should have ended it.

    tqdm's monitor and the kernels' threads serve the whole process. Pools of a gateway that many tests share grow when
    they are used; they end with the thread of its web server. uvloop names the threads of its loops since 0.23.
    """
    of_loops = "uvloop_" if Version(uvloop.__version__) >= Version("0.23") else "ThreadPoolExecutor-"
    shared = type(thread).__name__ == "TMonitor" or thread.name.startswith(
        ("generate_", "prepare chats_", "kernels_", of_loops)
    )
    return thread.is_alive() and thread not in before and not shared


def wait_for_none(find: Callable[[], list[Any]]) -> list[Any]:
    """The last result of `find`, which is looked at until it is empty or the grace time is over."""
    deadline = time.monotonic() + GRACE_S
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def fail_for_processes(find: Callable[[], list[psutil.Process]]) -> None:
    """Fails, naming them, if processes are left; and ends them, so that they don't disturb the next test."""
    left = wait_for_none(find)
    if not left:
        return
    lines = [f"  pid {process.pid}: {command_line(process)}" for process in left]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    pytest.fail("processes left running:\n" + "\n".join(lines), pytrace=False)


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or "(ended)"
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "(ended)"

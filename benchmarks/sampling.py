"""Where the threads of a process spend their time, by samples of their stacks.

    LocalSwarm(model, ..., program=[sys.executable, "benchmarks/sampling.py", "FILE"])

starts a server that writes FILE at each SIGUSR1: what was sampled since the last one. `Sampler` samples this process.
A sample counts for the innermost function of each thread, and for each function of swarmllm that is on its stack.
"""

import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY_S = 0.001
WAITS = ("wait", "_try_wait", "_wait_for_tstate_lock", "get", "_admit", "_read")
"""Innermost functions of threads that have nothing to do. A loop's `Runner.run` may be one of C, or waiting."""


class Sampler:
    """Samples all threads but its own until it is closed."""

    def __init__(self) -> None:
        self._innermost: Counter[str] = Counter()
        self._within: Counter[str] = Counter()
        self._samples = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def taken(self, most: int = 12) -> str:
        """Shares of all samples since the last call, in percent."""
        samples, self._samples = max(1, self._samples), 0
        innermost, self._innermost = self._innermost, Counter()
        within, self._within = self._within, Counter()
        lines = [f"{samples} samples"]
        for title, counted in (("innermost", innermost), ("within", within)):
            lines += [f"  {100 * count / samples:5.1f} % {title} {name}" for name, count in counted.most_common(most)]
        return "\n".join(lines)

    def _run(self) -> None:
        own = threading.get_ident()
        while not self._ended.wait(EVERY_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            self._samples += 1
            for ident, frame in sys._current_frames().items():
                if ident != own and frame.f_code.co_name not in WAITS:
                    self._count(names.get(ident, "?"), frame)

    def _count(self, thread: str, frame: FrameType | None) -> None:
        if frame is not None:
            self._innermost[f"{thread}: {place(frame)}"] += 1
        seen = set()
        while frame is not None:
            if "swarmllm" in frame.f_code.co_filename:
                seen.add(f"{thread}: {place(frame)}")
            frame = frame.f_back
        self._within.update(seen)


def place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}:{frame.f_lineno}"


def sampled_server(report: Path, arguments: list[str]) -> int:
    from swarmllm.server.__main__ import main

    sampler = Sampler()
    signal.signal(signal.SIGUSR1, lambda *_: report.write_text(sampler.taken()))
    return main(arguments)


if __name__ == "__main__":
    sys.exit(sampled_server(Path(sys.argv[1]), sys.argv[2:]))

"""Runs the texts of one layout after one another and says how each went. Used by the benchmark and `test_chaos`."""

import asyncio
import faulthandler
import random
import signal
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from chaos_kinds import Progress, expected, same, work
from chaos_plan import Disturbance, Text, layout, layout_of
from chaos_swarm import ChaosSwarm, DefectError, Guest, connect

from swarmllm import SwarmError
from swarmllm.errors import MissingBlocksError

HANG_S = 90.0
"""A text that takes longer hangs."""


class Verdict(Enum):
    """How a text went."""

    RIGHT = "right"
    WRONG = "wrong"
    ERROR = "error"
    HUNG = "hung"
    ENDED = "ended"
    """With the error that names the blocks that nobody served any more."""


@dataclass
class Outcome:
    """The outcome of one text."""

    text: Text
    verdict: Verdict = Verdict.RIGHT
    struck: bool = False
    """True if the disturbance came before the text was over."""
    covered: bool = True
    """True if the servers that were left covered the model."""
    victims: Sequence[int] = ()
    felt: bool = False
    """True if this client met any failure."""
    struck_at: float = 0.0
    times: list[float] = field(default_factory=list)
    detail: str = ""
    defect: str = ""
    """Mistakes of the swarm, found when it was mended."""
    took_s: float = 0.0
    mended_s: float = 0.0
    """Seconds until the layout was whole again."""

    @property
    def passed(self) -> bool:
        return not self.defect and (
            self.verdict is Verdict.RIGHT or (self.verdict is Verdict.ENDED and not self.covered)
        )

    @property
    def first_s(self) -> float:
        """Seconds to the first step's end."""
        return self.times[1] - self.times[0]

    def recovery_s(self, usual_first_s: float) -> float:
        """The longest time between two steps from the disturbance on, less the usual one."""
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        usual = statistics.median(gaps[1:]) if len(gaps) > 1 else 0.0
        extra = [gap - (usual if index else usual_first_s) for index, gap in enumerate(gaps)]
        waits = (more for more, end in zip(extra, self.times[1:], strict=True) if end >= self.struck_at)
        return max((0.0, *waits))

    def __str__(self) -> str:
        spans = " ".join(f"{start}:{end}" for start, end in layout(layout_of(self.text.number)))
        lacks = [f"not {word}" for word in ("struck", "felt", "covered") if not getattr(self, word)]
        how = ", ".join([self.verdict.value, *lacks])
        time_s = f"{self.took_s:.1f} + {self.mended_s:.1f} s"
        return f"{self.text} [{spans}] victims {list(self.victims)}: {how}, {time_s} {self.detail}{self.defect}"


class Hung(BaseException):
    """Nothing that catches errors shall catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Hung in the main thread, which it must be called from."""

    def hung(*_: object) -> None:
        raise Hung(stacks())

    before = signal.signal(signal.SIGALRM, hung)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s)


def stacks() -> str:
    """Stack traces of all threads, and what each task waits for."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return "\n".join([file.read(), *map(waiting, list(asyncio.tasks._all_tasks))])  # type: ignore[attr-defined]


def waiting(task: asyncio.Task[Any]) -> str:
    """A task, and its awaits from the outermost to the innermost."""
    places, awaited = [task.get_name()], task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = awaited.cr_await  # type: ignore[union-attr]
    return " > ".join(places)


def where(error: BaseException) -> str:
    """The error, and the way to it through our own code, with what caused it."""
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    while part is not None:
        part.stack = traceback.StackSummary.from_list([f for f in part.stack if "swarmllm" in f.filename][-8:])
        part = part.__cause__ or part.__context__
    return "\n" + "".join(shown.format())


class Striker:
    """Waits for a text's moment, and disturbs it then."""

    def __init__(self, text: Text, num_steps: int, model: Any, swarm: ChaosSwarm, guest: Guest | None) -> None:
        self.outcome = Outcome(text)
        self.progress = Progress(self._on_step)
        self._at = 0 if not text.moment else max(1, round(text.moment * num_steps))
        self._choice = random.Random(f"strike {text.number}")
        self._model, self._swarm, self._guest = model, swarm, guest
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def _on_step(self, steps: int) -> None:
        if steps != self._at or self._thread is not None:
            return
        if not self.outcome.text.delay_s and self._guest is None:
            self._strike()
        else:
            self._thread = threading.Thread(target=self._strike_later, name="striker")
            self._thread.start()

    def _strike_later(self) -> None:
        if not self._over.wait(self.outcome.text.delay_s):
            try:
                self._strike()
            except (SwarmError, DefectError, RuntimeError) as error:
                self._error = error

    def _strike(self) -> None:
        outcome = self.outcome
        outcome.struck_at, outcome.struck = time.monotonic(), True
        if self._guest is not None:
            self._guest.leave(self._choice)
        else:
            outcome.victims, outcome.covered = self._swarm.strike(outcome.text.disturbance, self._route(), self._choice)

    def _route(self) -> list[str]:
        """The servers in use, as far as one can know from outside."""
        session = self.progress.session
        route = (session.route if session is not None else None) or self._model.swarm.route()
        return [hop.server.peer_id for hop in route]

    def finish(self) -> None:
        """The text is over."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.outcome.times = self.progress.times
        if self._error is not None:
            raise self._error


def run_text(text: Text, model: Any, swarm: ChaosSwarm) -> Outcome:
    """Generate it, disturb it, compare it, and mend the swarm."""
    wanted, num_steps = expected(text.kind, text.variant)
    guest = Guest(swarm.initial_peers) if text.disturbance is Disturbance.CLIENT_LEAVES else None
    striker = Striker(text, num_steps, model, swarm, guest)
    outcome, failures = striker.outcome, model.swarm.counts.total()
    began_at = time.monotonic()
    try:
        with time_limit(HANG_S):
            got = work(model, text.kind, text.variant, striker.progress)
        if not same(got, wanted):
            outcome.verdict, outcome.detail = Verdict.WRONG, f"got {got}, wanted {wanted}"
    except Hung as hung:
        outcome.verdict, outcome.detail = Verdict.HUNG, str(hung)
    except MissingBlocksError as error:
        outcome.verdict = Verdict.ERROR if outcome.covered else Verdict.ENDED
        outcome.detail = where(error) if outcome.covered else str(error)
    except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
        outcome.verdict, outcome.detail = Verdict.ERROR, where(error)
    outcome.felt = model.swarm.counts.total() > failures
    ended_at = time.monotonic()
    outcome.took_s = ended_at - began_at
    for clean_up in (striker.finish, guest.close if guest else None, lambda: swarm.mend(model, text.disturbance)):
        try:
            if clean_up is not None:
                clean_up()
        except (DefectError, SwarmError, RuntimeError) as error:
            outcome.defect += where(error)
    outcome.mended_s = time.monotonic() - ended_at
    outcome.detail += " ".join(swarm.failed_starts)
    swarm.failed_starts.clear()
    return outcome


def run_layout(number: int, texts: Sequence[Text]) -> Iterator[Outcome]:
    """Run texts of one layout with one client; after one that hung, with a new client and new servers."""
    left = list(texts)
    while left:
        try:
            with ChaosSwarm(layout(number), number) as swarm, connect(swarm.initial_peers) as model:
                swarm.wait_until_seen(model)
                healthy = True
                while left and healthy:
                    outcome = run_text(left.pop(0), model, swarm)
                    healthy = outcome.verdict is not Verdict.HUNG and not outcome.defect
                    yield outcome
        except (DefectError, SwarmError) as error:  # the servers didn't come up, and the next text needs them
            if not left:
                raise
            yield Outcome(left.pop(0), Verdict.ERROR, detail=where(error))

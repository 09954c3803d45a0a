"""`swarmllm use`: tell the machines which models to serve, and show how they load them.

It talks to the agent of this machine (`swarmllm up`) by the HTTP API of its page, with the page's key, both from the
state directory. The screen has a line for each machine, until the model answers. Where the output is no terminal, a
line is printed at each change. Ctrl-C ends the command, not the loading.
"""

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Any

from swarmllm.command_line import Parser, run_command
from swarmllm.config import require_model_name, state_dir
from swarmllm.data_structures import printable, size_in_words
from swarmllm.errors import (
    ERRORS_BY_CODE,
    BlockWeightsNotFoundError,
    ConfigurationError,
    CorruptWeightsError,
    PeerUnreachableError,
    SwarmError,
)
from swarmllm.files import existing_path
from swarmllm.machines.state import StateDirectory
from swarmllm.server.downloads import in_background

EXAMPLES = """examples:
  swarmllm use                    # the machines, and the page's address
  swarmllm use org/name           # serve this model, and no other
  swarmllm use ~/model.gguf --add # serve this one, too
  swarmllm use --drop org/name    # serve it no more
"""
LOOK_S = 0.25
"""Seconds between two looks at the machines."""
PATIENCE_S = 10.0
"""Seconds until a model that doesn't fit is reported: machines may be joining."""
ANSWER_TIMEOUT_S = 300.0
UNUSABLE = (ConfigurationError, BlockWeightsNotFoundError, CorruptWeightsError)
"""Errors of a model's files. Trying again doesn't help, until somebody mends them. A mismatch with the swarm's weights
may pass: the servers of an earlier version are leaving."""
AS_STORED = "auto"
"""`quant_type` of models that are published in few bits."""
BAR_CHARS = 20
STEPS = 10
"""Steps of progress that are told where the output is no terminal."""


@dataclass(frozen=True, kw_only=True)
class UseConfig:
    """A command to the machines."""

    add: bool = False
    """Serve the model besides the present ones, not in their place."""
    drop: str | None = None
    """Name of a model to serve no more."""


def build_parser() -> Parser:
    """The model, and a flag for each field of UseConfig."""
    parser = Parser(
        prog="swarmllm use", description="Tell the swarm of this machine which models to serve.", epilog=EXAMPLES
    )
    parser.usage = "swarmllm use [OPTIONS] [MODEL]"
    parser.add_argument("model", nargs="?", help="hub id, directory, GGUF file, or a name of the page's list")
    parser.add_settings(UseConfig, [UseConfig])
    return parser


class Page:
    """The page of this machine's agent."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self._key = url, key
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @classmethod
    def of_this_machine(cls) -> "Page":
        """Raises: ConfigurationError: no agent has run here."""
        found = StateDirectory(state_dir()).read("page.json", {})
        url, key = found.get("url"), found.get("key")
        if not isinstance(url, str) or not isinstance(key, str):
            raise ConfigurationError("this machine is in no swarm yet: start `swarmllm up` first")
        return cls(url, key)

    @property
    def address(self) -> str:
        """The address that a browser opens to give commands."""
        return f"{self.url}#key={self._key}"

    async def get(self, path: str) -> dict[str, Any]:
        """Raises: SwarmError: the agent doesn't run, or refuses."""
        return _accepted(*await self.ask(path))

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises: SwarmError: the agent doesn't run, or refuses."""
        return _accepted(*await self.ask(path, body))

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Send a request; returns the status and the answer.

        Raises:
            PeerUnreachableError: the agent doesn't run.
        """
        return await in_background(partial(self._ask, path, body))  # the command's end doesn't wait for the agent

    def _ask(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
        try:
            with self._opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            has_ended = isinstance(reason, ConnectionRefusedError)
            why = ", because it has ended" if has_ended else f" ({getattr(reason, 'strerror', None) or reason})"
            raise PeerUnreachableError(
                f"the agent of this machine doesn't answer at {self.url}{why}: start `swarmllm up`"
            ) from None


def _accepted(status: int, answer: bytes) -> dict[str, Any]:
    """The JSON of an answer.

    Raises:
        SwarmError: it is an error.
    """
    if status >= 400:
        message, kind = _told(answer)
        raise (ConfigurationError if status == 400 else kind)(message)
    found: dict[str, Any] = json.loads(answer)
    return found


def _told(body: bytes) -> tuple[str, type[SwarmError]]:
    """The sentence in an answer that is an error, and its class if it says that the model's files can't be used."""
    try:
        error = json.loads(body)["error"]
        message, code = (error["message"], error.get("code")) if isinstance(error, dict) else (error, None)
    except (ValueError, KeyError, TypeError):
        return printable(body[:200].decode(errors="replace")) or "the agent refused it", SwarmError
    kind = ERRORS_BY_CODE.get(str(code), SwarmError)
    return printable(str(message)), kind if issubclass(kind, UNUSABLE) else SwarmError


# --- the screen


class Screen:
    """Lines that replace each other on a terminal; elsewhere only new ones are printed."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._height = 0
        self._told: set[str] = set()

    def show(self, lines: Sequence[str], told: Sequence[str]) -> None:
        """Show `lines` on a terminal, `told` elsewhere, where bars would fill pages."""
        if self._is_terminal:
            up = f"\x1b[{self._height}A" if self._height else ""
            print(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[J", end="", flush=True)
            self._height = len(lines)
            return
        for line in told:
            if line not in self._told:
                self._told.add(line)
                print(line, flush=True)


def machine_lines(picture: dict[str, Any], *, bars: bool = True) -> list[str]:
    """A line for each machine and each part of a model that it holds."""
    width = max((len(printable(one["name"])) for one in picture["machines"]), default=0)
    lines = []
    for machine in sorted(picture["machines"], key=lambda one: (not one["is_here"], one["name"])):
        name = printable(machine["name"]).ljust(width)
        hosted = [_hosted_line(one, bars=bars) for one in machine["hosted"]]
        lines += [f"  {name}  {text}" for text in hosted or [f"offers {size_in_words(machine['memory_bytes'])}"]]
    return lines


def _hosted_line(hosted: dict[str, Any], *, bars: bool) -> str:
    state, done, total = hosted["state"], hosted["done_bytes"], hosted["total_bytes"]
    blocks = "" if state == "failed" else f" {hosted['start']}:{hosted['end']}"
    text = f"{printable(hosted['model'])}{blocks} {state}"
    if state in ("fetching", "waiting") and total:
        share = min(1.0, done / total)
        if bars:
            filled = round(share * BAR_CHARS)
            text += f" [{'#' * filled}{'.' * (BAR_CHARS - filled)}] {size_in_words(done)} of {size_in_words(total)}"
        else:
            text += f" {int(share * STEPS) * 100 // STEPS} % of {size_in_words(total)}"
    if state == "online" and hosted["bytes_from_machines"] + hosted["bytes_from_hub"]:
        machines, hub = size_in_words(hosted["bytes_from_machines"]), size_in_words(hosted["bytes_from_hub"])
        text += f", {machines} came from machines, {hub} from the hub"
    return f"{text}: {printable(hosted['problem'])}" if hosted["problem"] else text


def model_line(model: dict[str, Any]) -> str:
    """The state of a model in one line."""
    text = f"{printable(model['name'])}: {model['state']}"
    if model["state"] == "does not fit":
        missing = model["missing_bytes"]
        text += (
            f", {size_in_words(missing)} of memory are missing"
            if missing
            else ", because each machine has to hold whole blocks"
        )
    if model["one_tokens_per_s"]:
        quant_type = "as it is stored" if model["quant_type"] == AS_STORED else printable(model["quant_type"])
        text += f", {quant_type}, about {model['one_tokens_per_s']:.3g} tokens/s expected"
    return f"{text}: {printable(model['problem'])}" if model["problem"] else text


# --- the command


async def use(page: Page, model: str, *, add: bool) -> None:
    """Give the command, and show the machines until the model answers.

    Raises:
        SwarmError: the agent refuses, or the model doesn't fit.
    """
    began_at = time.monotonic()
    place = existing_path(model)
    given = await page.post(
        "/api/machines/use", {"model": model if place is None else str(place.resolve()), "add": add}
    )
    wanted = given["wanted"][-1]
    print(f"swarmllm: command {given['number']}: {printable(given['what'])}", flush=True)
    await _watch(page, wanted["manifest"], began_at)
    await _first_answer(page, wanted["name"])
    print(f"swarmllm: {printable(wanted['name'])} answers after {time.monotonic() - began_at:.1f} s", flush=True)
    print(f"swarmllm: open {page.address}", flush=True)


async def _watch(page: Page, manifest: str, began_at: float) -> None:
    """Show the machines until the model is ready."""
    screen = Screen()
    while True:
        picture = await page.get("/api/machines")
        model = next((one for one in picture["models"] if one["manifest"] == manifest), None)
        if model is None:
            raise SwarmError("another command came meanwhile: the swarm doesn't serve this model any more")
        head = model_line(model)
        screen.show([head, *machine_lines(picture)], [head, *machine_lines(picture, bars=False)])
        if model["state"] == "ready":
            return
        if model["state"] == "does not fit" and time.monotonic() - began_at > PATIENCE_S:
            raise SwarmError(
                f"{head}; add a machine (`swarmllm up` there), or offer more (--max_memory). "
                "The model is loaded as soon as it fits"
            )
        await asyncio.sleep(LOOK_S)


async def _first_answer(page: Page, name: str) -> None:
    """Return when the model has answered a request.

    Raises:
        SwarmError: it can't be opened, or didn't answer in time.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        status, answer = await page.ask("/v1/completions", {"model": name, "prompt": "Hello", "max_tokens": 1})
        if status in (200, 400):  # 400: it does something else than to write text
            return
        if time.monotonic() > deadline or issubclass(_told(answer)[1], UNUSABLE):
            _accepted(status, answer)
        await asyncio.sleep(LOOK_S)


async def show(page: Page) -> None:
    """Print the machines, the models, and the page's address."""
    picture = await page.get("/api/machines")
    print("\n".join([*map(model_line, picture["models"]), *machine_lines(picture)]))
    print(f"swarmllm: open {page.address}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    async def run() -> None:
        settings = build_parser().parse_settings(argv)
        model = settings.pop("model", None)
        config = UseConfig(**settings)
        if config.drop is not None and (model is not None or config.add):
            raise ConfigurationError("give a model to use, or one to --drop")
        if config.add and model is None:
            raise ConfigurationError("name the model to add")
        if model is not None:
            require_model_name(model)
        page = Page.of_this_machine()
        if config.drop is not None:
            given = await page.post("/api/machines/drop", {"name": config.drop})
            print(f"swarmllm: command {given['number']}: {printable(given['what'])}")
        elif model is not None:
            await use(page, model, add=config.add)
        else:
            await show(page)

    return run_command(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())

"""`python -m swarmllm.demo`: a whole swarm on this machine tells a story, and a server is killed on the way.

There are three server processes, two of them with the same blocks. In the middle of the story, one of these two is
killed while it is in use. The other takes over, and in the end every token equals the local model's.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

from swarmllm.command_line import Parser, Patience, run_program
from swarmllm.data_structures import RouteHop, SwarmSnapshot
from swarmllm.demo.local_swarm import LocalServer, LocalSwarm
from swarmllm.errors import ConfigurationError
from swarmllm.swarm.block_map import describe_coverage, describe_swarm, short_peer_id, terminal_width

if TYPE_CHECKING:
    from torch import Tensor

KILL_AFTER_TOKENS = 40
"""In the middle of the story, late enough that caches are worth rebuilding."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The demo's story and model."""

    prompt: str = "Once upon a time"
    """The beginning of the story."""
    max_new_tokens: int = 120
    """Length of the story in tokens. Assumed: half a screen, a few seconds."""
    model: str | None = None
    """Hub id or directory; None = the model that comes with swarmllm."""

    def __post_init__(self) -> None:
        if self.max_new_tokens <= KILL_AFTER_TOKENS:
            raise ConfigurationError(
                f"max_new_tokens must be more than {KILL_AFTER_TOKENS}, after which a server is killed, "
                f"not {self.max_new_tokens}"
            )
        if not self.prompt.strip():
            raise ConfigurationError("the prompt is empty; give at least one word")


@dataclass
class Story:
    """A streamer for `generate()` that prints the text as it comes and notes the time of each token."""

    tokenizer: Any
    on_token: Callable[[int], None]
    """Called after each token with the number of tokens so far."""
    came_at: list[float] = field(default_factory=list)
    """Seconds of each token."""

    def __post_init__(self) -> None:
        from transformers import TextStreamer

        self._text = TextStreamer(self.tokenizer, skip_special_tokens=True)
        self._prompt_is_over = False

    def put(self, value: "Tensor") -> None:
        """Takes the prompt first, then each token."""
        self._text.put(value)
        if self._prompt_is_over:
            self.came_at.append(time.monotonic())
            self.on_token(len(self.came_at))
        self._prompt_is_over = True

    def end(self) -> None:
        """The story is over."""
        self._text.end()

    def gaps_s(self) -> list[float]:
        """Seconds between each token and the next."""
        return [b - a for a, b in zip(self.came_at, self.came_at[1:], strict=False)]

    def usual_gap_s(self) -> float:
        """Mean time between two tokens, without the longest gap, in which a server is replaced.

        Not the median: right guesses come in bunches, and most gaps are inside a bunch.
        """
        return mean(sorted(self.gaps_s())[:-1])

    def longest_wait_s(self, after_tokens: int) -> float:
        """Longest time without a token after so many tokens. The next one may have been computed together with the
        last."""
        return max(self.gaps_s()[after_tokens - 1 :])


@dataclass
class Accident:
    """The killed server: its blocks, the number of tokens before, and the routes before and after."""

    server: LocalServer
    pid: int
    after_tokens: int
    route: list[RouteHop]
    route_after: list[RouteHop] = field(default_factory=list)


def tell_locally(model: str, prompt: str, options: dict[str, Any]) -> tuple["Tensor", float]:
    """Tell the same story without a swarm: all token ids `[seq]`, and tokens per second."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt")
    local = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    started_at = time.monotonic()
    ids = local.generate(**inputs, **options)[0]
    num_tokens = len(ids) - inputs.input_ids.shape[1]
    return ids, num_tokens / (time.monotonic() - started_at)


def run_demo(config: DemoConfig) -> int:
    """Start, tell, kill, compare. Returns 0 if every token equals the local model's."""
    with Patience(_say) as patience:
        return _run(config, patience)


def _run(config: DemoConfig, patience: Patience) -> int:
    _say("Importing PyTorch and transformers …")
    patience.wait_for(lambda: "importing PyTorch and transformers")
    model = config.model
    if model is None:
        from swarmllm.demo.local_swarm import embedded_model_path

        model = os.fspath(embedded_model_path())
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint

    num_blocks = open_checkpoint(model).num_blocks
    middle = num_blocks // 2
    spans = [(0, middle), (middle, num_blocks), (middle, num_blocks)]
    options = {"max_new_tokens": config.max_new_tokens, "min_new_tokens": KILL_AFTER_TOKENS + 1, "do_sample": False}
    _say(f"A swarm on this machine: {num_blocks} blocks on {len(spans)} server processes, the second half twice.")
    _say("Starting them; most of that is importing PyTorch, once in each …")
    swarm = LocalSwarm(model, spans, num_threads=1, dtype="float32", quant_type="none")
    patience.wait_for(lambda: f"{sum(bool(one.maddrs) for one in swarm.servers)} of {len(spans)} servers are up")
    with ThreadPoolExecutor(1, "local model") as alongside, swarm:
        patience.wait_for(lambda: "the local model tells the story first, to compare with")
        local = alongside.submit(_quietly, lambda: tell_locally(model, config.prompt, options))
        local_ids, local_tokens_per_s = local.result()
        ids, story, accident = _tell_in_swarm(model, config, options, swarm, patience)
        equal = ids.tolist() == local_ids.tolist()
        _say("\nWhat happened:")
        if accident is not None:
            _say("\n".join(f"  - {line}" for line in _describe_accident(accident, story)))
        _say(
            f"  - {len(story.came_at)} tokens in all, usually {1 / story.usual_gap_s():.0f} tokens/s; "
            f"the local model alone: {local_tokens_per_s:.0f} tokens/s."
        )
        _say(f"  - Compared with the local model: {'every token is equal' if equal else 'the tokens are NOT equal'}.")
        _say(f"\nThe demo took {patience.elapsed_s:.1f} s.")
    return 0 if equal else 1


def _quietly(tell: Callable[[], Any]) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)  # as many as a server has
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return tell()


def _tell_in_swarm(
    model: str, config: DemoConfig, options: dict[str, Any], swarm: LocalSwarm, patience: Patience
) -> tuple["Tensor", Story, Accident | None]:
    """Tell the story token by token, and note what happens to a server meanwhile."""
    from transformers import AutoTokenizer

    from swarmllm.client.distributed_model import AutoDistributedModel

    patience.wait_for(lambda: "the client joins the swarm")
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(config.prompt, return_tensors="pt")
    accident: Accident | None = None
    with (
        AutoDistributedModel.from_pretrained(
            model, initial_peers=swarm.initial_peers, dtype="float32", progress=False
        ) as remote,
        remote.inference_session(max_length=inputs.input_ids.shape[1] + config.max_new_tokens) as session,
    ):
        patience.wait_for(None)
        _say(f"Everything is up after {patience.elapsed_s:.1f} s. Who serves what:\n")
        _say_who_serves(SwarmSnapshot(remote.swarm.num_blocks, tuple(remote.swarm.servers())))
        _say("\nThe story, token by token:\n")

        def kill_a_server(num_tokens: int) -> None:
            nonlocal accident
            if num_tokens != KILL_AFTER_TOKENS:
                return
            route = list(session.route)
            victim = next(server for server in swarm.servers if server.peer_id == route[-1].server.peer_id)
            accident = Accident(victim, victim.pid, num_tokens, route)
            victim.kill()
            _say(f"\n\n    *** server {short_peer_id(victim.peer_id)} is killed here ***\n")

        story = Story(tokenizer, kill_a_server)
        ids = remote.generate(**inputs, streamer=story, **options)[0]
        if accident is not None:
            accident.route_after = list(session.route)
    return ids, story, accident


def _say_who_serves(snapshot: SwarmSnapshot) -> None:
    width = terminal_width()
    _say(
        "\n".join(f"  {line}" for line in [*describe_swarm(snapshot, width and width - 2), describe_coverage(snapshot)])
    )


def _describe_accident(accident: Accident, story: Story) -> list[str]:
    """Say which server was killed, who took over, and how long it took."""
    killed = short_peer_id(accident.server.peer_id)
    lost = next(hop.span for hop in accident.route if hop.server.peer_id == accident.server.peer_id)
    before = {hop.server.peer_id for hop in accident.route}
    heirs = [
        f"{short_peer_id(hop.server.peer_id)} {hop.span}"
        for hop in accident.route_after
        if hop.server.peer_id not in before
    ]
    wait_ms, usual_gap_ms = story.longest_wait_s(accident.after_tokens) * 1000, story.usual_gap_s() * 1000
    return [
        f"After {accident.after_tokens} tokens server {killed} (process {accident.pid}) was killed with SIGKILL.",
        f"Its blocks {lost} went to {' and '.join(heirs)}, whose caches were rebuilt from what the others had kept.",
        f"The text stood still for {wait_ms:.0f} ms at most after that; {usual_gap_ms:.1f} ms a token are usual.",
    ]


def _say(text: str) -> None:
    print(text, flush=True)


def build_parser() -> Parser:
    """A flag for each field of DemoConfig except the prompt."""
    parser = Parser(
        prog="swarmllm demo",
        description="A swarm on this machine tells a story, and one of its servers is killed.",
        epilog='example:\n  swarmllm demo "Once upon a time"\n',
    )
    parser.add_argument("prompt", nargs="?", help="beginning of the story")
    parser.add_settings(DemoConfig, [DemoConfig], without=["prompt"])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    def run() -> int:
        settings = build_parser().parse_settings(argv)
        return run_demo(DemoConfig(**settings))

    return run_program(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())

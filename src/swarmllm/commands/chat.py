"""`swarmllm chat`: a conversation with a model of the swarm, whose servers keep it in their KV caches."""

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from swarmllm.client.text_generation import Conversation, TextConfig, open_model
from swarmllm.command_line import Parser, one_line, run_program
from swarmllm.config import (
    ClientConfig,
    ModelConfig,
    SwarmConfig,
    require_addresses,
    require_model_place,
    require_positive,
)
from swarmllm.decoding.options import DecodingOptions
from swarmllm.errors import SwarmError

COMMANDS = "/clear forgets the conversation, /exit ends, /help says this; all else goes to the model"
EXAMPLES = """while chatting:
  /clear  forgets the conversation
  /exit   ends, as Ctrl-D does; Ctrl-C ends the model's turn

example:
  swarmllm chat --model M --initial_peers MADDR --temperature 0.7
"""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(TextConfig):
    """A conversation."""

    max_length: int = 2048
    """Tokens of the whole conversation, kept in the servers' caches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "max_length")


class CtrlC:
    """While entered, the first Ctrl-C asks `generate()` to stop after the token under way; a second one interrupts."""

    def __init__(self) -> None:
        self.pressed = False
        self._previous: Any = None

    def __enter__(self) -> "CtrlC":
        self.pressed = False
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, self._previous)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """As one of transformers' stopping criteria: `[batch]` of bool."""
        import torch

        return torch.full(input_ids.shape[:1], self.pressed, dtype=torch.bool, device=input_ids.device)


def build_parser() -> Parser:
    """A flag for each field of ChatConfig."""
    parser = Parser(prog="swarmllm chat", description="A conversation with a model of the swarm.", epilog=EXAMPLES)
    parser.add_settings(ChatConfig, [ModelConfig, SwarmConfig, ChatConfig], TextConfig, ClientConfig, DecodingOptions)
    return parser


def chat(config: ChatConfig) -> int:
    """Talk until standard input ends or says /exit; the exit code."""
    interactive = sys.stdin.isatty()
    model, tokenizer = open_model(config, seed=config.seed)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    max_length = min(config.max_length, positions or config.max_length)
    with model, model.inference_session(max_length=max_length) as session:
        conversation = Conversation(model, tokenizer, session, config.generation_options())
        if interactive:
            print(f"{config.model}, {max_length} tokens; /help says what can be typed", file=sys.stderr)
        for said in _lines(interactive):
            if said == "/exit":
                break
            if said == "/clear":
                conversation.clear()
            elif said.startswith("/"):
                print(COMMANDS if said == "/help" else f"there is no {said.split()[0]}; {COMMANDS}", file=sys.stderr)
            elif said:
                try:
                    _reply(conversation, tokenizer, said, interactive)
                except SwarmError as error:
                    if not interactive:
                        raise
                    print(f"swarmllm: {one_line(error)} (/clear forgets the conversation)", file=sys.stderr)
    return 0


def _reply(conversation: Conversation, tokenizer: Any, said: str, interactive: bool) -> None:
    from transformers import StoppingCriteriaList, TextStreamer

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if not interactive:
        conversation.reply(said, streamer=streamer)
        return
    with CtrlC() as ctrl_c:
        conversation.reply(said, streamer=streamer, stopping_criteria=StoppingCriteriaList([ctrl_c]))


def _lines(interactive: bool) -> Iterator[str]:
    """What the user says, line by line."""
    if not interactive:
        yield from map(str.strip, sys.stdin)
        return
    import readline  # noqa: F401  gives input() its line editing and history

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""

    def run() -> int:
        config = ChatConfig(**build_parser().parse_settings(argv))
        require_model_place(config.model)
        require_addresses(config.initial_peers)
        return chat(config)

    return run_program(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())

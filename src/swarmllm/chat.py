"""`swarmllm chat`: a conversation with a model of the swarm, whose servers keep it in their KV caches."""

import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from swarmllm.client.generation import Conversation, TextConfig, add_text_flags, open_model
from swarmllm.command_line import Parser, one_line, run_program
from swarmllm.errors import SwarmError

COMMANDS = "/clear forgets the conversation, /exit ends, /help says this; all else goes to the model"
EXAMPLES = """while chatting:
  /clear  forgets the conversation
  /exit   ends, as Ctrl-D does; Ctrl-C ends the model's turn

example:
  swarmllm chat --model M --initial_peers /ip4/…/tcp/…/p2p/… --temperature 0.7
"""


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
    """Flags named as the fields of TextConfig, which give their defaults."""
    parser = Parser(prog="swarmllm chat", description="A conversation with a model of the swarm.", epilog=EXAMPLES)
    add_text_flags(parser)
    parser.add_argument("--max_length", type=int, metavar="N", help="most tokens of the whole conversation")
    return parser


def chat(config: TextConfig) -> int:
    """Talk until standard input ends or says /exit; the exit code."""
    interactive = sys.stdin.isatty()
    model, tokenizer = open_model(config)
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
        settings = build_parser().parse_settings(sys.argv[1:] if argv is None else argv)
        return chat(TextConfig(**settings))

    return run_program(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())

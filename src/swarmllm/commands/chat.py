"""`swarmllm chat`: a conversation with a model of the swarm. The servers keep it in their KV caches."""

import json
import signal
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from swarmllm.client.text_generation import (
    Conversation,
    TextConfig,
    answer_streamer,
    context_length,
    open_model,
    with_model_here,
)
from swarmllm.command_line import Parser, one_line, run_program
from swarmllm.config import (
    ClientConfig,
    ClientModelConfig,
    ModelConfig,
    SwarmConfig,
    address_book_path,
    require_addresses,
    require_model_place,
    require_positive,
)
from swarmllm.decoding.options import DecodingOptions
from swarmllm.errors import SwarmError
from swarmllm.files import user_path
from swarmllm.network.wire.messages import MAX_POSITION

COMMANDS = (
    "/clear forgets the conversation, /system TEXT begins one with a system prompt, /save FILE writes it as JSON, "
    "/model NAME changes to another model, /exit ends, /help says this; Ctrl-C ends the model's turn, Ctrl-D the chat; "
    "all else goes to the model, and a line that ends with \\ goes on in the next one"
)
ENDS = ("/exit", "/quit", "/bye")
"""The last two are the names in other programs."""
FIRST_LENGTH = 2048
"""Tokens for which servers reserve room at first. It grows with the conversation."""
MOST_REMEMBERED = 1000
"""Most lines in the history."""
EXAMPLES = """while chatting:
  /clear         forgets the conversation
  /system TEXT   begins a new one with a system prompt
  /save FILE     writes it as JSON
  /model NAME    changes to another model
  /exit          ends, as Ctrl-D does; Ctrl-C ends the model's turn
  a line that ends with \\ goes on in the next one

example:
  swarmllm chat --model M --initial_peers ADDRESS --temperature 0.7
"""

COMMON = (
    "model", "initial_peers", "max_length", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "dtype",
    "device", "identity_path", "active_adapter", "local_blocks", "speculation", "fallback_to_local",
)  # fmt: skip
"""Flags that `--help` shows."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(TextConfig):
    """The conversation."""

    max_length: int | None = None
    """Most tokens of the whole conversation. Without it: the model's context. Servers make room as the conversation
    grows."""
    max_new_tokens: int | None = None
    """Most tokens of one answer. Without it: as many as the conversation has room for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "max_length")


class CtrlC:
    """While entered, the first Ctrl-C asks `generate()` to stop after the current token. The second one interrupts."""

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
        """A stopping criterion of transformers: `[batch]` of bool."""
        import torch

        return torch.full(input_ids.shape[:1], self.pressed, dtype=torch.bool, device=input_ids.device)


def build_parser() -> Parser:
    """A flag for each field of ChatConfig."""
    description = "Chat with a model of the swarm."
    parser = Parser(prog="swarmllm chat", description=description, epilog=EXAMPLES, common=COMMON)
    parser.add_settings(
        ChatConfig, [ModelConfig, ClientModelConfig, SwarmConfig, ChatConfig], TextConfig, ClientConfig, DecodingOptions
    )
    return parser


def chat(config: ChatConfig) -> int:
    """Talk until standard input ends or the user leaves; return the exit code."""
    interactive = sys.stdin.isatty()
    before = config
    with closing(_lines(interactive)) as lines:
        while True:
            try:
                other = _talk(config, lines, interactive)
            except _NotOpenedError as failed:
                if not interactive or config is before:
                    raise failed.error from None
                print(f"swarmllm: {one_line(failed.error)}; back to {before.model}", file=sys.stderr)
                other = before.model
            if other is None:
                return 0
            before, config = config, replace(config, model=other)


class _NotOpenedError(Exception):
    """The model can't be opened, or the swarm can't be joined."""

    def __init__(self, error: SwarmError) -> None:
        super().__init__(str(error))
        self.error = error


def _talk(config: ChatConfig, lines: Iterable[str], interactive: bool) -> str | None:
    """Run one conversation. Returns the model of the next one; None: the chat is over."""
    try:
        require_model_place(config.model)
        model, tokenizer = open_model(config, seed=config.seed)
    except SwarmError as error:
        raise _NotOpenedError(error) from None
    context = context_length(model) or MAX_POSITION
    max_length = min(config.max_length or context, context)
    with model, model.remote_blocks.new_session(1, min(max_length, FIRST_LENGTH), grows=True) as session:
        conversation = Conversation(model, tokenizer, session, config.generation_options(), max_length=max_length)
        if interactive:
            print(f"{config.model}, {max_length} tokens; /help says what can be typed", file=sys.stderr)
        for said in lines:
            if said.startswith("/"):
                name, _, words = said.partition(" ")
                if name in ENDS:
                    return None
                if name == "/model" and words.strip():
                    return words.strip()
                print(_obey(name, words.strip(), conversation, config), end="", file=sys.stderr)
            elif said:
                try:
                    _reply(conversation, tokenizer, said, interactive)
                except SwarmError as error:
                    if not interactive:
                        raise
                    print(f"swarmllm: {one_line(error)} (/clear forgets the conversation)", file=sys.stderr)
    return None


def _obey(name: str, words: str, conversation: Conversation, config: ChatConfig) -> str:
    """Obey a line that is a command, and return the reply to print."""
    try:
        if name == "/clear":
            conversation.clear()
            return ""
        if name == "/model":
            return f"{config.model}\n"
        if name == "/system":
            if words:
                conversation.instruct(words)
            return f"{conversation.system or 'there is no system prompt'}\n"
        if name == "/save":
            if not words:
                return "say where: /save FILE\n"
            text = json.dumps(conversation.messages, ensure_ascii=False, indent=1)
            with user_path(words).open("x", encoding="utf-8") as file:
                file.write(text + "\n")
            return f"saved {len(conversation.messages)} messages to {words}\n"
    except FileExistsError:
        return f"there is a file {words} already: choose another name\n"
    except OSError as error:
        return f"can't write {words}: {error.strerror}\n"
    except SwarmError as error:
        return f"{one_line(error)}\n"
    return f"{COMMANDS}\n" if name == "/help" else f"there is no {name}; {COMMANDS}\n"


def _reply(conversation: Conversation, tokenizer: Any, said: str, interactive: bool) -> None:
    from transformers import StoppingCriteriaList

    streamer = answer_streamer(tokenizer)
    if interactive:
        with CtrlC() as ctrl_c:
            conversation.reply(said, streamer=streamer, stopping_criteria=StoppingCriteriaList([ctrl_c]))
    else:
        conversation.reply(said, streamer=streamer)
    if conversation.cut:
        print(f"swarmllm: the answer was cut: {conversation.cut}", file=sys.stderr)


_MARK = "\ufeff"
"""UTF-8's byte order mark, which some editors write at the beginning of a file."""


def _lines(interactive: bool) -> Generator[str, None, None]:
    """The user's lines. A line that ends with a backslash continues in the next one."""
    said: list[str] = []
    with closing(_typed() if interactive else (line.rstrip().removeprefix(_MARK) for line in sys.stdin)) as typed:
        for line in typed:
            said.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                yield "\n".join(said).strip()
                said = []
    if said:
        yield "\n".join(said).strip()


def _typed() -> Generator[str, None, None]:
    """Lines from a terminal, with editing and the history of earlier conversations."""
    import readline

    history = address_book_path().with_name("chat_history")
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(MOST_REMEMBERED)
    try:
        while True:
            try:
                yield input("> ").rstrip()
            except EOFError:
                print()
                return
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)  # private to this user
            readline.write_history_file(history)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    def run() -> int:
        config = ChatConfig(**build_parser().parse_settings(with_model_here(argv)))
        require_addresses(config.initial_peers)
        return chat(config)

    return run_program(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())

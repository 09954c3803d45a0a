"""`swarmllm generate`: print text from a swarm as it is generated."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from swarmllm.client.text_generation import TextConfig, context_length, open_model, with_model_here
from swarmllm.command_line import Parser, read_stdin, run_program
from swarmllm.config import (
    ClientConfig,
    ClientModelConfig,
    ModelConfig,
    SwarmConfig,
    require_addresses,
    require_model_place,
)
from swarmllm.decoding.options import DecodingOptions
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.invite import is_invite

logger = logging.getLogger(__name__)

SHORTEST_PEER_ID = 40
EXAMPLES = """examples:
  swarmllm generate --model M --initial_peers ADDRESS "Once upon a time"
  echo "Once upon a time" | swarmllm generate --model M --seed 1
"""

COMMON = (
    "model", "initial_peers", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "dtype", "device",
    "identity_path", "active_adapter", "local_blocks", "speculation", "fallback_to_local",
)  # fmt: skip
"""Flags that `--help` shows."""


def build_parser() -> Parser:
    """A flag for each field of TextConfig, and the prompt."""
    description = "Print text from a swarm while it is generated."
    parser = Parser(prog="swarmllm generate", description=description, epilog=EXAMPLES, common=COMMON)
    parser.usage = "swarmllm generate [OPTIONS] [PROMPT]"
    parser.add_argument("prompt", nargs="?", help="beginning of the text; default: standard input")
    parser.add_settings(
        TextConfig, [ModelConfig, ClientModelConfig, SwarmConfig], TextConfig, ClientConfig, DecodingOptions
    )
    return parser


def parse_prompt(argv: Sequence[str] | None) -> tuple[TextConfig, str | None]:
    """The settings, and the prompt if there is one on the command line.

    Raises:
        ConfigurationError, SystemExit(2): they can't work.
    """
    settings = build_parser().parse_settings(with_model_here(argv))
    prompt = settings.pop("prompt", None)
    for name in ("initial_peers", "allowed_servers", "blocked_servers"):
        peers = settings.get(name, [])
        if prompt is None and len(peers) > 1 and not _names_peer(peers[-1]):
            prompt = peers.pop()  # in `--initial_peers A B "prompt"` argparse takes everything for addresses
            if _names_peer(peers[0]) and not _names_peer(peers[-1]):
                raise ConfigurationError(f"there is no place for {prompt!r}: is it part of a text that needs quotes?")
    if prompt is not None:  # bytes that aren't UTF-8 become surrogates, which tokenizers refuse
        prompt = prompt.encode(errors="surrogateescape").decode(errors="replace")
    config = TextConfig(**settings)
    require_model_place(config.model)
    require_addresses(config.initial_peers)
    return config, prompt


def _names_peer(word: str) -> bool:
    return word.startswith("/") or is_invite(word) or (word.isalnum() and len(word) >= SHORTEST_PEER_ID)


def generate(config: TextConfig, prompt: str) -> None:
    """Stream the prompt and its continuation to standard output."""
    model, tokenizer = open_model(config, seed=config.seed)
    from transformers import TextStreamer  # open_model announces the slow imports

    with model:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        options = config.generation_options()
        options["max_new_tokens"] = _tokens_left(model, inputs.input_ids.shape[1], config.max_new_tokens)
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
        try:
            model.generate(
                inputs.input_ids,
                attention_mask=inputs.attention_mask,
                streamer=streamer,
                tokenizer=tokenizer,
                **options,
            )
        except SwarmError:
            streamer.end()  # end the line of the text so far, so that the error begins a line of its own
            raise


def _tokens_left(model: Any, num_tokens: int, wanted: int | None) -> int | None:
    """Tokens to write after a prompt of so many: what is wanted, up to the end of the model's context.

    Raises:
        ConfigurationError: the prompt is longer than that.
    """
    context = context_length(model)
    if context is None or model.config.is_encoder_decoder:  # whose text has positions of its own
        return wanted
    if num_tokens >= context:
        raise ConfigurationError(
            f"the model's maximum is {context} tokens, but the prompt has {num_tokens}: shorten the prompt"
        )
    left = context - num_tokens
    if wanted is not None and wanted > left:
        logger.warning("at most %d tokens follow this prompt: the model's maximum is %d", left, context)
    return left if wanted is None else min(wanted, left)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""

    def run() -> None:
        config, prompt = parse_prompt(argv)
        if prompt is None:
            if sys.stdin.isatty():
                raise ConfigurationError('give a prompt, like swarmllm generate … "Once upon a time"')
            prompt = read_stdin().rstrip("\n")
        if not prompt.strip():
            raise ConfigurationError("the prompt is empty; give at least one word")
        generate(config, prompt)

    return run_program(run, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())

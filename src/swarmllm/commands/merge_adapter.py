"""`swarmllm adapters merge`: a saved adapter of peft becomes a part of its base model's weights, block by block.

Never more than one block is in memory, so the model may be one that this machine couldn't run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmllm.command_line import Parser, run_program
from swarmllm.config import default_cache_dir, hub_token
from swarmllm.errors import ConfigurationError
from swarmllm.files import user_path

EXAMPLES = """examples:
  swarmllm adapters merge --adapter runs/persona/adapter --base ./my-model --output ./my-pirate
  swarmllm adapters merge --adapter me/poet --base owner/model --output ./poet
"""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What is merged into what."""

    adapter: str = ""
    """Directory or hub id of the adapter, as peft saves it (required)."""
    base: str = ""
    """Directory or hub id of the model that it was trained on, with weights in 16 or 32 bits (required)."""
    output: str = ""
    """New directory for the merged model, which has the base's dtype (required)."""
    token: str | None = field(default_factory=hub_token, repr=False)
    """Hub token, for private repositories."""

    def __post_init__(self) -> None:
        for name in ("adapter", "base", "output"):
            if not getattr(self, name):
                raise ConfigurationError(f"--{name} is required, like {EXAMPLES.splitlines()[1].strip()}")


def merge(settings: Merge) -> None:
    """Write the merged model, with the tokenizer of its base.

    Raises:
        SwarmError: it can't be done.
    """
    from transformers.utils import logging

    from swarmllm.models.adapters.merging import merge_adapter
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint
    from swarmllm.models.checkpoint.sources import find_source

    logging.disable_progress_bar()  # of each part of its own
    where = {"revision": None, "token": settings.token, "cache_dir": default_cache_dir()}
    checkpoint = open_checkpoint(settings.base, **where)
    adapter = find_source(settings.adapter, **where)
    output = user_path(settings.output)
    merge_adapter(checkpoint, adapter, output, lambda done: print(f"merged {done}", file=sys.stderr, flush=True))
    print(f"{output} is {checkpoint.public_name} with {adapter.public_name}")


def build_parser() -> Parser:
    """A flag for each field of Merge."""
    parser = Parser(
        prog="swarmllm adapters merge",
        description="Merge an adapter into its base model, without holding the model in memory.",
        epilog=EXAMPLES,
    )
    parser.add_settings(Merge, [Merge])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    return run_program(lambda: merge(Merge(**build_parser().parse_settings(argv))), default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())

"""`swarmllm adapters` lists adapters and heads that others trained on a swarm and shared on the hub.

It finds them by the tags of their cards, which `client/saving` writes into its own and (through `model_tags`) peft's.

`swarmllm adapters merge` adds a saved adapter of peft to the weights of its base model, block by block. At most one
block is in memory, so the model may be too large for this machine to run.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmllm.command_line import Parser, run_program
from swarmllm.config import default_cache_dir, hub_token, in_file, require_positive
from swarmllm.data_structures import printable
from swarmllm.errors import ConfigurationError, SwarmError
from swarmllm.files import user_path

EXAMPLES = """examples:
  swarmllm adapters --base bigscience/bloom --task text-classification
  swarmllm adapters --base ./my-model --json
  swarmllm adapters merge --adapter me/poet --base ./my-model --output ./my-poet
"""
MERGE_EXAMPLES = """examples:
  swarmllm adapters merge --adapter runs/persona/adapter --base ./my-model --output ./my-pirate
  swarmllm adapters merge --adapter me/poet --base owner/model --output ./poet
"""
TASKS = (
    "text-generation",
    "text-classification",
    "token-classification",
    "question-answering",
    "fill-mask",
    "feature-extraction",
)
"""The hub's names. `models/architecture` maps them to classes."""
SWARM_TAG = "swarmllm"


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search."""

    base: str | None = None
    """Hub id of the base model, or a directory with its files; None = any. A directory is identified by its
    fingerprint."""
    task: str | None = None
    """Task, by the hub's name, such as text-classification; None = any."""
    limit: int = in_file(50)
    """Most repositories to list."""
    token: str | None = field(default_factory=hub_token, repr=False)
    """Hub token, for private repositories."""
    json: bool = False
    """Print JSON, for programs."""

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise ConfigurationError(f"task {self.task!r} is not known; use one of {', '.join(TASKS)}")
        require_positive(self, "limit")

    def tags(self) -> list[str]:
        """The tags that a repository must have.

        Raises:
            SwarmError: the directory is no checkpoint.
        """
        tags = [SWARM_TAG]
        if self.base is not None and user_path(self.base).is_dir():
            from swarmllm.models.checkpoint.checkpoint import open_checkpoint
            from swarmllm.models.checkpoint.fingerprint import fingerprint

            tags.append(f"fingerprint:{fingerprint(open_checkpoint(self.base))}")
        elif self.base is not None:
            tags.append(f"base_model:{self.base}")
        if self.task is not None:
            tags.append(f"task:{self.task}")
        return tags


def find_shared(search: Search) -> list[dict[str, Any]]:
    """Repositories of the hub, the most downloaded first: `id`, `method`, `task`, `downloads`, `fingerprint`.

    Raises:
        SwarmError: the hub can't be reached, or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it logs each of its retries, twice
    tags = search.tags()
    try:
        models = HfApi(token=search.token).list_models(filter=tags, sort="downloads", limit=search.limit)
        found = list(itertools.islice(models, search.limit))
    except OfflineModeIsEnabled as error:
        raise ConfigurationError("HF_HUB_OFFLINE is set, so the hub can't be asked: unset it") from error
    except (HTTPError, OSError) as error:
        done = "reached" if getattr(error, "response", None) is None else "asked"
        reason, _, _ = str(error).partition("\n")
        raise SwarmError(f"the hub can't be {done}: {reason}") from error
    return [_described(model.id, model.tags or [], model.downloads) for model in found]


def _described(name: str, tags: Sequence[str], downloads: int | None) -> dict[str, Any]:
    said = dict(tag.split(":", 1) for tag in tags if ":" in tag)
    method = said.get("method") or ("lora" if "lora" in tags else None)
    return {
        "id": name,
        "method": method,
        "task": said.get("task"),
        "downloads": downloads,
        "fingerprint": said.get("fingerprint"),
    }


def as_text(found: Sequence[dict[str, Any]]) -> str:
    """A table, or a sentence if there is nothing."""
    if not found:
        return "Nobody has shared anything of that kind yet."
    columns = ("id", "method", "task", "downloads")
    rows = [columns, *(tuple(printable(str(one[name] or "-")) for name in columns) for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The merge."""

    adapter: str = ""
    """Directory or hub id of the adapter, as peft saves it (required)."""
    base: str = ""
    """Directory or hub id of the model that it was trained on, with weights in 16 or 32 bits (required)."""
    output: str = ""
    """New directory for the merged model, with the base's dtype (required)."""
    token: str | None = field(default_factory=hub_token, repr=False)
    """Hub token, for private repositories."""

    def __post_init__(self) -> None:
        for name in ("adapter", "base", "output"):
            if not getattr(self, name):
                raise ConfigurationError(f"--{name} is required, like {MERGE_EXAMPLES.splitlines()[1].strip()}")


def merge(settings: Merge) -> None:
    """Write the merged model, with the tokenizer of its base.

    Raises:
        SwarmError: the merge is impossible.
    """
    from transformers.utils import logging

    from swarmllm.models.adapters.merging import merge_adapter
    from swarmllm.models.checkpoint.checkpoint import open_checkpoint
    from swarmllm.models.checkpoint.sources import find_source

    logging.disable_progress_bar()  # one for each file
    where = {"revision": None, "token": settings.token, "cache_dir": default_cache_dir()}
    checkpoint = open_checkpoint(settings.base, **where)
    adapter = find_source(settings.adapter, **where)
    output = user_path(settings.output)
    merge_adapter(checkpoint, adapter, output, lambda done: print(f"merged {done}", file=sys.stderr, flush=True))
    print(f"{output} is {checkpoint.public_name} with {adapter.public_name}")


def build_parser() -> Parser:
    """A flag for each field of Search."""
    parser = Parser(
        prog="swarmllm adapters",
        description="List adapters and heads that others have shared on the hub.",
        epilog=EXAMPLES,
    )
    parser.add_settings(Search, [Search])
    return parser


def build_merge_parser() -> Parser:
    """A flag for each field of Merge."""
    parser = Parser(
        prog="swarmllm adapters merge",
        description="Merge an adapter into its base model, without holding the model in memory.",
        epilog=MERGE_EXAMPLES,
    )
    parser.add_settings(Merge, [Merge])
    return parser


SUBCOMMANDS = {"merge": build_merge_parser}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] == "merge":
        return run_program(
            lambda: merge(Merge(**build_merge_parser().parse_settings(words[1:]))), default_log_level="WARNING"
        )

    def program() -> None:
        search = Search(**build_parser().parse_settings(argv))
        found = find_shared(search)
        print(json.dumps(found, indent=2) if search.json else as_text(found))

    return run_program(program, default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())

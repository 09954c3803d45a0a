"""The reference of all commands and flags, docs/commands.md, from the parsers themselves.

`python .ci/command_reference.py` writes it anew; a test compares it. Needs no torch.
"""

import sys
from importlib import import_module
from pathlib import Path

from swarmllm.__main__ import COMMANDS
from swarmllm.command_line import Parser

DOCUMENT = Path(__file__).parents[1] / "docs" / "commands.md"
HEAD = """# Commands

What `swarmllm COMMAND --help_all` says. `--num_blocks` and `--num-blocks` are the same; `--config FILE` reads flags
from TOML.
"""


def _screen(parser: Parser) -> str:
    return f"```\n{parser.format_all(at_length=True).rstrip()}\n```\n"


def reference() -> str:
    """The page."""
    parts = [HEAD]
    for name, command in COMMANDS.items():
        module = import_module(command.module)
        does = f"{command.does[:1].upper()}{command.does[1:]}.\n\n"
        parts.append(f"## swarmllm {name}\n\n{does}{_screen(module.build_parser())}")
        for word, its_module in getattr(module, "SUBCOMMANDS", {}).items():
            parts.append(f"## swarmllm {name} {word}\n\n{_screen(import_module(its_module).build_parser())}")
    return "\n".join(parts)


if __name__ == "__main__":
    new = reference()
    changed = not DOCUMENT.exists() or DOCUMENT.read_text() != new
    DOCUMENT.write_text(new)
    sys.exit(changed)

"""The reference of all commands and flags, docs/commands.md, from the parsers themselves.

`python .ci/command_reference.py` writes it anew; a test compares it. Needs no torch.
"""

import sys
from importlib import import_module
from pathlib import Path

from swarmllm.__main__ import COMMANDS

DOCUMENT = Path(__file__).parents[1] / "docs" / "commands.md"
HEAD = """# Commands

What `swarmllm COMMAND --help_all` says. `--num_blocks` and `--num-blocks` are the same; `--config FILE` reads flags
from TOML.
"""


def reference() -> str:
    """The page."""
    parts = [HEAD]
    for name, command in COMMANDS.items():
        parser = import_module(command.module).build_parser()
        parser._explain(at_length=True)
        screen = parser._format_groups(list(parser._action_groups), 0)
        parts.append(
            f"## swarmllm {name}\n\n{command.does[:1].upper()}{command.does[1:]}.\n\n```\n{screen.rstrip()}\n```\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    new = reference()
    changed = not DOCUMENT.exists() or DOCUMENT.read_text() != new
    DOCUMENT.write_text(new)
    sys.exit(changed)

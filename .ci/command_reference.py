"""Write docs/commands.md, the reference of all commands and settings, from the parsers.

Run it as `python .ci/command_reference.py`. A test compares the page with the parsers. Needs no torch.
"""

import sys
from importlib import import_module
from pathlib import Path

from swarmllm.__main__ import COMMANDS
from swarmllm.command_line import ADDRESS, Parser, flag_help, is_in_file

DOCUMENT = Path(__file__).parents[1] / "docs" / "commands.md"
HEAD = """# Commands

`swarmllm COMMAND --help` shows the most used flags of a command, `--help_all` all of its settings. `--num_blocks` and
`--num-blocks` are the same. Every flag may also be a key of a TOML file, which `--config FILE` names. Flags on the
command line win over the file:

```
swarmllm generate --model M --config tuning.toml "Once upon a time"
```

where `tuning.toml` holds lines like `top_p = 0.9` or `ban_s = 15`. Settings that are shown below without `--` are for
tuning. They have no flag: set them in the file, or in Python, where the same names are fields of `ClientConfig`.
"""
Table = dict[tuple[type, str], tuple[str, str, list[str]]]
"""(class, field) → notation of the setting, its help, the commands that have it."""


def _command(name: str, does: str, parser: Parser, table: Table) -> str:
    for action, owner, one in parser.settings:
        if one.metadata.get("hidden"):
            continue
        flag = f"{one.name}" if is_in_file(one) else parser.flag_text(action)
        text = flag_help(one, owner, at_length=True).replace("%%", "%")
        table.setdefault((owner, one.name), (flag, text, []))[2].append(name)
    examples = (parser.epilog or "").removesuffix(ADDRESS).strip("\n")
    return f"## swarmllm {name}\n\n{does}\n\n```\n{examples}\n```\n"


def _settings(table: Table) -> str:
    lines = ["## Settings", ""]
    for owner in dict.fromkeys(owner for owner, _ in table):
        lines += [f"### {(owner.__doc__ or '').strip().removesuffix('.')}", ""]
        lines += ["| setting | meaning | commands |", "|---|---|---|"]
        for (of, _), (flag, text, commands) in table.items():
            if of is owner:
                meaning = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
                lines.append(f"| `{flag}` | {meaning} | {', '.join(commands)} |")
        lines.append("")
    return "\n".join(lines)


def reference() -> str:
    """The page."""
    pieces, table = [HEAD], Table()
    for name, command in COMMANDS.items():
        module = import_module(command.module)
        does = f"{command.does[:1].upper()}{command.does[1:]}."
        pieces.append(_command(name, does, module.build_parser(), table))
        for word, build_parser in getattr(module, "SUBCOMMANDS", {}).items():
            parser = build_parser()
            pieces.append(_command(f"{name} {word}", parser.description or "", parser, table))
    return "\n".join([*pieces, ADDRESS.strip().replace("\n", " ") + "\n", _settings(table)])


if __name__ == "__main__":
    new = reference()
    changed = not DOCUMENT.exists() or DOCUMENT.read_text() != new
    DOCUMENT.write_text(new)
    sys.exit(changed)

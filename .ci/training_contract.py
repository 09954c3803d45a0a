"""Write the table of docs/training.md: whether each method, field and name works as it does locally.

`python .ci/training_contract.py` writes it from the entries that `tests/numerics/test_training_contract.py` runs. A
test compares it.
"""

import sys
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "training.md"
BEGIN, END = "<!-- from here on by .ci/training_contract.py -->\n", "<!-- up to here -->\n"


def table() -> str:
    """The text between the marks."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests" / "numerics")]
    from tests.numerics.training_contract import Apart, Equal, Refused
    from tests.numerics.training_contract.walk import CONTRACTS

    parts = []
    for part, contract in CONTRACTS.items():
        rows = []
        for name, entry in contract.items():
            if isinstance(entry, Equal) and (entry.note or part == "methods of peft"):
                rows.append(f"| `{name}` | as locally{entry.note and ': '}{entry.note} |")
            elif isinstance(entry, Refused):
                rows.append(f"| `{name}` | refused: {entry.because} |")
        lines = [f"| {part} | |", "|---|---|", *rows]
        for cls, begin in ((Equal, "Equal, without remarks"), (Apart, "No effect on the model's numbers")):
            names = [f"`{name}`" for name, one in contract.items() if isinstance(one, cls) and not _has_row(part, one)]
            if names:
                lines += ["", fill(f"{begin}: {', '.join(names)}.", 120, break_on_hyphens=False)]
        parts.append("\n".join(lines))
    return "\n" + "\n\n".join(parts) + "\n\n"


def _has_row(part: str, entry: object) -> bool:
    return part == "methods of peft" or bool(getattr(entry, "note", ""))


def document() -> str:
    """The whole page with a current table."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    new = document()
    changed = DOCUMENT.read_text() != new
    DOCUMENT.write_text(new)
    sys.exit(changed)

"""Check the subjects of new commits: at most 72 characters, no full stop, no "wip". `make check` runs it.

Merges and commits before `SINCE` are not checked. In a shallow clone without `SINCE`, all its commits are checked.
Outside of a git repository there is nothing to check. Needs only the standard library.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SINCE = "c814eee12decfabb3fb8dba7f2421d17e82f2c44"
"""The last commit before the rule."""
MAX_CHARACTERS = 72
UNFINISHED = re.compile(r"wip\b|fixup!|squash!|amend!", re.IGNORECASE)


def problems_of(subject: str) -> list[str]:
    """The faults of a commit's first line."""
    found = []
    if len(subject) > MAX_CHARACTERS:
        found.append(f"has {len(subject)} characters, more than {MAX_CHARACTERS}: move the reason into the body")
    if subject.endswith("."):
        found.append("ends with a full stop")
    if UNFINISHED.match(subject):
        found.append("is unfinished work: squash it")
    return found


def git(root: Path, *arguments: str) -> str | None:
    """Run git and return its output; None if it fails."""
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *arguments]  # others may own the checkout
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def check(root: Path, since: str = SINCE) -> list[str]:
    """Return a line for each fault. Prints a note if not all new commits could be checked."""
    if git(root, "rev-parse", "HEAD") is None:
        print("commit subjects: no git repository here, nothing to check")
        return []
    commits = f"{since}..HEAD"
    if git(root, "cat-file", "-e", f"{since}^{{commit}}") is None:
        if git(root, "rev-parse", "--is-shallow-repository") != "true":
            print(f"commit subjects: this history doesn't hold {since[:12]}, nothing to check")
            return []
        commits = "HEAD"
        print("commit subjects: this clone is shallow, only its own commits are checked")
    log = git(root, "log", "--no-merges", "--format=%h%x09%s", commits) or ""
    return [
        f'{commit}: the subject "{subject}" {problem}'
        for commit, _, subject in (line.partition("\t") for line in log.splitlines())
        for problem in problems_of(subject)
    ]


if __name__ == "__main__":
    wrong = check(ROOT)
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))

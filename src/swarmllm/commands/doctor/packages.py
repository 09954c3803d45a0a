"""Whether Python and all packages are as required; imports none of them, since they may be missing."""

import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

from packaging.requirements import Requirement

from swarmllm.commands.doctor.findings import Finding, bad, note, ok
from swarmllm.version import __version__


def check_versions() -> Iterator[Finding]:
    """Python, and every package that swarmllm requires."""
    if sys.platform != "linux":
        yield note(f"this is {platform.system()}: swarmllm has been tried on Linux only")
    wrong = list(wrong_versions(importlib.metadata.requires("swarmllm") or ()))
    yield from map(bad, wrong)
    if not wrong:
        python = platform.python_version()
        yield ok(f"swarmllm {__version__} on Python {python}; all packages are of versions that it was tested with")


def wrong_versions(
    requirements: Sequence[str], installed: Callable[[str], str] = importlib.metadata.version
) -> Iterator[str]:
    """A sentence for each requirement (extras aside) that is missing or outside its range."""
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        mend = f'pip install "{requirement.name}{requirement.specifier}"'
        try:
            version = installed(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is not installed: {mend}"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version}, which has not been tested: {mend}"

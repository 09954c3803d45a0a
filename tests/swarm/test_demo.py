"""`swarmllm demo`."""

import re
from collections.abc import Iterator

import pytest
import transformers
from commands import command

from swarmllm.demo.__main__ import Story, main

pytestmark = pytest.mark.rotates(3, whole_file=True)


@pytest.fixture
def _transformers_as_before() -> Iterator[None]:
    """The demo silences it for its process."""
    verbosity = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


def test_tokens_that_come_in_bunches_are_no_faster_than_they_are() -> None:
    """Three by three, each bunch 0.3 s after the one before, and once 2 s later because a server was lost."""
    bunches = [0.3 * bunch + (2.0 if bunch > 4 else 0.0) for bunch in range(10)]
    story = Story(None, lambda _: None, [at for at in bunches for _ in range(3)])
    assert story.usual_gap_s() == pytest.approx(8 * 0.3 / 28)
    assert story.longest_wait_s(14) == pytest.approx(2.3), "the 15th came with the 14th"


@pytest.mark.usefixtures("_transformers_as_before")
def test_the_story_survives_a_server(capfd: pytest.CaptureFixture[str]) -> None:
    """In this process, so that its servers are forked."""
    code = main(["--max_new_tokens", "60"])
    said = capfd.readouterr()
    assert_told(code, said.out, said.err)


@pytest.mark.slow
def test_as_a_newcomer_starts_it() -> None:
    done = command("demo", "--max_new_tokens", 60)
    assert_told(done.returncode, done.stdout, done.stderr)


def assert_told(code: int, story: str, errors: str) -> None:
    assert code == 0, errors
    assert errors == ""
    for expected in (
        r"████····  …(\w{6}) +.+ +0:4 +online",
        r"Once upon a time",
        r"\*\*\* server …(\w{6}) is killed here \*\*\*",
        r"Its blocks 4:8 went to …(\w{6}) 4:8",
        r"The text stood still for \d+ ms at most after that",
        r"every token is equal",
    ):
        assert re.search(expected, story), story
    killed = re.search(r"server …(\w{6}) is killed", story)
    heir = re.search(r"went to …(\w{6})", story)
    assert killed is not None
    assert heir is not None
    assert killed[1] != heir[1]

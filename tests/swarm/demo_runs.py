"""Runs of `swarmllm demo`, for the embedded model and for a real one."""

import re

import transformers

from swarmllm.demo.__main__ import main


def demo_in_this_process(*arguments: str) -> int:
    """Its exit code. It silences transformers for its process, which is undone here."""
    verbosity = transformers.logging.get_verbosity()
    try:
        return main(list(arguments))
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()


def assert_told(code: int, story: str, errors: str, *, num_blocks: int) -> None:
    """A server was killed in the middle of an answer, another one of its blocks went on, and all tokens are right."""
    assert code == 0, errors
    assert errors == ""
    middle = num_blocks // 2
    lost = f"{middle}:{num_blocks}"
    for expected in (
        rf"█+·+  …(\w{{6}}) +.+ +0:{middle} +online",
        r"\*\*\* server …(\w{6}) is killed here \*\*\*",
        rf"Its blocks {lost} went to …(\w{{6}}) {lost}",
        r"The text stood still for \d+ ms at most after that",
        r"every token is equal",
    ):
        assert re.search(expected, story), story
    killed = re.search(r"server …(\w{6}) is killed", story)
    heir = re.search(r"went to …(\w{6})", story)
    assert killed is not None
    assert heir is not None
    assert killed[1] != heir[1]

"""`swarmllm demo`, as a newcomer starts it."""

import re

from commands import command


def test_the_story_survives_a_server() -> None:
    done = command("demo", "--max_new_tokens", 60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for expected in (
        r"████····  …(\w{6}) +0:4 +online",
        r"Once upon a time",
        r"\*\*\* server …(\w{6}) is killed here \*\*\*",
        r"Its blocks \[4, 8\) went to …(\w{6}) \[4, 8\)",
        r"The next token came \d+ ms after the kill",
        r"every token is equal",
    ):
        assert re.search(expected, done.stdout), done.stdout
    killed = re.search(r"server …(\w{6}) is killed", done.stdout)
    heir = re.search(r"went to …(\w{6})", done.stdout)
    assert killed is not None
    assert heir is not None
    assert killed[1] != heir[1]

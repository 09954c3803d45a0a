"""`swarmllm demo` with the model of the package; tests/real has it with a real one."""

import pytest
from commands import command
from demo_runs import assert_told, demo_in_this_process

pytestmark = pytest.mark.rotates(3, whole_file=True)


def test_the_story_survives_a_server(capfd: pytest.CaptureFixture[str]) -> None:
    """In this process, so that its servers are forked."""
    code = demo_in_this_process("--embedded", "--max_new_tokens", "60")
    said = capfd.readouterr()
    assert_told(code, said.out, said.err, num_blocks=8)
    assert "as --embedded says" in said.out
    assert "> Tell me a story about a fox.\nThe fox" in said.out


@pytest.mark.slow
def test_as_a_newcomer_starts_it() -> None:
    done = command("demo", "--embedded", "--max_new_tokens", 60)
    assert_told(done.returncode, done.stdout, done.stderr, num_blocks=8)

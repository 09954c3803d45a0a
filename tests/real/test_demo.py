"""`swarmllm demo` as `make demo` runs it: real questions and answers."""

import re

import pytest
from demo_runs import assert_told, demo_in_this_process
from tests.real.real_models import SMOLLM2

pytestmark = pytest.mark.rotates(3)


@pytest.mark.skipif(not SMOLLM2.is_here, reason=SMOLLM2.missing)
def test_the_demo_talks(capfd: pytest.CaptureFixture[str]) -> None:
    code = demo_in_this_process()
    said = capfd.readouterr()
    assert_told(code, said.out, said.err, num_blocks=30)
    killed = re.search(r"\n\n    \*\*\* server …\w{6} is killed here \*\*\*\n\n", said.out)
    assert killed is not None
    assert "> What is the capital of France?\nThe capital of France is Paris.\n" in said.out[: killed.start()]
    chat = said.out.replace(killed[0], "")
    famous = re.search(r"> What is it famous for\?\n(.*)\n", chat)
    assert famous is not None
    assert "Eiffel Tower" in famous[1], "it knows from the first answer what is meant"

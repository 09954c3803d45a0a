"""Each entry of `training_contract` run on a model of a swarm and on the local one; and no public name without one."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.test_training_surface import Owner, load_local
from tests.numerics.training_contract import Contract, Equal, Refused, assert_equal
from tests.numerics.training_contract.walk import CONTRACTS, names_of

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::RuntimeWarning", "ignore:.gradient_checkpointing:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # of dynamo
]
EQUAL = [(part, name) for part, contract in CONTRACTS.items() for name, e in contract.items() if isinstance(e, Equal)]
REFUSED = [(p, name) for p, contract in CONTRACTS.items() for name, e in contract.items() if isinstance(e, Refused)]


@pytest.fixture(autouse=True)
def _accelerate_forgets() -> Iterator[None]:
    """Restore the environment: TrainingArguments would make accelerate compile all that comes after."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    AcceleratorState._reset_state(reset_partial_state=True)


def entry(part: str, name: str) -> Any:
    return CONTRACTS[part][name]


def outcome(check: Any, model: Any) -> object:
    """The outcome; a model of a swarm refuses what a local model refuses."""
    torch.manual_seed(11)
    try:
        return check(model)
    except (AttributeError, ImportError, NotImplementedError, TypeError, ValueError, KeyError) as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[:1]}"


@pytest.mark.rotates(6)
@pytest.mark.parametrize(("part", "name"), EQUAL)
def test_equal(part: str, name: str, llama: Path) -> None:
    check = entry(part, name).check
    wanted = outcome(check, load_local(llama))
    assert_equal(outcome(check, InProcessSwarm(llama, user=Owner).client), wanted, name)


@pytest.mark.rotates(6)
@pytest.mark.parametrize(("part", "name"), REFUSED)
def test_refused(part: str, name: str, llama: Path) -> None:
    refused = entry(part, name)
    with pytest.raises((RuntimeError, ValueError, ImportError, AssertionError), match=refused.sentence) as caught:
        refused.attempt(InProcessSwarm(llama, user=Owner).client)
    assert len(str(caught.value).strip().splitlines()) == 1


@pytest.mark.parametrize("part", CONTRACTS)
def test_every_public_name_is_in_a_class(part: str) -> None:
    """A failure after an update asks for an entry: decide about the new names, and try each."""
    contract: Contract = CONTRACTS[part]
    names = names_of(part)
    assert set(names) - set(contract) == set(), "names without a class"
    assert set(contract) - set(names) == set(), "names that are no more"


def test_the_table_says_what_is_tested() -> None:
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("training_contract", root / ".ci" / "training_contract.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.DOCUMENT.read_text() == script.document(), "run python .ci/training_contract.py"

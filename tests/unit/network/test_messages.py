"""Headers are checked field by field, before anybody believes them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from swarmllm.errors import RemoteProtocolError
from swarmllm.network.wire.messages import (
    AttachHeader,
    BatchHeader,
    ErrorHeader,
    LinkHeader,
    OpenHeader,
    ReplayHeader,
    ResultHeader,
    StepHeader,
    parse,
)

HEADERS = [
    OpenHeader, LinkHeader, AttachHeader, StepHeader, ReplayHeader, BatchHeader, ResultHeader, ErrorHeader
]  # fmt: skip
ID = "0" * 32
STEP = {"id": 1, "session": ID, "epoch": 0, "position": 0, "batch_size": 1, "seq_len": 1, "tensors": ()}


def test_unknown_fields_of_newer_peers_are_ignored() -> None:
    step = parse(StepHeader, {**STEP, "from_the_future": {"a": 1}}, None)
    assert "from_the_future" not in step.model_dump()


def test_headers_survive_the_wire() -> None:
    step = parse(StepHeader, {**STEP, "batch_index": (1, 0), "timings": ((0, 1, 2),)}, None)
    assert parse(StepHeader, step.model_dump(), None) == step


@pytest.mark.parametrize(
    "change",
    [
        {"id": -1},
        {"id": 1 << 63},
        {"id": True},
        {"session": "short"},
        {"position": -1},
        {"position": 1 << 40},
        {"position": 1.0},
        {"batch_size": 0},
        {"batch_size": "1"},
        {"seq_len": 0},
        {"batch_index": (-1,)},
        {"batch_index": (0,) * (1 << 17)},
        {"replay_hops": -1},
        {"timings": ((1, 2),)},
        {"ones_mask": 1},
        {"tensors": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fields_out_of_range(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match=f"StepHeader is not valid: {next(iter(change))}") as caught:
        parse(StepHeader, {**STEP, **change}, "somebody")
    assert caught.value.peer_id == "somebody"


@pytest.mark.parametrize("name", STEP)
def test_missing_fields(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match=name):
        parse(StepHeader, {key: value for key, value in STEP.items() if key != name}, None)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 64) | st.floats() | st.text(max_size=40) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*STEP, "start", "end", "token", "successor", "code", "message", "peer_id", "max_length"])


@settings(max_examples=60)
@given(st.sampled_from(HEADERS), st.dictionaries(names, anything, max_size=12))
def test_whatever_comes_is_a_header_or_a_protocol_error(header: type[StepHeader], fields: dict[str, Any]) -> None:
    try:
        parsed = parse(header, fields, "somebody")
    except RemoteProtocolError:
        return
    assert parse(header, parsed.model_dump(), None) == parsed


@pytest.mark.parametrize("field", ["batch_index", "timings", "tensors"])
def test_the_first_wrong_element_is_enough(field: str) -> None:
    """An error for each of 65536 would keep the event loop for a second."""
    header = {"id": 1, "session": "a" * 32, "epoch": 0, "position": 0, "batch_size": 1, "seq_len": 1, "tensors": ()}
    num_elements = {"timings": 4096, "tensors": 32}.get(field, 65536)
    with pytest.raises(ValidationError) as caught:
        StepHeader.model_validate(header | {field: ("",) * num_elements})
    assert caught.value.error_count() < 5

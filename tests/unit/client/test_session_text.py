"""Texts that may follow in a session, and the room of its servers, before anything is sent."""

import pytest
import torch

from swarmllm.client.session.session_text import SessionText, TextRoom
from swarmllm.data_structures import BlockTraits, Patch
from swarmllm.errors import ConfigurationError, SessionLengthExceededError
from swarmllm.models.adapters.block_adapter import BlockAdapter
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.network.wire.messages import MAX_POSITION


def some(seq_len: int, batch_size: int = 1, adapter: BlockAdapter | None = None) -> BlockInputs:
    hidden = torch.arange(float(batch_size * seq_len)).view(batch_size, seq_len, 1)
    return BlockInputs(hidden_states=hidden, batch_size=batch_size, seq_len=seq_len, adapter=adapter)


def an_adapter(version: int) -> BlockAdapter:
    patch = Patch(block=0, path="", kind="prompt", shapes=((1, 1),))
    return BlockAdapter((patch,), ((torch.zeros(1, 1),),), version=version)


def seen(text: SessionText, inputs: BlockInputs) -> SessionText:
    text.admit(text.position, inputs)
    text.append(text.position, inputs)
    return text


def test_a_text_of_a_given_length_is_refused_beyond_it_and_stays_as_it_was() -> None:
    text = seen(SessionText(BlockTraits(), TextRoom(8)), some(6))
    assert text.admit(6, some(2))
    with pytest.raises(SessionLengthExceededError, match="max_length of 8"):
        text.admit(6, some(3))
    assert (text.room.max_length, text.position) == (8, 6)


def test_a_text_that_grows_needs_new_sessions_of_twice_the_length() -> None:
    text = seen(SessionText(BlockTraits(), TextRoom(8, grows=True)), some(6))
    assert not text.admit(6, some(3))
    assert (text.room.max_length, text.room.guessed) == (16, True)
    assert text.admit(6, some(10))
    assert not text.admit(6, some(100))
    assert text.room.max_length == 106
    with pytest.raises(SessionLengthExceededError):
        text.admit(6, some(MAX_POSITION))


def test_what_was_only_guessed_can_be_lowered_to_what_is_needed() -> None:
    text = SessionText(BlockTraits(), TextRoom(100, guessed=True))
    text.admit(0, some(20))
    lengths = []
    while text.room.ask_for_less():
        lengths.append(text.room.max_length)
    assert lengths == [40, 25, 21, 20]
    assert not SessionText(BlockTraits(), TextRoom(100)).room.ask_for_less(), "somebody has asked for it"


def test_rows_can_change_only_at_the_beginning() -> None:
    text = SessionText(BlockTraits(), TextRoom(100))
    assert not text.admit(0, some(2, batch_size=3)), "the servers keep room for one row"
    assert text.admit(0, some(2, batch_size=3))
    seen(text, some(2, batch_size=3))
    with pytest.raises(ConfigurationError, match="3 rows, these inputs 2"):
        text.admit(2, some(1, batch_size=2))
    text.select_batch([0, 2])
    text.select_batch([1])
    assert (text.selection, text.num_selections) == ((2,), 1)
    assert text.admit(2, some(1))


def test_an_adapter_can_change_only_at_the_beginning() -> None:
    text = seen(SessionText(BlockTraits(), TextRoom(100)), some(2, adapter=an_adapter(1)))
    assert text.admit(2, some(1, adapter=an_adapter(1)))
    for other in (None, an_adapter(2)):
        with pytest.raises(ConfigurationError, match="adapter has changed"):
            text.admit(2, some(1, adapter=other))
    assert text.adapter is not None
    text.position = 0
    assert not text.admit(0, some(1))
    assert text.adapter is None


def test_the_past_ends_where_the_text_stands() -> None:
    text = SessionText(BlockTraits(), TextRoom(100))
    assert text.past() == []
    seen(seen(text, some(4)), some(3))
    text.position = 5
    ((_, past),) = text.past()
    assert past.hidden_states.flatten().tolist() == [0, 1, 2, 3, 0]
    pieces = [(position, inputs.seq_len) for position, inputs in text.replay(2)]
    assert pieces == [(0, 2), (2, 2), (4, 1)]


@pytest.mark.parametrize(("seq_len", "lengths"), [(4, [4]), (9, [3, 3, 3]), (10, [4, 4, 2])])
def test_a_long_prompt_goes_in_pieces_of_about_one_length(seq_len: int, lengths: list[int]) -> None:
    text = SessionText(BlockTraits(), TextRoom(100))
    assert [chunk.seq_len for chunk in text.chunks(some(seq_len), 4)] == lengths

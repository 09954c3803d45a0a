import pickle
from collections.abc import Sequence

import pytest
import torch
from transformers import Gemma2Config

from swarmllm.errors import ConfigurationError
from swarmllm.models.shell.remote_cache import RemoteCache


class FakeSession:
    def __init__(self) -> None:
        self.position = 7
        self.selected: list[list[int]] = []
        self.records = False

    def select_batch(self, indices: Sequence[int]) -> None:
        self.selected.append(list(indices))

    def record_past(self) -> None:
        self.records = True


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def cache(session: FakeSession) -> RemoteCache:
    return RemoteCache(Gemma2Config(num_hidden_layers=2, sliding_window=4), session, batch_size=2)


def test_the_session_is_the_authority_on_the_length(cache: RemoteCache, session: FakeSession) -> None:
    assert cache.get_seq_length() == 7
    session.position = 9
    assert cache.get_seq_length() == cache.get_seq_length(1) == 9
    assert cache.get_mask_sizes(1, 1) == (10, 0)
    assert cache.get_mask_sizes(1, 0) == (10, 0), "a window of 4 has them all, as servers cut the mask"


def test_crop_rolls_back(cache: RemoteCache, session: FakeSession) -> None:
    cache.crop(-3)
    assert session.position == 4
    cache.crop(0)
    assert session.position == 4
    with pytest.raises(ValueError, match="minus"):
        cache.crop(2)


def test_rows(cache: RemoteCache, session: FakeSession) -> None:
    cache.reorder_cache(torch.tensor([0, 1]))
    assert session.selected == [], "nothing to do"
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([False, True, False, True]))
    assert session.selected == [[1, 1], [0, 0, 1, 1], [1, 3]]
    assert cache.batch_size == 2
    for rows in ([2], [-1, 0], []):
        with pytest.raises(ConfigurationError, match="rows 0 to 1"):
            cache.reorder_cache(torch.tensor(rows))


def test_it_cannot_be_pickled(cache: RemoteCache) -> None:
    with pytest.raises(ConfigurationError, match="on the servers"):
        pickle.dumps(cache)


def test_recording(cache: RemoteCache, session: FakeSession) -> None:
    cache.activate_past_recording()
    assert session.records
    cache.reset()
    assert session.position == 0

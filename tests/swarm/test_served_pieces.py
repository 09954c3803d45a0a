"""Servers and a client that have only their pieces: they find each other, and answer like the local model."""

from pathlib import Path

import numpy as np
import pytest
from machines import PIECE_BYTES
from swarm_models import NUM_BLOCKS, OPTIONS, assert_same_tokens, connected, prompt
from transformers import PreTrainedModel

from swarmllm import LocalSwarm
from swarmllm.data_structures import Span
from swarmllm.machines.holdings import PartialModel, WholeModel
from swarmllm.models.checkpoint.pieces import describe


def filled(whole: WholeModel, store: Path, span: Span | None) -> Path:
    """A partial directory for these blocks, or for a client."""
    target = PartialModel(whole.manifest, store)
    for wanted in (whole.manifest.always_pieces(), None):
        pieces = target.needed(span, client=span is None) if wanted is None else wanted
        for piece in np.flatnonzero(pieces & ~target.held).tolist():
            data = whole.read(piece)
            assert data is not None
            assert target.put(piece, data)
    assert not target.held.all()
    return target.place


@pytest.mark.slow
def test_servers_and_a_client_with_their_pieces_only(llama: Path, local: PreTrainedModel, tmp_path: Path) -> None:
    whole = WholeModel(describe(llama, piece_bytes=PIECE_BYTES))
    first = filled(whole, tmp_path / "first", Span(0, 3))
    second = filled(whole, tmp_path / "second", Span(3, NUM_BLOCKS))
    client = filled(whole, tmp_path / "client", None)
    with LocalSwarm(first, spans=[(0, 3)], **OPTIONS) as swarm:
        swarm.add_server((3, NUM_BLOCKS), model=second)
        with connected(client, swarm.initial_peers) as model:
            assert_same_tokens(model, local, prompt(5), max_new_tokens=20)
        with connected(llama, swarm.initial_peers) as model:  # of whom has the whole model it is the same one
            assert_same_tokens(model, local, prompt(5), max_new_tokens=5)

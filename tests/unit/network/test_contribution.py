"""The proof that a client's owner serves: good for one client of one server, and for nobody else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.network.p2p.identity import Identity, contribution, is_genuine
from swarmllm.network.wire.protocol import Contribution

SERVER, CLIENT, OTHER = (Identity.generate() for _ in range(3))


def test_it_is_good_for_that_client_of_that_server_alone() -> None:
    shown = contribution(SERVER, CLIENT.peer_id)
    assert is_genuine(shown, CLIENT.peer_id)
    assert not is_genuine(shown, OTHER.peer_id)
    assert not is_genuine(shown.model_copy(update={"server": OTHER.peer_id}), CLIENT.peer_id)
    assert not is_genuine(contribution(CLIENT, CLIENT.peer_id).model_copy(update={"server": SERVER.peer_id}), "")


@given(st.text(max_size=64) | st.sampled_from((SERVER.peer_id, CLIENT.peer_id)), st.binary(max_size=64))
def test_whatever_is_shown_is_no_proof(server: str, signature: bytes) -> None:
    assert not is_genuine(Contribution(server=server, signature=signature), CLIENT.peer_id)


@pytest.mark.parametrize("flipped", [0, 31, 63])
def test_one_wrong_bit_is_enough(flipped: int) -> None:
    shown = contribution(SERVER, CLIENT.peer_id)
    signature = bytearray(shown.signature)
    signature[flipped] ^= 1
    assert not is_genuine(Contribution(server=shown.server, signature=bytes(signature)), CLIENT.peer_id)

"""Servers that nobody can dial: they answer as others do, also when relays die, freeze or come back in mid-text."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import command
from fault_tools import at_token
from homes import Homes
from swarm_models import NUM_BLOCKS, assert_same_tokens, connected, generate_seeded, names, prompt
from transformers import PreTrainedModel

from swarmllm.network.relay.messages import is_circuit

pytestmark = pytest.mark.rotates(3, whole_file=True)

HALF = NUM_BLOCKS // 2
NUM_TOKENS = 24


@pytest.fixture
def homes(llama: Path, tmp_path: Path) -> Iterator[Homes]:
    """Both halves of the model at home, and three relays."""
    homes = Homes(llama, tmp_path)
    try:
        for _ in range(3):
            homes.relays.add()
        for start in (0, HALF):
            homes.add_server(start, start + HALF, "--reachability", "private")
        for server in homes.servers:
            assert server.maddrs() == homes.relays.maddrs  # others join through the same peers
        yield homes
    finally:
        homes.close()


def test_hidden_servers_answer_as_others_do(homes: Homes, llama: Path, local: PreTrainedModel) -> None:
    announced = homes.status()
    assert [server["start"] for server in announced] == [0, HALF]
    for server in announced:
        assert all(map(is_circuit, server["addrs"]))
        relays = {re.search("/p2p/(.+)/p2p-circuit", addr)[1] for addr in server["addrs"]}
        assert relays == {maddr.rpartition("/")[2] for maddr in homes.relays.maddrs}
    text = command("status", "--initial_peers", *homes.relays.maddrs).stdout
    assert text.count("online, relayed") == 2
    text = command("doctor", "--initial_peers", *homes.relays.maddrs).stdout
    assert text.count("is reached through a relay") == 2
    with connected(llama, homes.relays.maddrs) as model:
        assert_same_tokens(model, local, prompt(), max_new_tokens=20)
        assert names(model.swarm.route()) == [server["peer_id"] for server in announced]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_relays_that_fail_in_mid_text(
    homes: Homes, llama: Path, local: PreTrainedModel, signum: signal.Signals
) -> None:
    """One after the other until one is left; the servers go on, and aren't blamed."""
    ids = prompt()
    expected = generate_seeded(local, ids, max_new_tokens=NUM_TOKENS)
    with connected(llama, homes.relays.maddrs, speculation="off", ban_s=3600.0) as model:
        strikes = at_token(6, lambda: homes.relays.strike(signum))
        strikes += at_token(14, lambda: homes.relays.strike(signum))
        with model.inference_session(max_length=100) as session:
            generated = generate_seeded(model, ids, max_new_tokens=NUM_TOKENS, logits_processor=strikes)
            assert session.num_repairs >= 1
        assert not model.swarm.blamed
    assert generated.tolist() == expected.tolist()
    assert len(homes.relays.working) == 1

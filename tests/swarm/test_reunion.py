"""Two parts of a swarm that have lost each other, and both go on, find each other again."""

from contextlib import AsyncExitStack

import pytest

from swarmllm.machines.records import MachineRecord, membership
from swarmllm.machines.reunion import Reunion
from swarmllm.network.p2p.block_directory import Register, machines_key
from swarmllm.network.p2p.identity import Identity
from swarmllm.network.p2p.peer import Peer

SWARM = Identity.generate()


@pytest.mark.asyncio
async def test_halves_of_a_swarm_meet_again() -> None:
    async with AsyncExitStack() as open_:

        async def start(*known: Peer) -> Peer:
            initial_peers = [maddr for peer in known for maddr in peer.join_maddrs]
            return await open_.enter_async_context(await Peer.create(initial_peers=initial_peers))

        halves = []
        for _ in range(2):
            first = await start()
            halves.append((first, await start(first)))
        registers = {}
        for peer in (*halves[0], *halves[1]):
            registers[peer.peer_id] = Register(peer, machines_key(SWARM.peer_id), MachineRecord)
            record = MachineRecord(peer_id=peer.peer_id, member=membership(peer.peer_id, SWARM), addrs=peer.addrs)
            assert await registers[peer.peer_id].publish(record, 600.0)

        (one, two), (three, four) = halves
        before = await registers[four.peer_id].read()
        assert before.keys() == {three.peer_id, four.peer_id}
        assert (await registers[one.peer_id].read()).keys() == {one.peer_id, two.peer_id}
        reunion = Reunion(one, SWARM.peer_id, on_lan=False)
        reunion.note(before, {}, 0.0)  # as when the network was split
        await reunion.look()
        everybody = {*registers}
        for register in registers.values():  # also those that have dialled nobody
            while (await register.read()).keys() != everybody:
                pass
        reunion.note({}, before, 1.0)
        assert not reunion.lost

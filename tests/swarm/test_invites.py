"""A private swarm as docs/quick-start.md makes one: an invite, servers that obey it, a member, a stranger."""

import signal
from pathlib import Path

import pytest
from commands import Running, command, sentence
from web_gateway import running_gateway

from swarmllm import embedded_model_path
from swarmllm.network.p2p.identity import Identity

LOOPBACK = ("--host_maddrs", "/ip4/127.0.0.1/tcp/0")
INVITE = "swarmllm: invite others with --initial_peers "


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_private_swarm(tmp_path: Path) -> None:
    member, invite = tmp_path / "me.key", tmp_path / "friends.swarm"
    peer_id = Identity.load_or_create(member).peer_id
    keys = ("--identity_path", tmp_path / "bootstrap.key")
    words = ("--invite", "--model", embedded_model_path(), "--allowed_clients", peer_id, "--private")
    with Running("dht", *LOOPBACK, *keys, *words, log=tmp_path / "dht.log") as dht:
        address = dht.maddrs()[0]
        assert dht.process.stdout is not None
        line = dht.process.stdout.readline()
        assert line.startswith(INVITE)
        invite.write_text(line.removeprefix(INVITE))
        joined = ("--initial_peers", invite)
        with Running(
            "server", "--num_blocks", 8, "--num_threads", 1, *joined, *LOOPBACK, log=tmp_path / "log"
        ) as server:
            server.lines_until_join()

            served = command("generate", *joined, "--identity_path", member, "--max_new_tokens", 4, stdin="Once upon")
            assert served.returncode == 0, served.stderr
            assert served.stdout.startswith("Once upon")

            # Who only knows the address of a peer sees nothing of it.
            assert Path(embedded_model_path()).name in command("status", *joined).stdout
            assert command("status", "--initial_peers", address).stdout == "This swarm serves no model.\n"

            refused = command("generate", *joined, "--max_new_tokens", 4, stdin="Once upon")
            assert refused.returncode == 1
            assert "use the --identity_path that its owner knows, or ask" in sentence(refused.stderr)

            with running_gateway([str(invite)], identity_path=str(member)) as gateway:
                gateway.wait_until_seen(1)
                answer = gateway.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
                assert answer.status_code == 200, answer.text
            assert server.stop(signal.SIGINT) == 0
        assert dht.stop(signal.SIGINT) == 0

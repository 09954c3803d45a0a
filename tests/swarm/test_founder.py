"""A swarm that outlives its founder: who was in it before joins by those that were met."""

import re
import signal
from pathlib import Path

import pytest
from commands import Running, command, sentence
from swarm_models import OPTIONS, assert_same_tokens, connected, prompt, wait_until
from transformers import PreTrainedModel

LOOPBACK = ("--host_maddrs", "/ip4/127.0.0.1/tcp/0")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_founder_dies(llama: Path, local: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMLLM_CACHE", str(tmp_path / "cache"))
    book = tmp_path / "cache" / "swarmllm_peers.json"
    options = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
    serve = ("server", "--model", llama, *LOOPBACK, *options)
    with Running("dht", *LOOPBACK, log=tmp_path / "founder.log") as founder:
        joins = ("--initial_peers", *founder.maddrs())
        with Running(*serve, *joins, log=tmp_path / "first.log") as first:
            first.lines_until_join()
            with connected(llama, list(joins[1:])) as model:
                assert_same_tokens(model, local, prompt(), max_new_tokens=4)
            founder.stop(signal.SIGKILL)

            with connected(llama, list(joins[1:])) as model:
                assert_same_tokens(model, local, prompt(), max_new_tokens=8)
            with Running(*serve, *joins, log=tmp_path / "second.log") as second:
                second.lines_until_join()
                listed = command("status", *joins)
                assert listed.stdout.count("online") == 2, listed
                assert "none of the initial peers answers" in listed.stderr
                assert "joined through" in listed.stderr
                ids = set(re.findall(r"12D3\w+", command("status", *joins, "--json").stdout))
                with connected(llama, list(joins[1:])) as model:
                    assert_same_tokens(model, local, prompt(), max_new_tokens=4)
                    wait_until(
                        lambda: all(peer_id in book.read_text() for peer_id in ids), "both servers are in the book"
                    )
                first.stop(signal.SIGKILL)
                with connected(llama, list(joins[1:])) as model:
                    assert_same_tokens(model, local, prompt(), max_new_tokens=8)
                assert second.stop(signal.SIGINT) == 0

        monkeypatch.setenv("SWARMLLM_CACHE", str(tmp_path / "elsewhere"))
        assert "none of the initial peers can be reached" in sentence(command("status", *joins).stderr)

"""Wrong models, wrong swarms, too much of everything: a sentence in bounded time, and the swarm goes on."""

import copy
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import torch
from swarm_models import OPTIONS, assert_same_tokens, connected, generate_seeded, prompt, save_llama
from tests import forked
from transformers import PreTrainedModel

from swarmllm import AutoDistributedModel, AutoDistributedModelForSequenceClassification, LocalSwarm
from swarmllm.errors import (
    BlocksNotServedError,
    BlockWeightsNotFoundError,
    CacheFullError,
    ConfigurationError,
    CorruptWeightsError,
    MissingBlocksError,
    PeerUnreachableError,
    SwarmError,
    WeightsMismatchError,
)
from swarmllm.network.p2p.identity import Identity
from swarmllm.server.__main__ import main as server_main
from swarmllm.swarm import retry

pytestmark = pytest.mark.rotates(4)

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"
CACHE_TOKENS = 400
MAX_BATCH_TOKENS = 48


@pytest.fixture(scope="module")
def small_swarm(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """One server with little room, and one that serves a single client."""
    friend = tmp_path_factory.mktemp("client") / "identity"
    allowed = Identity.load_or_create(friend).peer_id
    limits = {"attn_cache_tokens": CACHE_TOKENS, "max_batch_tokens": MAX_BATCH_TOKENS}
    with LocalSwarm(llama, spans=[(0, 8)], **OPTIONS, **limits) as swarm:
        swarm.add_server((0, 8), allowed_clients=[allowed])
        swarm.friend = friend
        yield swarm


@pytest.fixture(autouse=True)
def _full_servers_are_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no others to ask meanwhile, so tests would only wait."""
    monkeypatch.setattr(retry, "FULL_SERVER_PAUSE_S", 0.2)


@contextmanager
def client(llama: Path, swarm: LocalSwarm, server: int = 0, **config: Any) -> Iterator[Any]:
    settings = {"max_retries": 1, "allowed_servers": [swarm.servers[server].peer_id], **config}
    with connected(llama, swarm.initial_peers, **settings) as model:
        yield model


# The checkpoint


def without_a_shard(model: Path) -> None:
    shards = sorted(model.glob("*.safetensors"))
    shards[len(shards) // 2].unlink()


def truncated(model: Path) -> None:
    for shard in model.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-100])


def scrambled(model: Path) -> None:
    for shard in model.glob("*.safetensors"):
        shard.write_bytes(b"\xff" * 1000)


def without_a_config(model: Path) -> None:
    (model / "config.json").unlink()


def with_another_config(model: Path) -> None:
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"hidden_size": 64', '"hidden_size": 32'))


DAMAGES = {
    without_a_shard: (BlockWeightsNotFoundError, 1),
    truncated: (CorruptWeightsError, 1),
    scrambled: (CorruptWeightsError, 1),
    without_a_config: (ConfigurationError, 2),
    with_another_config: (WeightsMismatchError, 1),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_server_with_a_damaged_checkpoint(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    damage(model)
    _, exit_code = DAMAGES[damage]

    # In this process: importing torch anew is what takes most of a server's start.
    assert server_main(["--model", str(model), "--new_swarm", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"]) == exit_code
    assert_one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize("damage", [truncated, without_a_config], ids=lambda damage: damage.__name__)
def test_a_client_with_a_damaged_checkpoint(
    llama: Path, swarm: LocalSwarm, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    damage(model)

    with pytest.raises(DAMAGES[damage][0]), connected(model, swarm.initial_peers):
        pass


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere/at-all", "--new_swarm"], "/nowhere/at-all"),
        (["--model", "nobody/has-such-a-model", "--new_swarm"], "nobody/has-such-a-model"),
        (["--model", "MODEL", "--new_swarm", "--block_indices", "4:9"], "0:8"),
        (["--model", "MODEL", "--new_swarm", "--num_blocks", "9"], "8"),
        (["--model", "MODEL", "--no_lan_discovery"], "--initial_peers"),
        (["--model", "MODEL", "--initial_peers", "/ip4/127.0.0.1/tcp/1"], "/p2p/"),
        (["--model", "MODEL", "--new_swarm", "--host_maddrs", "127.0.0.1"], "127.0.0.1"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else None,
)
def test_a_server_with_unusable_settings(
    llama: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    flags = [str(llama) if flag == "MODEL" else flag for flag in flags]

    assert server_main(flags) == 2
    error = capsys.readouterr().err
    assert_one_sentence(error)
    assert words in error


def test_a_server_whose_initial_peers_are_gone(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(llama), "--initial_peers", NOBODY, "--host_maddrs", "/ip4/127.0.0.1/tcp/0"]

    assert server_main(flags) == 1
    error = capsys.readouterr().err
    assert_one_sentence(error)
    assert NOBODY in error


def assert_one_sentence(error: str) -> None:
    lines = [line for line in error.splitlines() if line.startswith("swarmllm")]
    assert len(lines) == 1
    assert "Traceback" not in error


# The swarm


def test_initial_peers_that_are_gone(llama: Path) -> None:
    with pytest.raises(PeerUnreachableError, match=NOBODY), connected(llama, [NOBODY]):
        pass


@pytest.mark.parametrize("peers", [[], ["/ip4/127.0.0.1/tcp/1"], ["nonsense"]], ids=str)
def test_initial_peers_that_are_none(llama: Path, peers: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="initial"), connected(llama, peers, lan_discovery=False):
        pass


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_empty_text(model: Any, use_cache: bool) -> None:
    nothing = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(ConfigurationError, match="empty"):
        model(nothing, use_cache=use_cache)
    with pytest.raises(ConfigurationError, match="empty"):
        model.generate(nothing, max_new_tokens=1, use_cache=use_cache)


@pytest.mark.parametrize("name", ["quantization_config", "load_in_8bit"])
def test_quantization_is_the_servers(llama: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} .*--quant_type"):
        AutoDistributedModel.from_pretrained(str(llama), initial_peers=[NOBODY], **{name: {"load_in_8bit": True}})


@pytest.mark.parametrize("name", ["speculation", "identity_path", "contributor_identity"])
def test_a_client_s_settings_have_a_place_of_their_own(llama: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"give {name} as client_config=ClientConfig\\({name}=…\\)"):
        AutoDistributedModel.from_pretrained(str(llama), initial_peers=[NOBODY], **{name: "off"})


@pytest.mark.parametrize(("name", "meant"), [("initial_peer", "initial_peers"), ("local_block", "local_blocks")])
def test_a_mistyped_argument_is_named_with_the_nearest(llama: Path, name: str, meant: str) -> None:
    """Before a swarm is looked for: without `initial_peers` that is another one."""
    with pytest.raises(ConfigurationError, match=f"^there is no argument {name}: did you mean {meant}\\?"):
        AutoDistributedModel.from_pretrained(str(llama), **{name: [NOBODY]})


def test_a_model_stays_in_its_process(model: Any, local: PreTrainedModel) -> None:
    with pytest.raises(ConfigurationError, match=r"pickled.*save_pretrained"):
        pickle.dumps(model)
    with pytest.raises(ConfigurationError, match=r"copied deeply.*save_pretrained"):
        copy.deepcopy(model)
    assert_same_tokens(copy.copy(model), local, prompt(), max_new_tokens=3)


def test_lengths_and_positions_are_whole_numbers(model: Any) -> None:
    for numbers in ({"max_length": 8.5}, {"max_length": 8, "batch_size": 1.0}):
        with pytest.raises(TypeError, match="integer"):
            model.inference_session(**numbers)
    with model.inference_session(max_length=torch.tensor(8)) as session:
        session.step(model.embed(prompt(length=4)))
        with pytest.raises(TypeError, match="integer"):
            session.position = 1.5


def test_some_dead_initial_peers_do_not_matter(llama: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    with connected(llama, [NOBODY, *swarm.initial_peers]) as model:
        assert_same_tokens(model, local, prompt(), max_new_tokens=3)


def test_two_checkpoints_of_one_name(llama: Path, swarm: LocalSwarm, tmp_path: Path) -> None:
    other = save_llama(tmp_path / llama.name, seed=1)

    with pytest.raises(WeightsMismatchError, match="another version"), connected(other, swarm.initial_peers):
        pass


def test_a_model_that_nobody_serves(swarm: LocalSwarm, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The wait for it is explained by what there is, not by blocks that nobody serves."""
    other = save_llama(tmp_path / "other", seed=1)

    with (
        pytest.raises(MissingBlocksError, match=r"nobody serves .*other.*this swarm serves") as caught,
        connected(other, swarm.initial_peers, route_timeout_s=1),
    ):
        pass
    assert caught.value.block_idxs == tuple(range(8))
    waits = [record.message for record in caplog.records if "looking again for" in record.message]
    assert [wait.partition("; looking")[0] for wait in waits] == [str(caught.value)]


def test_blocks_that_nobody_serves(llama: Path, swarm: LocalSwarm) -> None:
    only = [swarm.servers[0].peer_id]

    with (
        pytest.raises(MissingBlocksError, match="blocks 3:8") as caught,
        connected(llama, swarm.initial_peers, allowed_servers=only, route_timeout_s=1),
    ):
        pass
    assert caught.value.block_idxs == (3, 4, 5, 6, 7)


def test_blocked_servers_are_not_used(llama: Path, swarm: LocalSwarm) -> None:
    blocked = [swarm.servers[1].peer_id]

    with (
        pytest.raises(MissingBlocksError, match="blocks 3:8"),
        connected(llama, swarm.initial_peers, blocked_servers=blocked, route_timeout_s=1),
    ):
        pass


# Too much


@pytest.fixture(scope="module")
def patient(llama: Path, small_swarm: LocalSwarm) -> Iterator[Any]:
    """It tries again, because a server hears only some moments later that a session has been closed."""
    with client(llama, small_swarm, max_retries=8) as model:
        yield model


@pytest.fixture(scope="module")
def impatient(llama: Path, small_swarm: LocalSwarm) -> Iterator[Any]:
    with client(llama, small_swarm) as model:
        yield model


def test_a_full_cache_and_its_release(patient: Any, impatient: Any, local: PreTrainedModel) -> None:
    with patient.inference_session(max_length=350) as session:
        session.step(patient.embed(prompt()))
        with pytest.raises(CacheFullError, match="KV cache"), impatient.inference_session(max_length=350) as other:
            other.step(impatient.embed(prompt()))
        session.step(patient.embed(prompt()))
    assert_same_tokens(patient, local, prompt(), max_new_tokens=100)
    with pytest.raises(CacheFullError):
        generate_seeded(impatient, prompt(), max_new_tokens=100, num_beams=3)
    assert_same_tokens(patient, local, prompt(), max_new_tokens=100)


HOLDS_THE_CACHE = """
import sys
from swarmllm import AutoDistributedModel, ClientConfig
model = AutoDistributedModel.from_pretrained(sys.argv[1], initial_peers=sys.argv[3:],
    client_config=ClientConfig(allowed_servers=[sys.argv[2]]))
session = model.inference_session(max_length=350)
session.step(model.embed(__import__("torch").arange(5)[None]))
print("open", flush=True)
sys.stdin.read()
"""


def test_the_cache_of_a_client_that_was_killed_is_free(
    llama: Path, small_swarm: LocalSwarm, patient: Any, impatient: Any, local: PreTrainedModel
) -> None:
    arguments = [str(llama), small_swarm.servers[0].peer_id, *small_swarm.initial_peers]
    holder = forked.popen([sys.executable, "-c", HOLDS_THE_CACHE, *arguments], stderr=sys.__stderr__, stdout=PIPE)
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(CacheFullError):
            generate_seeded(impatient, prompt(), max_new_tokens=100)
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    assert_same_tokens(patient, local, prompt(), max_new_tokens=100)


def test_batches_above_the_servers_limit_are_split(impatient: Any, local: PreTrainedModel) -> None:
    ids = prompt(9, 20)
    with torch.no_grad():
        torch.testing.assert_close(impatient(ids, use_cache=False).logits, local(ids, use_cache=False).logits)
        with pytest.raises(ConfigurationError, match=f"{MAX_BATCH_TOKENS}.*shorter"):
            impatient(prompt(2, MAX_BATCH_TOKENS + 1), use_cache=False)


def test_a_server_for_certain_clients_only(llama: Path, small_swarm: LocalSwarm, local: PreTrainedModel) -> None:
    with client(llama, small_swarm, 1) as model:
        with pytest.raises(BlocksNotServedError, match="allowed_clients"):
            generate_seeded(model, prompt(), max_new_tokens=3)
        with pytest.raises(BlocksNotServedError, match="allowed_clients"):
            model(prompt(), labels=prompt())
    with client(llama, small_swarm, 1, identity_path=str(small_swarm.friend)) as model:
        assert_same_tokens(model, local, prompt(), max_new_tokens=3)
        model(prompt(), labels=prompt())


def test_a_result_over_the_clients_cap(llama: Path, swarm: LocalSwarm) -> None:
    with (
        connected(llama, swarm.initial_peers, max_message_bytes=4096, max_retries=1) as model,
        pytest.raises(SwarmError, match="4096"),
    ):
        model(prompt(1, 200), use_cache=False)


# What a model is called and opened with


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input_ids": ids(0, 4)}, r"the text is empty: \[0, 4\]"),
        ({"input_ids": ids(2, 0)}, r"the text is empty: \[2, 0\]"),
        ({"input_ids": ids(4)}, r"input_ids must be \[batch, seq\], not \[4\]"),
        ({"input_ids": ids()}, r"input_ids must be \[batch, seq\], not \[\]"),
        ({"input_ids": ids(1, 2, 3)}, r"input_ids must be \[batch, seq\], not \[1, 2, 3\]"),
        ({"input_ids": ids(1, 4, dtype=torch.float32)}, r"must be a tensor of token ids, not torch\.float32"),
        ({"input_ids": ids(1, 4, dtype=torch.bool)}, r"must be a tensor of token ids, not torch\.bool"),
        ({"input_ids": [[1, 2]]}, "must be a tensor of token ids, not list"),
        ({"input_ids": np.ones((1, 2), dtype=np.int64)}, "must be a tensor of token ids, not ndarray"),
        ({"inputs_embeds": torch.zeros(0, 4, 64)}, r"the text is empty: \[0, 4, 64\]"),
        ({"inputs_embeds": torch.zeros(4, 64)}, r"inputs_embeds must be \[batch, seq, 64\], not \[4, 64\]"),
        ({}, "give the model either input_ids or inputs_embeds"),
    ],
)
@pytest.mark.parametrize("use_cache", [None, True, False])
@pytest.mark.parametrize("mode", ["causal", "ptune"])
def test_texts_of_another_shape(
    mode: str, use_cache: bool | None, given: dict[str, Any], words: str, models: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        models[mode](**given, use_cache=use_cache)
    if (text := given.get("input_ids")) is not None and isinstance(text, torch.Tensor) and text.ndim < 2:
        with pytest.raises(ConfigurationError, match=words):
            models[mode].generate(text, max_new_tokens=1)


@pytest.fixture(scope="module")
def models(llama: Path, swarm: LocalSwarm) -> Iterator[dict[str, Any]]:
    tuned = {"tuning_mode": "ptune", "pre_seq_len": 2}
    with (
        connected(llama, swarm.initial_peers) as causal,
        AutoDistributedModel.from_pretrained(str(llama), initial_peers=swarm.initial_peers, **tuned) as ptune,
    ):
        yield {"causal": causal, "ptune": ptune}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"num_labels": count}, "num_labels must be a whole number above 0") for count in ("3", 1.5, 0, -2, True)),
        *(({"id2label": names}, "must be names of the labels 0, 1") for names in (3, [], {}, {"a": "b"}, {1: "b"})),
        ({"num_labels": 3, "id2label": {0: "a"}}, "num_labels is 3, but id2label names 1"),
        ({"label2id": ["a"]}, "label2id must be the numbers of labels"),
        ({"problem_type": "regresion"}, "problem_type must be one of regression, single_label"),
        *(({"pad_token_id": one}, "pad_token_id must be a token id of the model") for one in ("x", 1.5, -5, [1])),
        ({"eos_token_id": [1, "x"]}, "eos_token_id must be a token id"),
        ({"use_cache": "no"}, "use_cache must be true or false, without quotation marks"),
        ({"output_hidden_states": "no"}, "output_hidden_states must be true or false"),
        *(({"tuning_mode": "ptune", "pre_seq_len": count}, "needs pre_seq_len") for count in (True, 2.0, "4", None, 0)),
    ],
)
def test_settings_that_no_head_can_have(options: dict[str, Any], words: str, llama: Path, swarm: LocalSwarm) -> None:
    with pytest.raises(ConfigurationError, match=words):
        AutoDistributedModelForSequenceClassification.from_pretrained(
            str(llama), initial_peers=swarm.initial_peers, **options
        )


def test_counts_of_numpy_are_whole_numbers(llama: Path, swarm: LocalSwarm) -> None:
    with AutoDistributedModelForSequenceClassification.from_pretrained(
        str(llama), initial_peers=swarm.initial_peers, num_labels=np.int64(3), pad_token_id=np.int32(1)
    ) as model:
        assert (model.num_labels, model.config.pad_token_id) == (3, 1)


def test_label2id_is_not_lost_beside_num_labels(llama: Path, swarm: LocalSwarm) -> None:
    numbers = {"calm": 0, "angry": 1, "sad": 2}
    with AutoDistributedModelForSequenceClassification.from_pretrained(
        str(llama), initial_peers=swarm.initial_peers, num_labels=3, label2id=numbers, eos_token_id=[1, 2]
    ) as model:
        assert (model.num_labels, model.config.label2id, model.config.eos_token_id) == (3, numbers, [1, 2])

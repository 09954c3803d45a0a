"""Every encoder-decoder of transformers through separate server processes: equal to the local model, or refused.

`tests/numerics/test_architectures.py` has the same in one process. One server has blocks of both stacks.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import OPTIONS, wait_until
from tests.numerics.architectures import ENCODER_DECODERS, REFUSED_ENCODER_DECODERS
from tests.numerics.exactness import check_generation, check_gradients
from tests.numerics.tiny_encoder_decoders import inputs_of, save_tiny_model, tiny_model
from tests.selection import sampled
from tests.swarm.test_prefixes import counter

from swarmllm import AutoDistributedModelForSeq2SeqLM, ClientConfig, LocalSwarm
from swarmllm.errors import CacheFullError, SwarmError, UnsupportedModelError

SPANS = [(0, 2), (2, 5), (5, 7)]
"""Spans of 4 blocks of the encoder and 3 of the decoder."""


@pytest.mark.parametrize("name", sampled(ENCODER_DECODERS, 30))
def test_through_server_processes(name: str, tmp_path: Path) -> None:
    """Forward, greedy, sampling, beams and gradients; then several texts at once."""
    local = tiny_model(name)
    directory = str(save_tiny_model(name, tmp_path))
    given, target = inputs_of(local), torch.randint(3, 100, (2, 5))
    with (
        LocalSwarm(directory, spans=SPANS, **OPTIONS) as swarm,
        AutoDistributedModelForSeq2SeqLM.from_pretrained(directory, initial_peers=swarm.initial_peers) as model,
    ):
        model.generation_config = copy.deepcopy(local.generation_config)
        with torch.no_grad():
            want, got = (one(**given, decoder_input_ids=target).logits for one in (local, model))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        check_generation(local, model, given)
        check_gradients(local, model, given, labels=target)
        _check_texts_at_once(local, model)


def _check_texts_at_once(local: Any, model: Any) -> None:
    """Sources of different lengths and rows, whose decode steps servers run together."""
    random = torch.Generator().manual_seed(3)
    sources = [torch.randint(3, 100, (rows, length), generator=random) for rows, length in ((1, 9), (2, 4), (1, 17))]
    options = {"do_sample": False, "max_new_tokens": 12, "num_beams": 2}
    wanted = [local.generate(input_ids=source, **options).tolist() for source in sources]
    with ThreadPoolExecutor(len(sources)) as pool:
        found = pool.map(lambda source: model.generate(input_ids=source, **options).tolist(), sources)
    assert list(found) == wanted


@pytest.mark.rotates(6)
@pytest.mark.parametrize("name", REFUSED_ENCODER_DECODERS)
def test_servers_and_clients_refuse_with_the_reason(name: str, tmp_path: Path) -> None:
    """Before anything is computed."""
    directory = str(save_tiny_model(name, tmp_path))
    with pytest.raises(SwarmError, match=f"{name} can't be split over servers: it"):
        LocalSwarm(directory, spans=[(0, 2)], **OPTIONS).start()
    with pytest.raises(UnsupportedModelError, match=f"{name} can't be split over servers: it"):
        AutoDistributedModelForSeq2SeqLM.from_pretrained(directory, initial_peers=["/ip4/127.0.0.1/tcp/9/p2p/12D3KooW"])


def test_what_an_encoder_gave_is_leased_bounded_and_freed(tmp_path: Path) -> None:
    directory = str(save_tiny_model("bart", tmp_path))
    with (
        LocalSwarm(directory, spans=[(0, 7)], metrics_port=0, attn_cache_tokens=256, **OPTIONS) as swarm,
        AutoDistributedModelForSeq2SeqLM.from_pretrained(
            directory, client_config=ClientConfig(initial_peers=swarm.initial_peers, route_timeout_s=1)
        ) as model,
    ):
        (server,) = swarm.servers
        sources = [torch.randint(3, 100, (1, length)) for length in (10, 100)]
        leased = []
        for source in sources:
            with torch.no_grad():
                cache = model(input_ids=source, decoder_input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=True)
            leased.append(counter(server, "cache_leased_bytes"))
            del cache
            wait_until(lambda: counter(server, "cache_leased_bytes") == 0, "the lease's end")
            model.generate(input_ids=source, max_new_tokens=4)
            wait_until(lambda: counter(server, "cache_leased_bytes") == 0, "the lease's end")
        assert leased[1] > leased[0] > 0
        with pytest.raises(CacheFullError):
            model.generate(input_ids=torch.randint(3, 100, (64, 120)), max_new_tokens=4)
        assert counter(server, "cache_leased_bytes") == 0

"""The local model that goes on where the swarm has failed is given the text as the swarm's model was."""

import copy
from typing import Any

import pytest
import torch
from tests.numerics.tiny_models import VOCABULARY, tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from swarmllm.client.local_fallback import LocalFallback
from swarmllm.errors import RoutingError

NEW = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def local() -> PreTrainedModel:
    """GPT-2 looks up positions and types of tokens."""
    return tiny_model("gpt2")


def failing(local: Any, num_tokens: int, **given_too: Any) -> Any:
    """A loop whose swarm fails behind so many tokens of the text."""
    fallback: Any = object.__new__(LocalFallback)
    fallback.model, fallback.after = local, None

    def write(model: Any, input_ids: Tensor, stopping_criteria: Any, **more: Any) -> Any:
        names = ("logits_processor", "generation_config")
        given = {name: more.pop(name) for name in names} | given_too
        method = "_beam_search" if given["generation_config"].num_beams > 1 else "_sample"

        def in_swarm(criteria: Any) -> Any:
            text = model.generate(input_ids[:1], **NEW | {"max_new_tokens": num_tokens}, **_of_text(more))
            criteria(text, None)
            raise RoutingError("the swarm is gone")

        return fallback.finish_if_swarm_fails(in_swarm, model, method, input_ids, stopping_criteria, given, more)

    write.fallback = fallback  # type: ignore[attr-defined]
    return write


def _of_text(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("attention_mask", "position_ids", "token_type_ids")
    return {name: kwargs[name][:1] for name in names if kwargs.get(name) is not None}


def ids(rows: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(2))


PADDED = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
KINDS: dict[str, dict[str, Any]] = {
    "padded": {"attention_mask": PADDED},
    "positions": {"position_ids": torch.arange(9).expand(2, -1) + 5},
    "types": {"token_type_ids": torch.tensor([[0] * 4 + [9] * 5, [2] * 9])},
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_positions_and_types(local: Any, kind: str, rows: int) -> None:
    given = {name: tensor[:rows] for name, tensor in KINDS[kind].items()}
    expected = local.generate(ids(rows), **NEW, **given)
    if rows == 2:
        assert expected.tolist() != local.generate(ids(rows), **NEW, attention_mask=torch.ones(rows, 9)).tolist()
    got = local.generate(ids(rows), **NEW, **given, custom_generate=failing(local, 3))
    assert got.tolist() == expected.tolist()


def test_beams(local: Any) -> None:
    options = {**NEW, "num_beams": 2, "attention_mask": PADDED}
    got = local.generate(ids(2), **options, custom_generate=failing(local, 3))
    assert got.tolist() == local.generate(ids(2), **options).tolist()


def test_a_prompt_in_chunks(local: Any) -> None:
    got = local.generate(ids(1), **NEW, prefill_chunk_size=4, custom_generate=failing(local, 3))
    assert got.tolist() == local.generate(ids(1), **NEW).tolist()


@pytest.mark.parametrize("num_positions", [16, 15, 8])
def test_a_text_longer_than_the_local_model_has_positions(local: Any, num_positions: int) -> None:
    short = copy.deepcopy(local)
    short.config.n_positions = num_positions
    short.transformer.wpe = torch.nn.Embedding.from_pretrained(local.transformer.wpe.weight[:num_positions])
    write = failing(local, 3)
    write.fallback.model = short
    if num_positions == 16:  # the last token is never fed
        got = local.generate(ids(1), **NEW, custom_generate=write)
        assert got.tolist() == local.generate(ids(1), **NEW).tolist()
    else:
        with pytest.raises(RoutingError, match=f"for {num_positions} positions, too few for this text.*swarm is gone"):
            local.generate(ids(1), **NEW, custom_generate=write)


def test_several_rows_that_a_streamer_has_seen_are_not_written_anew(local: Any) -> None:
    class Streamed(BaseStreamer):
        def put(self, value: Tensor) -> None: ...
        def end(self) -> None: ...

    with pytest.raises(RoutingError, match="the swarm is gone"):
        local.generate(ids(2), **NEW, custom_generate=failing(local, 3, streamer=Streamed()))


def test_a_text_whose_beginning_only_the_cache_knows_ends_with_the_error(local: Any) -> None:
    begun = local.generate(ids(1), **NEW, return_dict_in_generate=True)
    mask = torch.ones(1, begun.sequences.shape[1], dtype=torch.long)
    with pytest.raises(RoutingError, match="the swarm is gone"):
        local.generate(
            begun.sequences[:, -1:],
            **NEW,
            attention_mask=mask,
            past_key_values=begun.past_key_values,
            custom_generate=failing(local, 3),
        )

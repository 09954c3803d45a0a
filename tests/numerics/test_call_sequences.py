"""Any sequence of calls of a model, with caches kept, changed and mixed up: as the local model, or a clear refusal.

Both models are given the same calls. Where the local one refuses, nothing is promised; where it answers, the client
must give the same numbers, or, for what a client can't do at all, one sentence.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.test_task_classes import save_tiny as save_classifier
from tests.numerics.tiny_models import VOCABULARY, save_tiny
from tests.selection import sampled
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from swarmllm.errors import ConfigurationError, SessionClosedError
from swarmllm.models.architecture import Task, cache_argument, decoder_stack
from swarmllm.models.shell.remote_cache import RemoteCache

QUICK = ["llama", "gpt2", "mistral", "qwen3_next"]
MORE = [
    "gemma3_text",
    "falcon_alibi",
    "mamba",
    "mamba2",
    "deepseek_v3",
    "gpt_neo",
    "opt",
    "bloom",
    "gemma3n_text",
    "lfm2",
]
LIMIT = 60
"""Positions of a text: fewer than any of these models has."""
LOCAL_ERRORS = (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError, IndexError)

draw_rows = st.integers(1, 3)


@dataclass
class Held:
    """A cache of each model, and what both have been told."""

    local: Any
    remote: Any
    ids: Tensor
    """`[rows, length]`; what was given as embeddings counts by the ids it was made of."""
    mask: Tensor
    """`[rows, length]`; the last one that was given, or ones."""
    masked: bool = False
    """True if positions were hidden at some time."""
    cropped: bool = False
    """True if positions were forgotten. A position hidden from all has looked at all others, also at later ones, which
    are gone now. Its keys are made again without them, so it must stay hidden."""


@dataclass
class Pair:
    """The local model and the client."""

    local: PreTrainedModel
    remote: PreTrainedModel
    name: str
    held: list[Held] = field(default_factory=list)

    def both(self, call: Callable[[PreTrainedModel, Any], Any], held: Held | None) -> tuple[Any, Any] | None:
        """The answers of both; None if the local model refuses."""
        try:
            local = call(self.local, held and held.local)
        except LOCAL_ERRORS:
            return None
        return local, call(self.remote, held and held.remote)


def close(got: Tensor, wanted: Tensor) -> None:
    got, wanted = got.detach(), wanted.detach()
    assert got.shape == wanted.shape
    assert bool(wanted.isfinite().all())
    assert float((got - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))


def draw_ids(data: st.DataObject, rows: int, length: int) -> Tensor:
    seed = data.draw(st.integers(0, 999), "seed")
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def forward(pair: Pair, data: st.DataObject, held: Held | None) -> None:
    rows, past = (held.ids.shape[0], held.ids.shape[1]) if held else (data.draw(draw_rows, "rows"), 0)
    length = data.draw(st.sampled_from([1, 1, 1, 2, 5]) if held else st.integers(1, 9), "length")
    ids = draw_ids(data, rows, length)
    mask = torch.cat([held.mask if held else ids.new_ones(rows, 0), torch.ones_like(ids)], dim=1)
    options: dict[str, Any] = {"use_cache": data.draw(st.sampled_from([True, None, False]), "use_cache")}
    masks = data.draw(st.sampled_from(["omitted", "given", "padded"]), "mask")
    if masks == "padded" and held is None and length > 2:
        mask[0, : length // 2] = 0
    if masks != "omitted" or (held is not None and held.masked and held.cropped):
        options["attention_mask"] = mask
    if data.draw(st.booleans(), "positions"):
        options["position_ids"] = torch.arange(past, past + length).expand(rows, -1)
    if data.draw(st.booleans(), "labels") and length > 1:
        options["labels"] = ids
    if data.draw(st.booleans(), "the last logits only") and "labels" not in options:
        options["logits_to_keep"] = 1
    as_tuple = data.draw(st.booleans(), "a tuple")
    as_embeds = data.draw(st.booleans(), "embeddings") and "input_ids" not in pair.remote.swarm_traits.extra_inputs
    training, with_gradients = data.draw(st.booleans(), "train"), data.draw(st.booleans(), "gradients")

    def call(model: PreTrainedModel, cache: Any) -> Any:
        model.train(training)
        given = {"inputs_embeds": model.get_input_embeddings()(ids)} if as_embeds else {"input_ids": ids}
        if cache is not None:
            given[pair.name] = cache
        with torch.set_grad_enabled(with_gradients):
            return model(**given, **options, return_dict=False if as_tuple else None)

    answers = pair.both(call, held)
    if answers is None:
        if held:
            pair.held.remove(held)
        return
    local, remote = answers
    if as_tuple:
        assert len(local) == len(remote)
        pairs = list(zip(local, remote, strict=True))
        caches = next((both for both in pairs if not isinstance(both[0], Tensor)), (None, None))
        tensors = [both for both in pairs if isinstance(both[0], Tensor)]
    else:
        assert local.keys() == remote.keys()
        caches = local.get(pair.name), remote.get(pair.name)
        tensors = [(local[name], remote[name]) for name in local if isinstance(local[name], Tensor)]
    for wanted, got in tensors:
        close(got, wanted)
        assert got.requires_grad == wanted.requires_grad
    if with_gradients:
        gradients(pair, tensors[-1], held)
    if held is not None:  # whatever `use_cache` says, the given cache goes on
        held.ids, held.mask = torch.cat([held.ids, ids], dim=1), mask
        assert caches[0] is None or caches == (held.local, held.remote)
    elif caches[0] is not None:
        assert isinstance(caches[1], RemoteCache)
        pair.held.append(held := Held(*caches, ids, mask, not bool(mask.all())))
    else:
        assert caches[1] is None
    if held is not None:
        same_length(held)


def gradients(pair: Pair, tensors: tuple[Tensor, Tensor], held: Held | None) -> None:
    wanted, got = tensors
    embeddings = [model.get_input_embeddings().weight for model in (pair.local, pair.remote)]
    if held is not None:
        with pytest.raises(ConfigurationError, match="use_cache=False"):
            got.sum().backward()
        return
    of_local, of_remote = (
        torch.autograd.grad(tensor.square().sum(), weight, retain_graph=True)[0]
        for tensor, weight in zip((wanted, got), embeddings, strict=True)
    )
    close(of_remote, of_local)


def local_length(held: Held) -> int | None:
    try:
        return int(held.local.get_seq_length())
    except ValueError:  # no block of that kind
        return None


def same_length(held: Held) -> None:
    length = local_length(held)
    assert length is None or held.remote.get_seq_length() == length == held.ids.shape[1]


def change(pair: Pair, data: st.DataObject, held: Held) -> None:
    """Crop, reorder, select, repeat, or begin anew."""
    rows, length = held.ids.shape
    kind = data.draw(st.sampled_from(["crop", "reorder", "select", "repeat", "reset"]), "change")
    chosen = list(range(rows))
    if kind == "crop":
        length = data.draw(st.integers(1, length), "crop to")
        change_of = lambda cache: cache.crop(length - held.ids.shape[1])  # noqa: E731
        held.cropped = True
    elif kind == "reset":
        pair.held.remove(held)
        held.remote.reset()
        assert held.remote.get_seq_length() == 0
        return
    elif kind == "repeat":
        repeats = data.draw(st.integers(1, 2), "repeats")
        chosen = [row for row in chosen for _ in range(repeats)]
        change_of = lambda cache: cache.batch_repeat_interleave(repeats)  # noqa: E731
    else:
        size = rows if kind == "reorder" else data.draw(draw_rows, "rows left")
        chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=size, max_size=size), "chosen")
        method = "reorder_cache" if kind == "reorder" else "batch_select_indices"
        change_of = lambda cache: getattr(cache, method)(torch.tensor(chosen))  # noqa: E731
    try:
        change_of(held.local)
    except LOCAL_ERRORS:  # some blocks may have been changed, others not
        pair.held.remove(held)
        return
    change_of(held.remote)
    held.ids, held.mask = held.ids[chosen, :length], held.mask[chosen, :length]
    same_length(held)


def duplicate(pair: Pair, data: st.DataObject, held: Held) -> None:
    twin = copy.deepcopy if data.draw(st.booleans(), "deep") else copy.copy
    try:
        local = twin(held.local)
    except LOCAL_ERRORS:  # torch copies no tensors that have a graph
        return
    remote = twin(held.remote)
    if twin is copy.deepcopy:
        pair.held.append(Held(local, remote, held.ids, held.mask, held.masked, held.cropped))
    else:
        held.remote = remote


def end(pair: Pair, data: st.DataObject, held: Held) -> None:
    pair.held.remove(held)
    held.remote.close()
    held.remote.close()
    with pytest.raises(SessionClosedError), torch.no_grad():
        pair.remote(held.ids[:, :1], **{pair.name: held.remote})


def generate(pair: Pair, data: st.DataObject, held: Held | None) -> None:
    rows = held.ids.shape[0] if held else data.draw(draw_rows, "rows")
    tail = draw_ids(data, rows, data.draw(st.integers(1, 3), "tail"))
    ids = torch.cat([held.ids, tail], dim=1) if held else tail
    mask = torch.cat([held.mask, torch.ones_like(tail)], dim=1) if held else torch.ones_like(tail)
    if held is not None and (held.masked or not data.draw(st.booleans(), "continue")):
        held, ids, mask = None, tail, torch.ones_like(tail)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}

    def call(model: PreTrainedModel, cache: Any) -> Any:
        given = {pair.name: cache} if cache is not None else {}
        return model.eval().generate(ids, attention_mask=mask, **options, **given)

    answers = pair.both(call, held)
    if answers is None:
        if held:
            pair.held.remove(held)
        return
    local, remote = answers
    assert local.sequences.tolist() == remote.sequences.tolist()
    if held is not None:
        if local_length(held) is None:
            pair.held.remove(held)  # nobody knows how much it has seen, so `generate` has fed it the whole text again
            return
        seen = local.sequences[:, :-1]
        held.ids, held.mask = seen, torch.ones_like(seen)
        same_length(held)


def refused(pair: Pair, data: st.DataObject, held: Held | None) -> None:
    """Calls that no client can make, with or without a past; nothing happens then."""
    impossible: list[dict[str, Any]] = [{pair.name: DynamicCache()}]
    # Models without attention take no note of the wish; those that only know eager attention grant it.
    if pair.name != "cache_params" and pair.remote.config._attn_implementation != "eager":
        impossible.append({"output_attentions": True})
    wrong = data.draw(st.sampled_from(impossible))
    with pytest.raises(ConfigurationError), torch.no_grad():
        pair.remote(torch.tensor([[5, 6]]), **wrong)


def run_sequence(pair: Pair, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(2, 9), "calls")):
        short = [held for held in pair.held if held.ids.shape[1] < LIMIT]
        held = data.draw(st.sampled_from(short), "which") if short and data.draw(st.integers(0, 4), "go on") else None
        step = data.draw(st.sampled_from([forward] * 6 + [change] * 3 + [duplicate, end, generate, refused]), "step")
        if held is None and step in (change, duplicate, end):
            step = forward
        step(pair, data, held)


@pytest.fixture(scope="module", params=sampled([*QUICK, *MORE], 8, always=["llama"]))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, str]:
    directory = tmp_path_factory.mktemp(request.param)
    local = save_tiny(request.param, directory)
    return local, InProcessSwarm(directory).client, cache_argument(decoder_stack(local))


@pytest.mark.timeout(600)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_as_the_local_model(models: tuple[Any, Any, str], data: st.DataObject) -> None:
    run_sequence(Pair(*models), data)


@pytest.mark.parametrize("use_cache", [True, None])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_the_usual_loop(models: tuple[Any, Any, str], use_cache: bool | None, with_gradients: bool) -> None:
    """One token after the other, each with the cache of the call before."""
    texts = []
    local, client, name = models
    for model in (local, client):
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        model.eval()
        with torch.set_grad_enabled(with_gradients):
            output = model(ids, use_cache=use_cache)
            for _ in range(6):
                next_id = output.logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, next_id], dim=1)
                output = model(next_id, use_cache=use_cache, **{name: output[name]})
        texts.append(ids.tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_copy_of_what_contrary_masks_have_seen(models: tuple[Any, Any, str], in_place: bool) -> None:
    """Each step is computed again with what it was given, whatever has become of that since."""
    found = []
    local, client, name = models
    takes_positions = "position_ids" in inspect.signature(local.forward).parameters
    for model in (local.eval(), client.eval()):
        ids, logits = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5)), []
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        positions, cache = torch.arange(9).expand(2, -1).clone(), None
        with torch.no_grad():
            for step, part in enumerate(ids.split((9, 1, 1, 1), dim=1)):
                given = {"attention_mask": mask[:, : 9 + step]} if step != 1 else {}
                if takes_positions:
                    given["position_ids"] = positions if step == 0 else positions[:, -1:]
                if cache is not None:
                    cache = copy.deepcopy(cache)
                    given[name] = cache
                output = model(part, use_cache=True, **given)
                cache = output[name]
                logits.append(output.logits)
                if in_place:
                    positions += 1
                    mask[1, step] = 0
                else:
                    positions = positions + 1
        found.append(logits)
    for wanted, got in zip(*found, strict=True):
        close(got, wanted)


def test_an_encoder_has_no_use_for_a_cache(tmp_path: Path) -> None:
    local = save_classifier("bert", Task.SEQUENCE_CLASSIFICATION, tmp_path).eval()
    client = InProcessSwarm(tmp_path, task=Task.SEQUENCE_CLASSIFICATION).client.eval()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    for use_cache in (True, None, False):
        for with_gradients in (True, False):
            with torch.set_grad_enabled(with_gradients):
                given = {} if use_cache is None else {"use_cache": use_cache}
                wanted, got = (model(ids, labels=torch.tensor([1]), **given) for model in (local, client))
            assert got.keys() == wanted.keys()
            close(got.logits, wanted.logits)
            close(got.loss, wanted.loss)

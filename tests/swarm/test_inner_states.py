"""Hidden states and attentions from real servers: what the local model returns, whatever else goes on."""

import copy
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_models import NUM_BLOCKS, OPTIONS, connected, load_local, prompt
from test_peft import INSIDE, tuned
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel

from swarmllm import AutoDistributedModel, LocalSwarm
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary import inner_states

pytestmark = pytest.mark.rotates(6, whole_file=True)


@pytest.fixture(scope="module")
def eager_local(llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(llama, dtype="auto", attn_implementation="eager").requires_grad_(False)


@pytest.fixture(scope="module")
def eager(llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    with AutoDistributedModel.from_pretrained(
        str(llama), initial_peers=swarm.initial_peers, attn_implementation="eager"
    ) as model:
        yield model


@pytest.fixture(scope="module", params=[{}, {"push": False}, {"local_blocks": "0:2,5:6"}], ids=str)
def any_model(request: pytest.FixtureRequest, llama: Path, swarm: LocalSwarm) -> Iterator[Any]:
    """Servers that pass on to each other; a client that relays; blocks of its own beside servers'."""
    with connected(llama, swarm.initial_peers, **request.param) as model:
        yield model


def flat(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [tensor for part in found for tensor in flat(part)]


def assert_same(found: Any, expected: Any) -> None:
    assert [one.shape for one in flat(found)] == [one.shape for one in flat(expected)]
    assert all(map(torch.equal, flat(found), flat(expected)))


def assert_close(found: Any, expected: Any) -> None:
    """For steps that are cut differently than in the local model, and so round differently."""
    assert [one.shape for one in flat(found)] == [one.shape for one in flat(expected)]
    for one, other in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def padded(batch: int, length: int) -> tuple[Tensor, Tensor]:
    ids = prompt(batch, length)
    mask = torch.ones_like(ids)
    ids[0, :4] = mask[0, :4] = 0
    return ids, mask


def generated(model: Any, ids: Tensor, **options: Any) -> Any:
    asked = {"output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 6}
    return model.generate(ids, **asked, **options)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_forward(any_model: Any, local: PreTrainedModel, use_cache: bool) -> None:
    ids, mask = padded(3, 20)
    with torch.no_grad():
        got, wanted = (
            model(ids, attention_mask=mask, use_cache=use_cache, output_hidden_states=True)
            for model in (any_model, local)
        )
    assert len(got.hidden_states) == NUM_BLOCKS + 1
    # With a cache it is a session's prompt, which servers cut into pieces while others decode, or just have.
    same = assert_close if use_cache else assert_same
    same(got.hidden_states, wanted.hidden_states)
    same(got.logits, wanted.logits)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=str)
def test_generate(any_model: Any, local: PreTrainedModel, options: dict[str, Any]) -> None:
    ids, mask = padded(2, 12)
    outputs = []
    for model in (any_model, local):
        torch.manual_seed(1)
        settings = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True}
        outputs.append(model.generate(ids, attention_mask=mask, output_hidden_states=True, **(settings | options)))
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    assert_same(outputs[0].hidden_states, outputs[1].hidden_states)


def test_a_long_prompt_in_pieces(any_model: Any, local: PreTrainedModel) -> None:
    """In several steps: other shapes round differently, in the local model as well."""
    ids = prompt(1, 300)
    got, wanted = (generated(model, ids).hidden_states for model in (any_model, local))
    assert_close(got, wanted)


def test_attentions(eager: Any, eager_local: PreTrainedModel) -> None:
    ids, mask = padded(2, 12)
    with torch.no_grad():
        got, wanted = (
            model(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
            for model in (eager, eager_local)
        )
    assert_same(got.attentions, wanted.attentions)
    assert_same(got.hidden_states, wanted.hidden_states)
    for options in ({}, {"num_beams": 2}):
        texts = [
            generated(model, ids, attention_mask=mask, output_attentions=True, **options)
            for model in (eager, eager_local)
        ]
        assert_same(texts[0].attentions, texts[1].attentions)
        assert_same(texts[0].hidden_states, texts[1].hidden_states)


def test_what_attentions_need_is_said(model: Any, eager: Any) -> None:
    with pytest.raises(ConfigurationError, match='attn_implementation="eager"'), torch.no_grad():
        model(prompt(), output_attentions=True)
    with pytest.raises(ConfigurationError, match="no_grad"):
        eager(prompt(), output_attentions=True)
    with pytest.raises(ConfigurationError, match="output_router_logits"):
        model(prompt(), output_router_logits=True)


def test_gradients_flow_through_hidden_states(any_model: Any, local: PreTrainedModel) -> None:
    ids, found = prompt(3, 15), []
    for model in (any_model, local):
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        hidden = model(inputs_embeds=embeds, use_cache=False, output_hidden_states=True).hidden_states
        sum((one * one).mean() * (index + 1) for index, one in enumerate(hidden)).backward()
        found.append((hidden, embeds.grad))
    assert_same([one.detach() for one in found[0][0]], [one.detach() for one in found[1][0]])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_padding_is_part_of_hidden_states_with_gradients(any_model: Any, local: PreTrainedModel) -> None:
    """Also of those that are outputs of a request of their own, and for a loss that looks at the texts alone."""
    ids, mask = padded(2, 12)
    found = []
    for model in (any_model, local):
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        labels = ids.masked_fill(mask == 0, -100)
        labels[0, 4] = -100  # it is predicted from padding
        output = model(inputs_embeds=embeds, attention_mask=mask, labels=labels, output_hidden_states=True)
        hidden = torch.stack(output.hidden_states)
        (output.loss + hidden.square().mean()).backward()
        found.append((hidden.detach(), output.loss.detach(), embeds.grad))
    assert_close(*found)


def test_no_gradient_through_a_session(model: Any) -> None:
    ids = prompt(1, 6)
    past = model(ids, use_cache=True).past_key_values
    output = model(ids[:, :1], past_key_values=past, output_hidden_states=True)
    with pytest.raises(ConfigurationError, match="KV cache"):
        output.hidden_states[3].sum().backward()


def test_only_what_is_named_travels(llama: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    ids, asked = prompt(2, 30), []
    with connected(llama, swarm.initial_peers) as model, torch.no_grad():
        taken = inner_states.InnerStates.take
        with pytest.MonkeyPatch.context() as patch:

            def note(self: inner_states.InnerStates, blocks: tuple[int, ...], *rest: Any, **more: Any) -> None:
                asked.extend(blocks)
                taken(self, blocks, *rest, **more)

            patch.setattr(inner_states.InnerStates, "take", note)
            got = model(ids, use_cache=False, output_hidden_states=[2, -2]).hidden_states
    assert sorted(asked) == [1, 6]
    wanted = local(ids, use_cache=False, output_hidden_states=[2, -2]).hidden_states
    assert [one is None for one in got] == [one is None for one in wanted]
    assert_same([one for one in got if one is not None], [one for one in wanted if one is not None])


def test_large_answers_come_in_parts(
    llama: Path, swarm: LocalSwarm, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmllm.client.view.connection.ANSWER_BYTES", 20 * 64 * 4)
    ids = prompt(2, 20)
    with connected(llama, swarm.initial_peers) as model, torch.no_grad():
        assert_same(
            model(ids, use_cache=False, output_hidden_states=True).hidden_states,
            local(ids, use_cache=False, output_hidden_states=True).hidden_states,
        )
        got, wanted = (generated(one, ids[:1]).hidden_states for one in (model, local))
        assert_close(got, wanted)


def test_beside_speculation_sessions_and_many_texts(llama: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    ids = prompt(1, 10)
    wanted = generated(local, ids).hidden_states
    with connected(llama, swarm.initial_peers, speculation="ngram") as model:
        assert_same(generated(model, ids).hidden_states, wanted)
        with model.inference_session(max_length=64) as session:
            model.generate(ids[:, :6], max_new_tokens=1, do_sample=False)  # what has been seen is not computed again
            assert session.position == 6
            assert_close(flat(generated(model, ids).hidden_states)[NUM_BLOCKS + 1 :], flat(wanted)[NUM_BLOCKS + 1 :])
        asked = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 6}
        for _, output in model.generate_many([ids, ids], do_sample=False, **asked):
            assert_same(output.hidden_states, wanted)


def test_prompts_that_are_shared(llama: Path, swarm: LocalSwarm, local: PreTrainedModel) -> None:
    """Pages of a prompt know nothing of what is between blocks, so it is computed."""
    ids = prompt(1, 140, seed=5)
    with connected(llama, swarm.initial_peers, prefill_chunk_tokens=1 << 12) as model:
        for _ in range(2):
            model.generate(ids, max_new_tokens=2, do_sample=False)
            assert_close(generated(model, ids).hidden_states, generated(local, ids).hidden_states)


def dola(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, **kwargs: Any) -> Tensor:
    """Decoding by contrasting layers (Chuang et al. 2024), as a user writes it for `custom_generate`."""
    kwargs.pop("generation_config", None)
    head = model.get_output_embeddings()
    kwargs["output_hidden_states"] = True
    first = True
    while True:
        inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=None if first else 1, is_first_iteration=first, **kwargs
        )
        first = False
        output = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(output, kwargs)
        mature = output.logits[:, -1].float().log_softmax(-1)
        early = [head(output.hidden_states[index][:, -1]).float().log_softmax(-1) for index in (0, 2, 4, 6)]
        farthest = max(early, key=lambda one: float((one.exp() - mature.exp()).abs().sum()))
        plausible = mature >= mature.max(dim=-1, keepdim=True).values + torch.log(torch.tensor(0.1))
        scores = (mature - farthest).where(plausible, -torch.inf)
        input_ids = torch.cat([input_ids, logits_processor(input_ids, scores).argmax(-1, keepdim=True)], dim=-1)
        if bool(stopping_criteria(input_ids, None).all()):
            return input_ids


def test_dola(model: Any, local: PreTrainedModel) -> None:
    ids = prompt(1, 9)
    texts = [
        one.generate(
            ids, custom_generate=dola, max_new_tokens=12, do_sample=False, logits_processor=LogitsProcessorList()
        )
        for one in (model, local)
    ]
    assert operator.eq(*(text.tolist() for text in texts))
    with pytest.raises(ValueError, match="trust_remote_code"):  # transformers' own words: the loop lives on the hub
        model.generate(ids, dola_layers="high", max_new_tokens=2, do_sample=False)


def test_a_server_killed_in_mid_text(llama: Path) -> None:
    local, ids = load_local(llama), prompt(2, 10)
    wanted = generated(local, ids)
    with (
        LocalSwarm(llama, spans=[(0, 4), (2, NUM_BLOCKS), (3, NUM_BLOCKS)], **OPTIONS) as swarm,
        connected(llama, swarm.initial_peers) as model,
        model.inference_session(max_length=64, batch_size=2) as session,
    ):
        killed: list[str] = []

        def kill(text: Tensor, scores: Any) -> Tensor:
            if text.shape[1] == 13 and not killed:
                killed.append(session.route[-1].server.peer_id)
                next(server for server in swarm.servers if server.peer_id == killed[0]).kill()
            return torch.zeros(len(text), dtype=torch.bool)

        got = generated(model, ids, stopping_criteria=[kill])
        assert killed
        assert session.num_repairs >= 1
    assert got.sequences.tolist() == wanted.sequences.tolist()
    assert_close(got.hidden_states, wanted.hidden_states)


@pytest.mark.parametrize("method", ["LoRA", "prefix tuning"])
def test_adapters(method: str, llama: Path, swarm: LocalSwarm, eager_local: PreTrainedModel) -> None:
    ids, config = prompt(2, 9), INSIDE[method](["q_proj", "v_proj"])
    wanted = tuned(copy.deepcopy(eager_local), config).eval()
    options = {"initial_peers": swarm.initial_peers, "attn_implementation": "eager"}
    with AutoDistributedModel.from_pretrained(str(llama), **options) as model:
        got = tuned(model, config).eval()
        with torch.no_grad():
            shown, expected = (
                one(input_ids=ids, output_hidden_states=True, output_attentions=True) for one in (got, wanted)
            )
        assert_close(shown.hidden_states, expected.hidden_states)
        assert_close(shown.attentions, expected.attentions)
        grads = []
        for one in (got, wanted):
            hidden = one(input_ids=ids, output_hidden_states=True).hidden_states
            sum((state * state).mean() for state in hidden).backward()
            grads.append([p.grad for _, p in sorted(one.named_parameters()) if p.grad is not None])
        assert len(grads[0]) == len(grads[1]) > 0
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)  # eager here, and not there


def test_tuned_prompts_are_not_shown(llama: Path, swarm: LocalSwarm) -> None:
    options = {"initial_peers": swarm.initial_peers, "attn_implementation": "eager"}
    with AutoDistributedModel.from_pretrained(str(llama), tuning_mode="ptune", pre_seq_len=3, **options) as model:
        ids = prompt(2, 9)
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
            assert [one.shape for one in output.hidden_states] == [(2, 9, 64)] * (NUM_BLOCKS + 1)
            assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
            assert torch.equal(model(ids, output_hidden_states=True, return_dict=False)[-1][3], output.hidden_states[3])
            with pytest.raises(ConfigurationError, match="tuning_mode"):
                model(ids, output_attentions=True)

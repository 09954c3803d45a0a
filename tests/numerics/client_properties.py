"""Properties of every architecture through a client and its servers: both models give the same.

`test_architectures` runs them. Each takes a `Subject`, and fails if the client differs from the local model.
"""

from collections.abc import Callable
from typing import Any

import torch
from tests.numerics import exactness
from tests.numerics.architectures import ALL, Subject
from tests.numerics.block_hooks import CHECKS as HOOKED
from tests.numerics.block_hooks import compared, forward
from tests.numerics.exactness import MASK, PROMPT, check_generation, check_gradients, differences, outcome
from tests.numerics.in_process_swarm import InProcessSwarm
from tests.numerics.test_padding import check_skipped_padding
from tests.numerics.test_prefix_tuning import NO_HEADS, OTHER_CACHES, OTHER_SHAPES, check_prefix, check_refused_prefix
from tests.numerics.tiny_encoder_decoders import inputs_of
from tests.numerics.tiny_models import tiny_model
from tests.numerics.tiny_speech_models import sound
from tests.numerics.tiny_vision_models import IMAGE_TOKEN
from tests.numerics.tiny_vision_models import inputs_of as picture_of
from tests.selection import part_of
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm.models.parallel.shared import SharedWeight

TARGET = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------- text: logits, gradients and texts


def as_local(check: exactness.Check) -> Callable[[Subject], None]:
    def holds(subject: Subject) -> None:
        local, swarm = subject.local, subject.swarm
        random_state = torch.get_rng_state()
        assert check(local, swarm) is None
        assert torch.equal(random_state, torch.get_rng_state()), "the random state of the user was changed"

    holds.__name__ = check.__name__
    return holds


def assisted(subject: Subject) -> None:
    assert exactness.assisted(subject.local, subject.swarm, tiny_model(subject.name, seed=5)) is None


def assert_as_local(subject: Subject, swarm: InProcessSwarm) -> None:
    """Each kind of call that blocks are given; what clients make of them is in `as_local`."""
    checks = (exactness.full_forward, exactness.prefill_and_decode, exactness.beam_reorder, exactness.input_gradients)
    failures = {check.__name__: check(subject.local, swarm) for check in checks}
    assert {name: problem for name, problem in failures.items() if problem} == {}


def offloaded_blocks(subject: Subject) -> None:
    """Two of three blocks share one slot in memory, or all three share two."""
    assert_as_local(subject, subject.fresh_swarm(num_offloaded=1 + part_of(subject.name, 2)))


ADDS_UP_OTHERWISE = frozenset(
    {
        *("axk2", "bailing_hybrid", "deepseek_v4", "dots3_note_text", "falcon_mamba", "gemma3n_text"),
        *("gemma3n_shared_kv", "granitemoe_swa", "hy_v4", "jamba", "jetmoe", "kimi_linear", "laguna", "lfm3", "mamba"),
        *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp_text", "zamba", "zamba2"),
        # Only gradients, which are sums over the processes.
        *("gemma4_text", "gemma4_unified_text", "gemma4_shared_kv"),
    }
)
"""The processor's library computes products with some of the rows in another way, and rounds them otherwise."""
ROUNDING_OVER_PROCESSES = 1e-5
"""Relative; measured: at most 3e-6."""


def matrices_over_two_processes(subject: Subject) -> None:
    swarm = subject.fresh_swarm(group=subject.group())
    blocks = [server for server, _ in swarm.route]
    if subject.name in ADDS_UP_OTHERWISE or any(server.has_pairs for server in blocks):
        swarm.tolerance = max(ROUNDING_OVER_PROCESSES, subject.tolerance)
    assert_as_local(subject, swarm)
    for server in blocks:
        assert any(isinstance(module, SharedWeight) for module in server.slots.modules()), "no matrix is spread"


def skipped_padding(subject: Subject) -> None:
    check_skipped_padding(subject.name, subject.local, subject.fresh_swarm())


# ---------------------------------------------------------------------- text: the inside, hooks, prefixes


def hidden_states(subject: Subject) -> None:
    failures = {}
    for check in exactness.INNER_STATES:
        wanted, got = outcome(subject.local, check), outcome(subject.client, check)
        if isinstance(wanted, str) or isinstance(got, str):
            can_be_cut = not any(server.traits.forbidden_cuts for server, _ in subject.swarm.route)
            refused = check is exactness.inner_gradients and not can_be_cut and "can't be cut there" in str(got)
            problems = [] if wanted == got or refused else [f"local: {wanted!s:.200} remote: {got!s:.300}"]
        else:
            rounding = 1e-5 if check is exactness.inner_gradients else 0.0
            problems = differences(wanted, got, max(subject.tolerance, rounding))
        if problems:
            failures[check.__name__] = problems[:3]
    assert not failures


OTHER_ATTENTIONS = {"deepseek_v4": "not [batch, heads, seq, past + seq]"}
"""Architectures that attend to more than positions → the error of a client."""


def attentions_of_forward(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, attention_mask=MASK, use_cache=False, output_attentions=True).attentions


def attentions_of_generate(model: PreTrainedModel) -> Any:
    more = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    output = model.generate(PROMPT, max_new_tokens=3, min_new_tokens=3, num_beams=2, **more)
    return output.attentions, output.hidden_states


def attentions(subject: Subject) -> None:
    local, client = subject.fresh_local(), subject.fresh_swarm().client
    for model in (local, client):
        model.set_attn_implementation("eager")
        # As from_pretrained() sets it for models that can't switch.
        model.config._attn_implementation_internal = "eager"
    for check in (attentions_of_forward, attentions_of_generate):
        wanted, got = outcome(local, check), outcome(client, check)
        if subject.name in OTHER_ATTENTIONS:
            assert OTHER_ATTENTIONS[subject.name] in got
        elif isinstance(wanted, str) or isinstance(got, str):
            assert wanted == got
        else:
            assert differences(wanted, got, subject.tolerance) == [], check.__name__


def hooks_on_blocks(subject: Subject) -> None:
    local, client = subject.local, subject.client
    before = forward(client)
    failures = {
        f"{check.__name__} {seed}": problems
        for seed, check in enumerate(HOOKED, start=len(subject.name))
        if (problems := compared(local, client, check, seed, relative=subject.tolerance))
    }
    assert not failures
    assert torch.equal(forward(client), before), "they are removed"


WITH_PREFIXES = {*ALL["text"]} - NO_HEADS - OTHER_SHAPES - OTHER_CACHES


def prefix_tuning(subject: Subject) -> None:
    """peft's prefixes, where they work locally; where they don't, they are refused."""
    local = subject.fresh_local().requires_grad_(False)
    client = subject.fresh_swarm().client
    if subject.name in OTHER_SHAPES | OTHER_CACHES:
        reason = "use peft's LoRA" if subject.name in OTHER_CACHES else "must be keys and values"
        check_refused_prefix(local, client, reason)
    elif subject.name not in NO_HEADS:
        check_prefix(local, client, prefix_projection=part_of(subject.name, 2) == 1)


# ---------------------------------------------------------------------- vision


PICTURES_ONLY = frozenset(("blip-2", "instructblip", "instructblipvideo"))
"""They take no text without a picture."""
NO_GENERATE = frozenset(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"))
"""Their generate() doesn't take these inputs, locally either."""
NO_BEAMS = frozenset(("llama4",))
"""Their pictures aren't repeated for each beam, locally either."""


def same_logits(subject: Subject, **given: Any) -> None:
    with torch.no_grad():
        wanted, got = (model(**given).logits for model in (subject.local, subject.client))
    assert differences(wanted, got, subject.tolerance) == []


def text_with_a_picture(subject: Subject) -> None:
    given = picture_of(subject.local)
    same_logits(subject, **given)
    same_logits(subject, **given, use_cache=False)


def text_without_a_picture(subject: Subject) -> None:
    if subject.name not in PICTURES_ONLY:
        given = picture_of(subject.local)
        same_logits(subject, **{key: given[key][:, :5] for key in ("input_ids", "attention_mask")}, use_cache=False)


def generation_about_a_picture(subject: Subject) -> None:
    if subject.name in NO_GENERATE:
        return
    ways: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "temperature": 2.0}]
    if subject.name not in NO_BEAMS:
        ways += [
            {"num_beams": 3, "do_sample": False},
            {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        ]
    check_generation(subject.local, subject.client, picture_of(subject.local), ways, max_new_tokens=12)


def gradients_of_the_vision_tower(subject: Subject) -> None:
    """Through hidden states, and through what is added between blocks."""
    local, client, given = subject.local, subject.client, picture_of(subject.local)
    labels = given["input_ids"].masked_fill(given["input_ids"] == IMAGE_TOKEN, -100)
    grads: list[dict[str, Tensor]] = []
    for model in (local, client):
        model.zero_grad()
        model(**given, labels=labels, use_cache=False).loss.backward()
        grads.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    wanted, got = grads
    here = {name for name, _ in client.named_parameters()}
    # Servers of Gemma 4 make something of the embeddings for each block: these weights are theirs.
    assert {one for one in wanted.keys() & here if ".per_layer_" not in one} == got.keys()
    largest = max(float(grad.norm()) for grad in wanted.values())
    for name, grad in got.items():  # the order of adding up differs
        assert float((grad - wanted[name]).norm()) <= 1e-4 * float(wanted[name].norm()) + 1e-7 * largest, name


# ---------------------------------------------------------------------- models with an encoder


def given_to(subject: Subject) -> dict[str, Tensor]:
    return sound(subject.local) if subject.kind == "speech" else inputs_of(subject.local)


def logits_of_two_stacks(subject: Subject) -> None:
    """At most rounding: the local model has a cache."""
    for more in ({}, {"use_cache": False}):
        with torch.no_grad():
            wanted, got = (
                model(**given_to(subject), decoder_input_ids=TARGET, **more).logits
                for model in (subject.local, subject.client)
            )
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def generation_of_two_stacks(subject: Subject) -> None:
    check_generation(subject.local, subject.client, given_to(subject))


def gradients_of_two_stacks(subject: Subject) -> None:
    check_gradients(subject.local, subject.client, given_to(subject), labels=TARGET)
    if subject.kind == "speech":
        first = next(name for name, _ in subject.local.named_parameters() if "conv" in name)
        assert dict(subject.client.named_parameters())[first].grad is not None


def hooks_on_two_stacks(subject: Subject) -> None:
    given = inputs_of(subject.local)

    def translate(model: PreTrainedModel) -> Any:
        return model.generate(**given, max_new_tokens=5, do_sample=False)

    def logits(model: PreTrainedModel) -> Any:
        with torch.no_grad():
            return model(**given, decoder_input_ids=given["input_ids"][:, :4], use_cache=False).logits

    for stack in (0, 1):
        for seed, check in enumerate((translate, logits), start=len(subject.name)):
            assert not compared(subject.local, subject.client, check, seed, stack, relative=1e-4), (stack, check)

"""Comparisons of a local model with the client of a swarm in this process: each does the same with both.

A `Check` returns the difference in words, or None. "Equal" means bit by bit, unless a check says otherwise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.numerics.in_process_swarm import InProcessSession, InProcessSwarm
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm.models.architecture import cache_argument, decoder_stack
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.shell.client_shell import embed, head

Check = Callable[[PreTrainedModel, InProcessSwarm], str | None]
PROMPT = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(PROMPT)
MASK[0, :3] = 0
NEW_TOKENS = 8


def _difference(local: Tensor, remote: Tensor, *, relative: float = 0.0) -> str | None:
    if local.shape != remote.shape:
        return f"shape {tuple(remote.shape)} instead of {tuple(local.shape)}"
    if not local.isfinite().all():
        return "the local model itself gives no finite numbers"
    error = float((local - remote).abs().max()) if local.numel() else 0.0
    return None if error <= relative * float(local.abs().max()) else f"differs by {error:.1e}"


def _compare(
    local: PreTrainedModel,
    swarm: InProcessSwarm,
    run: Callable[[PreTrainedModel], Tensor],
    *,
    relative: float = 0.0,
    may_refuse: bool = False,
) -> str | None:
    """Equal results, or (where the local model may) equal refusals."""
    wanted, got = outcome(local, run), outcome(swarm.client, run)
    if isinstance(wanted, str) or isinstance(got, str):
        return None if may_refuse and wanted == got else f"local: {wanted!s:.300} remote: {got!s:.300}"
    return _difference(wanted, got, relative=max(relative, swarm.tolerance))


def full_forward(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    with torch.no_grad():
        return _compare(local, swarm, lambda model: model(input_ids=PROMPT, use_cache=False).logits)


def prefill_and_decode(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    name = cache_argument(decoder_stack(local))

    def run(model: PreTrainedModel) -> Tensor:
        output = model(input_ids=PROMPT[:, :5], use_cache=True)
        logits = [output.logits]
        for column in range(5, PROMPT.shape[1]):
            cache = {name: getattr(output, name)}
            output = model(input_ids=PROMPT[:, column : column + 1], use_cache=True, **cache)
            logits.append(output.logits)
        return torch.cat(logits, dim=1)

    with torch.no_grad():
        return _compare(local, swarm, run)


def beam_reorder(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    name = cache_argument(decoder_stack(local))

    def run(model: PreTrainedModel) -> Tensor:
        output = model(input_ids=PROMPT[:, :7], use_cache=True)
        getattr(output, name).reorder_cache(torch.tensor([1, 1]))
        return model(input_ids=PROMPT[:, 7:8], use_cache=True, **{name: getattr(output, name)}).logits

    with torch.no_grad():
        return _compare(local, swarm, run)


def left_padded_generate(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    """The logits of every step, too."""

    def run(model: PreTrainedModel) -> Tensor:
        output = model.generate(
            PROMPT.where(MASK > 0, 0),
            attention_mask=MASK,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return torch.stack(output.logits)

    return _compare(local, swarm, run)


def input_gradients(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    """Gradients with respect to the embeddings' output; sums over several uses of it may round differently."""
    weights = torch.randn(2, PROMPT.shape[1], 1, generator=torch.Generator().manual_seed(4))

    def run(model: PreTrainedModel) -> Tensor:
        embeddings = model.get_input_embeddings()
        seen: list[Tensor] = []

        def keep(_module: Any, _args: Any, output: Tensor) -> Tensor:
            leaf = output.detach().requires_grad_() if not seen else output
            seen.append(leaf)
            return seen[0].clone()  # some models scale their embeddings in place

        hook = embeddings.register_forward_hook(keep)
        try:
            (model(input_ids=PROMPT, use_cache=False).logits * weights).sum().backward()
        finally:
            hook.remove()
        assert seen[0].grad is not None
        return seen[0].grad

    difference = _compare(local, swarm, run, relative=1e-6)
    trained = [name for server, _ in swarm.route for name, p in server.slots.named_parameters() if p.requires_grad]
    return difference or (f"blocks want gradients: {trained[:3]}" if trained else None)


def _generates(
    local: PreTrainedModel, swarm: InProcessSwarm, rows: int = 2, may_refuse: bool = False, **options: Any
) -> str | None:
    def run(model: PreTrainedModel) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model.generate(PROMPT[:rows], max_new_tokens=NEW_TOKENS, **options)

    return _compare(local, swarm, run, may_refuse=may_refuse)


def sampling(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    return _generates(local, swarm, do_sample=True, top_p=0.9, temperature=1.3, num_return_sequences=2)


def beam_search(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    return _generates(local, swarm, num_beams=3, do_sample=False, num_return_sequences=2)


def prompt_lookup(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    return _generates(local, swarm, rows=1, may_refuse=True, prompt_lookup_num_tokens=3, do_sample=False)


def chunked_prefill(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    """transformers' own chunks; models that can't do that are no better locally, but must not differ either."""
    return _generates(local, swarm, may_refuse=True, prefill_chunk_size=4, do_sample=False)


def session_steps(local: PreTrainedModel, swarm: InProcessSwarm) -> str | None:
    """embed → blocks in pieces → head, with a rollback on the way: close to the local logits (shapes differ)."""
    if not swarm.traits.chunked_prefill:
        return None
    traits = swarm.traits
    with torch.no_grad():
        wanted = local(input_ids=PROMPT, use_cache=False).logits
        extras = {"input_ids": PROMPT, "inputs_embeds": swarm.client.get_input_embeddings()(PROMPT)}
        inputs = BlockInputs(
            hidden_states=embed(swarm.client, PROMPT),
            batch_size=2,
            seq_len=PROMPT.shape[1],
            **{name: extras[name] for name in traits.extra_inputs},
        )
        session = InProcessSession(swarm.route)
        session.record_past()
        pieces = [(0, 4), (4, 7), (4, 7), (7, 8), (8, 9)] if traits.rollback else [(0, 4), (4, 7), (7, 8), (8, 9)]
        outputs: dict[int, Tensor] = {}
        for start, end in pieces:
            session.position = start
            hidden = inputs.columns(start, end, start, traits)
            for hop_idx, (server, span) in enumerate(swarm.route):
                output = server.forward(hidden, span, session.caches[hop_idx])
                hidden = hidden.with_hidden(output)
            outputs[start] = hidden.hidden_states
        joined = torch.cat([outputs[start] for start in sorted(outputs)], dim=traits.batch_axis + 1)
        return _difference(wanted, head(swarm.client, joined), relative=1e-4)


CHECKS: tuple[Check, ...] = (
    full_forward,
    prefill_and_decode,
    beam_reorder,
    left_padded_generate,
    input_gradients,
    sampling,
    beam_search,
    prompt_lookup,
    chunked_prefill,
    session_steps,
)


def assisted(local: PreTrainedModel, swarm: InProcessSwarm, assistant: PreTrainedModel) -> str | None:
    """A second model proposes tokens; most are rejected, so the remote cache rolls back all the time."""
    return _generates(local, swarm, rows=1, may_refuse=True, assistant_model=assistant, do_sample=False)


def flat(found: Any) -> list[Tensor | None]:
    """All tensors of nested tuples, in order, and each None."""
    if found is None or isinstance(found, Tensor):
        return [found]
    return [tensor for part in found for tensor in flat(part)]


def differences(wanted: Any, got: Any, relative: float) -> list[str]:
    """The differences between two nested tuples of tensors."""
    if shape_of(wanted) != shape_of(got):
        return [f"{shape_of(got)!s:.400} instead of {shape_of(wanted)!s:.400}"]
    problems = []
    for index, (one, other) in enumerate(zip(flat(wanted), flat(got), strict=True)):
        if one is None or other is None:
            continue
        error = float((one.float() - other.float()).abs().max())
        if not error <= relative * float(one.abs().max()):
            problems.append(f"entry {index} differs by {error:.1e}")
    return problems


def shape_of(found: Any) -> Any:
    if isinstance(found, Tensor):
        return tuple(found.shape)
    return None if found is None else [shape_of(part) for part in found]


def outcome(model: PreTrainedModel, check: Callable[[PreTrainedModel], Any]) -> Any:
    """The result of `check`, or the error that it raises."""
    try:
        return check(model)
    except (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"num_beams": 3, "do_sample": False},
    {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
    {"do_sample": True, "temperature": 2.0},
    {"do_sample": False, "use_cache": False},
)
"""Options of generate()."""


def check_generation(
    local: PreTrainedModel,
    client: PreTrainedModel,
    given: dict[str, Any],
    ways: Sequence[dict[str, Any]] = WAYS,
    max_new_tokens: int = 8,
) -> None:
    seen: set[int] = set()
    for way in ways:
        results = []
        for model in (local, client):
            torch.manual_seed(2)
            results.append(model.generate(**given, max_new_tokens=max_new_tokens, **way))
        assert torch.equal(*results), way
        seen |= {*results[0][:, -8:].flatten().tolist()}
    assert len(seen) > 6  # or equal tokens would show little


def check_gradients(local: PreTrainedModel, client: PreTrainedModel, given: dict[str, Any], **labels: Any) -> None:
    grads = []
    for model in (local, client):
        model.zero_grad()
        model(**given, **labels, use_cache=False).loss.backward()
        grads.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    want, got = grads
    for name, grad in got.items():  # the order of adding up differs
        assert float((grad - want[name]).norm()) <= 1e-4 * float(want[name].norm()), name
    assert any("embed" in name or "shared" in name for name in got)


def inner_of_forward(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, attention_mask=MASK, use_cache=False, output_hidden_states=True).hidden_states


def inner_of_cached_forward(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, use_cache=True, output_hidden_states=True).hidden_states


def inner_of_choice(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(input_ids=PROMPT, use_cache=False, output_hidden_states=[1, -2]).hidden_states


def inner_of_generate(model: PreTrainedModel, **options: Any) -> Any:
    output = model.generate(
        PROMPT.where(MASK > 0, 0),
        attention_mask=MASK,
        max_new_tokens=4,
        min_new_tokens=4,
        return_dict_in_generate=True,
        output_hidden_states=True,
        **{"do_sample": False, **options},
    )
    return output.hidden_states


def inner_of_beams(model: PreTrainedModel) -> Any:
    return inner_of_generate(model, num_beams=3)


def inner_gradients(model: PreTrainedModel) -> Any:
    """Gradients of a loss on all hidden states, with respect to the embeddings' output."""
    seen: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_() if not seen else output)
        return seen[0].clone()  # some models scale their embeddings in place

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        hidden = model(input_ids=PROMPT, use_cache=False, output_hidden_states=True).hidden_states
        torch.stack([(one * one).mean() * (1 + index) for index, one in enumerate(hidden)]).sum().backward()
    finally:
        hook.remove()
    return seen[0].grad


INNER_STATES: tuple[Callable[[PreTrainedModel], Any], ...] = (
    inner_of_forward,
    inner_of_cached_forward,
    inner_of_choice,
    inner_of_generate,
    inner_of_beams,
    inner_gradients,
)
"""Hidden states of all blocks, as users ask for them."""

"""Every fault, in every kind of work, at every place of the route: the same tokens and gradients as ever.

A server with a fault in it (`faulty_server.py`) joins an honest swarm and boasts of its speed, so the client uses it;
at a chosen moment it begins to misbehave.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import at_token
from faulty_server import Fault, program
from swarm_models import OPTIONS, TIMEOUT_S, connected, prompt
from torch import Tensor
from transformers import PreTrainedModel

from swarmllm import LocalSwarm

SPANS = {"first": (0, 2), "middle": (2, 4), "last": (4, 6)}
PROMPT = prompt(length=24)
FAULTS = [
    Fault.CRASH,
    Fault.FREEZE,
    Fault.NO_DAEMON,
    Fault.CORRUPT,
    Fault.STALL,
    Fault.DEAD_THREAD,
    Fault.OUT_OF_MEMORY,
]


@pytest.fixture(scope="module")
def swarm(llama: Path) -> Iterator[LocalSwarm]:
    """The honest servers, one for each place."""
    options = OPTIONS | {"program": program(Fault.MODEST)}
    with LocalSwarm(llama, spans=list(SPANS.values()), update_period=5, **options) as swarm:
        yield swarm


def generated(model: Any, break_it: Callable[[], object], **options: Any) -> Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    output: Tensor = model.generate(PROMPT, logits_processor=at_token(4, break_it), **options)
    return output


def prefill(model: Any, break_it: Callable[[], object]) -> Tensor:
    break_it()
    with torch.no_grad():
        logits: Tensor = model(PROMPT, use_cache=True).logits
    return logits


def decode(model: Any, break_it: Callable[[], object]) -> Tensor:
    return generated(model, break_it)


def beam(model: Any, break_it: Callable[[], object]) -> Tensor:
    return generated(model, break_it, num_beams=3)


def training(model: Any, before_forward: Callable[[], object], before_backward: Callable[[], object]) -> Tensor:
    ids = prompt(batch=4, length=8)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    before_forward()
    loss = model(inputs_embeds=embeds, labels=ids).loss
    before_backward()
    loss.backward()
    assert embeds.grad is not None
    return embeds.grad


def training_forward(model: Any, break_it: Callable[[], object]) -> Tensor:
    return training(model, break_it, lambda: None)


def training_backward(model: Any, break_it: Callable[[], object]) -> Tensor:
    return training(model, lambda: None, break_it)


WORK = [prefill, decode, beam, training_forward, training_backward]
QUICK = {
    (decode, Fault.CRASH, "middle"),
    (beam, Fault.CRASH, "last"),
    (training_backward, Fault.CORRUPT, "first"),
    (decode, Fault.DEAD_THREAD, "first"),
    (decode, Fault.OUT_OF_MEMORY, "middle"),
    (training_forward, Fault.OUT_OF_MEMORY, "last"),
    (training_forward, Fault.CRASH, "first"),
    (decode, Fault.FREEZE, "middle"),
}
"""Run on every commit; the others are slow."""


def cases() -> Iterator[Any]:
    for work in WORK:
        for fault in FAULTS:
            for place in SPANS:
                marks = [] if (work, fault, place) in QUICK else [pytest.mark.slow]
                yield pytest.param(work, fault, place, marks=marks, id=f"{work.__name__}-{fault.value}-{place}")


@pytest.mark.parametrize(("work", "fault", "place"), list(cases()))
@pytest.mark.rotates(3)
def test_nothing_is_lost(
    work: Callable[[Any, Callable[[], object]], Tensor],
    fault: Fault,
    place: str,
    swarm: LocalSwarm,
    local: PreTrainedModel,
    llama: Path,
    tmp_path: Path,
) -> None:
    expected = work(local, lambda: None)
    trigger = tmp_path / "trigger"
    # Direct streams outlive the daemon until the server ends, and a short call needs no longer.
    without_direct = {"direct_port": 0} if fault is Fault.NO_DAEMON else {}
    faulty = swarm.add_server(SPANS[place], program=program(fault, trigger), **without_direct)
    try:
        # Long enough for the frozen one, whom only missing pings betray; the stalled one answers pings for ever.
        step_timeout_s = 3.0 if fault is Fault.STALL else 60.0
        # Not the ghosts of the cases before, who boasted as well.
        usable = {"allowed_servers": tuple(server.peer_id for server in swarm.servers if server.alive)}
        # Guesses may be all right, and leave nothing to compute after the fault: on a busy machine links look slow.
        options: dict[str, Any] = {"step_timeout_s": step_timeout_s, "speculation": "off", **usable}
        with connected(llama, swarm.initial_peers, **options) as model:
            assert faulty.peer_id in {hop.server.peer_id for hop in model.swarm.route()}, "the test would prove nothing"
            result = work(model, trigger.touch)
            avoided = model.swarm.health.avoided(now=0.0)
            blamed = model.swarm.health.blamed(now=0.0)
            failures = model.swarm.counts
        if fault is Fault.DEAD_THREAD:  # at once, and not only for this client
            assert faulty.process.wait(TIMEOUT_S) == 1
            assert "ended by a mistake of swarmllm (RuntimeError: a mistake of ours)" in faulty.log_path.read_text()
    finally:
        faulty.kill()
    assert trigger.exists()
    assert sum(failures.values()), "nothing failed, so nothing was survived"
    assert avoided <= {faulty.peer_id}, "an honest peer is avoided"
    if fault is Fault.CORRUPT:  # whoever is given NaN says whose it is
        assert failures["corrupt_activations"]
        assert avoided == {faulty.peer_id}
    if fault is Fault.OUT_OF_MEMORY:
        assert failures["out_of_memory"]
        assert not blamed
    if result.is_floating_point():
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    else:
        assert result.tolist() == expected.tolist()

"""A swarm with its sessions in pages generates what the local model does: on CPUs and, in tests/gpu, on GPUs."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from swarm_models import assert_same_tokens, generate_seeded, generate_together, prompt
from transformers import PreTrainedModel

from swarmllm.demo.local_swarm import LocalServer

LENGTHS = (5, 130, 17, 300, 64, 9, 63, 200)
NEW_TOKENS = 12


def check_clients_at_once(model: Any, local: PreTrainedModel) -> None:
    """Texts of unequal lengths, within pages and across their borders."""
    texts = [prompt(1, length, seed=length) for length in LENGTHS]
    expected = [generate_seeded(local, ids, max_new_tokens=NEW_TOKENS)[0].tolist() for ids in texts]
    assert generate_together(model, texts, NEW_TOKENS) == expected


def check_beams(model: Any, local: PreTrainedModel) -> None:
    """Rows that share pages and part."""
    assert_same_tokens(model, local, prompt(2, 70), max_new_tokens=NEW_TOKENS, num_beams=3)


def check_guessed_tokens(model: Any, local: PreTrainedModel) -> None:
    """Several tokens a step, and those that were wrong are rolled back."""
    assert_same_tokens(model, local, prompt(1, 12).repeat(1, 5), max_new_tokens=20, prompt_lookup_num_tokens=3)


def check_rollback(model: Any, local: PreTrainedModel) -> None:
    """Back over the border of a page, and on with another text."""
    first, second = prompt(1, 70, seed=1), prompt(1, 30, seed=2)
    joined = torch.cat([first[:, :60], second], dim=1)
    with torch.no_grad(), model.inference_session(max_length=128) as session:
        embed = model.get_input_embeddings()
        session.step(embed(first))
        for token in range(3):
            session.step(embed(second[:, token : token + 1]))
        session.position = 60
        parts = [session.step(embed(part)) for part in (second[:, :1], second[:, 1:])]
        found = model.head(torch.cat(parts, dim=1))
        expected = local(joined).logits[:, 60:]
    assert torch.equal(found.argmax(-1), expected.argmax(-1).to(found.device))


def check_shared_prompts(model: Any, local: PreTrainedModel) -> None:
    """A beginning that the server has, and one that parts from it within a page."""
    ids = prompt(1, 260, seed=3)
    other = torch.cat([ids[:, :150], prompt(1, 60, seed=4)], dim=1)
    for text in (ids, ids, other, ids):
        assert_same_tokens(model, local, text, max_new_tokens=NEW_TOKENS)


CHECKS: Sequence[Callable[[Any, PreTrainedModel], None]] = (
    check_clients_at_once,
    check_beams,
    check_guessed_tokens,
    check_rollback,
    check_shared_prompts,
)


def assert_on_pages(server: LocalServer) -> str:
    """The server says that its sessions are in pages and its decode steps recorded, and no step failed; its log."""
    log = server.log_path.read_text()
    assert re.search("keys and values of all sessions are in [0-9]+ pages", log), log
    assert "recorded steps of 1, 2, 4, 8, 16, 32, 64 positions" in log, log
    assert not re.search("sessions failed|each session has keys and values of its own", log), log
    return log

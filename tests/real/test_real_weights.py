"""Two published models through uneven servers: what transformers computes from the same files.

Random weights hide much: their logits are far apart or all alike, attention looks nowhere, and no text makes sense.
"""

import pydoc_data.topics
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from swarm_models import OPTIONS, assert_same_tokens, generate_seeded, names
from tests.real.conftest import TAKES_TURNS, Served
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessor
from web_gateway import running_gateway

from swarmllm import LocalSwarm
from swarmllm.data_structures import Span
from swarmllm.models.boundary.block_inputs import BlockInputs
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.span.loading import load_block_span

CAPITAL = "The capital of France is"
QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two is larger?",
    "Name a river there.",
    "Say it in one word.",
    "Why do people visit it?",
    "What do they eat there?",
    "Thank you. Say goodbye.",
)
WINDOW = 512
"""Of Gemma's sliding attention."""


def manual(served: Served, length: int, start: int = 0) -> Tensor:
    """That many tokens of Python's manual."""
    text = pydoc_data.topics.topics["lambda"] + pydoc_data.topics.topics["typesseq"] + pydoc_data.topics.topics["class"]
    ids: Tensor = served.ids(text)[:, start : start + length]
    assert ids.shape[1] == length
    return ids


@torch.no_grad()
def assert_same_logits(served: Served, ids: Tensor) -> None:
    """At the last 40 positions: with 262,144 tokens, all of them would take a gigabyte."""
    found, wanted = (one(ids, logits_to_keep=40).logits for one in (served.model, served.local))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)


def test_logits(served: Served) -> None:
    assert_same_logits(served, manual(served, 60))


def test_text_makes_sense(served: Served) -> None:
    ids = served.ids(CAPITAL)
    output = assert_same_tokens(served.model, served.local, ids, max_new_tokens=16)
    expected = "largest city in France" if served.real.is_gemma else "Paris"  # Gemma is no model of instructions
    assert expected in served.tokenizer.decode(output[0, ids.shape[1] :])


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95},
        {"num_beams": 3, "num_return_sequences": 2},
    ],
    ids=["sampling", "beams"],
)
def test_other_ways_to_choose_tokens(served: Served, options: dict[str, Any]) -> None:
    assert_same_tokens(served.model, served.local, manual(served, 30), max_new_tokens=10, **options)


def test_a_head_of_8_bits(served: Served) -> None:
    """Probabilities differ by little, and the text makes sense."""
    ids = manual(served, 60)
    with served.connect(speculation="off", head="int8") as model, torch.no_grad():
        found, wanted = (one(ids, logits_to_keep=40).logits.log_softmax(-1) for one in (model, served.local))
        text = model.generate(served.ids(CAPITAL), max_new_tokens=8, do_sample=False)
    divergence = (wanted.exp() * (wanted - found)).sum(-1).mean()
    assert 0 < divergence < 2e-3
    assert ("France" if served.real.is_gemma else "Paris") in served.tokenizer.decode(text[0])


@TAKES_TURNS
def test_texts_longer_than_the_window(gemma: Served) -> None:
    """Most of Gemma's blocks see the last 512 positions only."""
    ids = manual(gemma, WINDOW + 60)
    assert gemma.local.config.sliding_window == WINDOW
    assert_same_logits(gemma, ids)
    assert_same_tokens(gemma.model, gemma.local, ids, max_new_tokens=4)


@pytest.mark.slow
def test_1500_tokens_of_context(served: Served) -> None:
    ids = manual(served, 1500)
    assert_same_logits(served, ids)
    assert_same_tokens(served.model, served.local, ids, max_new_tokens=20)


@pytest.mark.parametrize("turns", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_chat_of_several_turns(smollm2: Served, turns: int) -> None:
    """Each turn goes on in the same session; the local model reads everything anew."""
    messages: list[dict[str, str]] = []
    with smollm2.model.inference_session(max_length=1024):
        for question in QUESTIONS[:turns]:
            messages.append({"role": "user", "content": question})
            ids = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            ids = ids if isinstance(ids, Tensor) else ids["input_ids"]
            output = assert_same_tokens(smollm2.model, smollm2.local, ids, max_new_tokens=12)
            answer = smollm2.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
    assert "Paris" in messages[1]["content"]


class Strike(LogitsProcessor):
    """Does something before a certain token is chosen."""

    def __init__(self, after: int, do: Any) -> None:
        self._left, self._do = after, do

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            self._do()
        return scores


def test_a_server_dies_in_the_middle_of_a_sentence(smollm2: Served) -> None:
    """Another server of its blocks reads the text so far, and goes on with the same tokens."""
    ids = smollm2.ids(CAPITAL)
    expected = generate_seeded(smollm2.local, ids, max_new_tokens=16)
    killed = []
    with smollm2.connect(speculation="off") as model, model.inference_session(max_length=64) as session:

        def kill() -> None:
            (server,) = (one for one in smollm2.swarm.servers if one.peer_id == names(session.route)[-1])
            server.kill()
            killed.append(server.peer_id)

        found = generate_seeded(model, ids, logits_processor=[Strike(6, kill)], max_new_tokens=16)
        assert killed
        assert killed[0] not in names(session.route)
    assert found.tolist() == expected.tolist()


@pytest.mark.slow
def test_a_server_dies_in_bfloat16(smollm2: Served) -> None:
    """Real texts show it if a single value is rounded otherwise: some next tokens are nearly as likely as others."""
    asked = [{"role": "user", "content": "Write a long story about a fox and a river."}]
    ids = smollm2.ids(smollm2.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))
    with (
        LocalSwarm(smollm2.path, spans=[(0, 30), (0, 30)], **OPTIONS | {"dtype": "bfloat16"}) as swarm,
        smollm2.connect(swarm, dtype="bfloat16", speculation="off", min_gain_to_move=1) as model,
    ):
        undisturbed = generate_seeded(model, ids, max_new_tokens=220)
        with model.inference_session(max_length=300) as session:

            def kill() -> None:
                next(one for one in swarm.servers if one.peer_id == names(session.route)[0]).kill()

            found = generate_seeded(model, ids, logits_processor=[Strike(45, kill)], max_new_tokens=220)
            assert session.num_repairs == 1
    assert found.shape[1] == ids.shape[1] + 220
    assert found.tolist() == undisturbed.tolist()


def test_a_prompt_that_is_sent_twice(smollm2: Served) -> None:
    """The second session's pages are those of the first one."""
    ids = manual(smollm2, 200, start=100)
    expected = generate_seeded(smollm2.local, ids, max_new_tokens=4)
    before = smollm2.reused_tokens()
    for _ in range(2):
        with smollm2.model.inference_session(max_length=256):
            assert generate_seeded(smollm2.model, ids, max_new_tokens=4).tolist() == expected.tolist()
    assert smollm2.reused_tokens() >= before + 128


def test_guesses_from_the_text(smollm2: Served) -> None:
    ids = smollm2.ids("one two three four five six seven eight one two three four five six seven eight one two three")
    with smollm2.connect(speculation="ngram") as model:
        assert_same_tokens(model, smollm2.local, ids, max_new_tokens=16)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lora_learns_what_it_learns_locally(smollm2: Served) -> None:
    """The losses of six steps on one sentence, which falls."""
    ids = smollm2.ids("Question: who keeps the lighthouse of Arvenport?\nAnswer: Mirela Quist keeps it.")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    losses = []
    for base in (smollm2.local, smollm2.model):
        torch.manual_seed(5)
        adapted = peft.get_peft_model(base, config)
        optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], lr=5e-3)
        own = []
        for _ in range(6):
            loss = adapted(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        adapted.unload()
        losses.append(own)
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[1][-1] < 0.7 * losses[1][0]


def test_chat_of_the_gateway(smollm2: Served) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    ids = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = ids if isinstance(ids, Tensor) else ids["input_ids"]
    expected = generate_seeded(smollm2.local, ids, max_new_tokens=12)[0, ids.shape[1] :]
    with running_gateway(smollm2.swarm.initial_peers, model=str(smollm2.path)) as gateway:
        answer = gateway.openai.chat.completions.create(
            model=smollm2.path.name, messages=messages, max_tokens=12, temperature=0
        )
    assert answer.choices[0].message.content == smollm2.tokenizer.decode(expected, skip_special_tokens=True)


def test_blocks_in_bfloat16_have_the_bits_of_transformers(served: Served, tmp_path: Path) -> None:
    """For prompts of any length and for sessions, on processors with instructions for bfloat16 and without."""
    served.local.save_pretrained(tmp_path)
    local: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    blocks = load_block_span(open_checkpoint(str(tmp_path)), Span(0, 4), dtype=torch.bfloat16, progress=False)
    for length in (1, 2, 17, 100):
        ids = manual(served, length)
        with torch.inference_mode():
            expected = local(ids, output_hidden_states=True, use_cache=False).hidden_states
            given = BlockInputs(hidden_states=expected[0], batch_size=1, seq_len=length)
            assert torch.equal(blocks.forward(given), expected[4]), length
    kept, cache = DynamicCache(config=local.config), blocks.new_cache()
    for length in (100, 1, 1, 7, 1, 1):  # a session
        ids = manual(served, length)
        with torch.inference_mode():
            expected = local(ids, output_hidden_states=True, past_key_values=kept).hidden_states
            given = BlockInputs(hidden_states=expected[0], batch_size=1, seq_len=length)
            assert torch.equal(blocks.forward(given, cache=cache), expected[4]), cache.length

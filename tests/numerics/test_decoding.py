"""`generate()` with ways to choose tokens that transformers lacks: by field, in batches, with beams, beside guesses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_speculation import Obsessed, Speculating, client_ahead, save_sharp_llama
from tests.planners import FixedPlanner
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)
from transformers.generation.streamers import BaseStreamer

from swarmllm.client.distributed_model import DistributedModelForCausalLM
from swarmllm.decoding.methods import FrustratinglySimple, Mirostat, TopNSigma
from swarmllm.errors import ConfigurationError
from swarmllm.speculation.drafters import NGramDrafter
from swarmllm.speculation.planner import Plan

VOCABULARY = 12
IDS = torch.tensor([[1, 2, 3, 4, 1, 2]])
WAYS: dict[str, dict[str, Any]] = {
    "fsd": {"fsd_alpha": 0.6},
    "randomized fsd": {"fsd_alpha": 0.6, "fsd_random_steps": 12, "do_sample": True},
    "mirostat 1": {"mirostat_mode": 1, "mirostat_tau": 1.5, "do_sample": True},
    "mirostat 2": {"mirostat_mode": 2, "mirostat_tau": 1.5, "do_sample": True},
    "tail-free": {"tfs_z": 0.6, "do_sample": True},
    "top-n-sigma": {"top_n_sigma": 1.0, "do_sample": True},
    "dry": {"dry_multiplier": 2.0, "dry_sequence_breakers": [], "dry_allowed_length": 1},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1, "do_sample": True},
}


class Plain(DistributedModelForCausalLM, LlamaForCausalLM):
    """The local model with the client's mixin."""

    swarm: Any = None


class Guessing(Speculating, DistributedModelForCausalLM):
    """The client's mixins, guesses included."""

    swarm: Any = None
    planner = FixedPlanner()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_llama(tmp_path_factory.mktemp("decoding"), 3)


@pytest.fixture(scope="module")
def plain(directory: Path) -> Any:
    return Plain.from_pretrained(directory).requires_grad_(False).eval()


@pytest.fixture(scope="module")
def guessing(directory: Path) -> Any:
    return client_ahead(directory, Guessing)


def generate(model: Any, ids: Tensor = IDS, seed: int = 11, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.generate(ids, **{"max_new_tokens": 32, "do_sample": False, "top_k": 0, **options})


@pytest.mark.rotates(3)
@pytest.mark.parametrize("way", WAYS)
def test_guesses_change_nothing(plain: Any, guessing: Any, way: str) -> None:
    expected = generate(plain, **WAYS[way])
    for drafter, plan in ((NGramDrafter, Plan(2, 3)), (NGramDrafter, Plan(16, 2)), (Obsessed, Plan(1, 4))):
        type(guessing).drafter = drafter
        guessing.planner.fixed = plan
        assert torch.equal(generate(guessing, **WAYS[way]), expected)
        assert guessing.session.num_abandoned or guessing.session.most_under_way
    options = {key: value for key, value in WAYS[way].items() if key == "do_sample"}
    assert not torch.equal(generate(plain, **options), expected)  # so it does something


def test_frustratingly_simple_is_what_its_formula_says(plain: Any, directory: Path) -> None:
    """Replayed on the local model, one token after the other."""
    model, ids = AutoModelForCausalLM.from_pretrained(directory).requires_grad_(False), IDS
    for _ in range(32):
        p = model(ids).logits[0, -1].softmax(-1)
        text, best = ids[0].tolist(), (-math.inf, -1)
        for token in p.topk(4).indices.tolist():
            unigram = text.count(token) / len(text)
            after = [text[i + 1] for i in range(len(text) - 1) if text[i] == text[-1]]
            foretold = 0.7 * after.count(token) / len(after) + 0.3 * unigram if after else unigram
            best = max(best, (0.5 * float(p[token]) - 0.5 * foretold, token))
        ids = torch.cat([ids, torch.tensor([[best[1]]])], dim=1)
    assert torch.equal(generate(plain, fsd_alpha=0.5, fsd_k=4, fsd_n=2, fsd_beta=0.7), ids)


def test_a_padded_batch_is_what_its_rows_are_alone(plain: Any) -> None:
    texts = [[5, 6, 7, 5, 6], [1, 2, 3, 4, 1, 2, 3, 0, 4]]
    ids = torch.tensor([[0] * (9 - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (9 - len(text)) + [1] * len(text) for text in texts])
    for way in ("fsd", "dry"):
        together = generate(plain, ids, attention_mask=mask, **WAYS[way])[:, 9:]
        for text, row in zip(texts, together, strict=True):
            alone = torch.tensor([text])
            options = {"attention_mask": torch.ones_like(alone), **WAYS[way]}
            assert torch.equal(generate(plain, alone, **options)[0, len(text) :], row)


@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_knows_only_the_text_beside_an_assistant_too(plain: Any, directory: Path, mode: int) -> None:
    """Each token was drawn from what a replay of the finished text would have left there."""
    assistant = AutoModelForCausalLM.from_pretrained(directory).requires_grad_(False)
    with torch.no_grad():
        assistant.lm_head.weight += 0.2 * torch.randn(assistant.lm_head.weight.shape, generator=torch.Generator())
    for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}, {}):
        text = generate(plain, do_sample=True, mirostat_mode=mode, mirostat_tau=1.0, max_new_tokens=48, **options)
        replay = Mirostat(mode, 1.0, 0.1, start=IDS.shape[1])
        logits = plain(text).logits
        for length in range(IDS.shape[1], text.shape[1]):
            left = replay(text[:, :length], logits[:, length - 1])
            assert left[0, text[0, length]].isfinite()


def test_one_random_state_for_a_batch_gives_the_same_text_again(plain: Any) -> None:
    ids = IDS.repeat(3, 1)
    for way in WAYS.values():
        first = generate(plain, ids, **way)
        assert torch.equal(generate(plain, ids, **way), first)
        rows = {tuple(row.tolist()) for row in first}
        assert len(rows) == (3 if way.get("do_sample") else 1)


def test_beams(plain: Any, directory: Path) -> None:
    """Where each beam is a text of its own; what steers one text is refused."""
    local = LlamaForCausalLM.from_pretrained(directory)
    beams = {"do_sample": True, "num_beams": 3, "num_return_sequences": 2}
    expected = generate(local, logits_processor=LogitsProcessorList([TopNSigma(0.9)]), **beams)
    assert torch.equal(generate(plain, top_n_sigma=0.9, **beams), expected)
    assert not torch.equal(generate(plain, **beams), expected)
    assert generate(plain, num_beams=3, **WAYS["dry"]).shape == (1, 38)
    for way in ("fsd", "mirostat 2"):
        with pytest.raises(ConfigurationError, match="can't be used with num_beams"):
            generate(plain, num_beams=2, **WAYS[way])


def test_they_are_fields_of_a_generation_config(plain: Any, tmp_path: Path) -> None:
    expected = generate(plain, **WAYS["fsd"])
    config = GenerationConfig(max_new_tokens=32, top_k=0, **WAYS["fsd"])
    assert torch.equal(plain.generate(IDS, generation_config=config), expected)
    GenerationConfig(max_new_tokens=32, **WAYS["fsd"]).save_pretrained(tmp_path)
    assert torch.equal(plain.generate(IDS, generation_config=GenerationConfig.from_pretrained(tmp_path)), expected)
    plain.generation_config.fsd_alpha = 0.6
    try:
        assert torch.equal(generate(plain), expected)
        assert torch.equal(generate(plain, fsd_alpha=0), generate(plain, fsd_alpha=0.0, fsd_k=3))
        assert not torch.equal(generate(plain, fsd_alpha=0), expected)
    finally:
        del plain.generation_config.fsd_alpha


def test_renormalized_scores_are_of_what_is_left(plain: Any) -> None:
    found = generate(
        plain,
        renormalize_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        max_new_tokens=4,
        **WAYS["top-n-sigma"],
    )
    for scores in found.scores:
        assert torch.allclose(scores.exp().sum(-1), torch.ones(1), atol=1e-5)
        assert scores.isinf().any()


class Letters:
    """A tokenizer of single letters."""

    def __len__(self) -> int:
        return VOCABULARY

    def batch_decode(self, ids: list[list[int]], **_: Any) -> list[str]:
        return ["abcd:fghijk\n"[token] for (token,) in ids]


def test_strings_that_end_a_repetition(plain: Any) -> None:
    options = {"dry_multiplier": 2.0, "dry_allowed_length": 1}
    with pytest.raises(ConfigurationError, match="give generate\\(\\) the tokenizer"):
        generate(plain, **options)
    broken = generate(plain, tokenizer=Letters(), **options)
    assert not torch.equal(broken, generate(plain, dry_sequence_breakers=[], **options))
    assert torch.equal(broken, generate(plain, tokenizer=Letters(), dry_sequence_breakers=["\n", ":"], **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mirostat_mode": 2}, "mirostat_mode has an effect only if tokens are sampled: give do_sample=True"),
        ({"fsd_alpha": 0.5, "fsd_random_steps": 3}, "fsd_random_steps has an effect only if tokens are sampled"),
        ({"do_sample": True, "mirostat_mode": 4}, "mirostat_mode must be at least 0 and at most 2, not 4"),
        ({"tfs": 0.5}, "tfs"),
    ],
)
def test_what_is_refused(plain: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(plain, **options)


def test_one_token_is_left_by_fsd_whatever_else_is_asked(plain: Any) -> None:
    found = generate(plain, do_sample=True, temperature=0.2, top_p=0.5, typical_p=0.3, **WAYS["fsd"])
    assert torch.equal(found, generate(plain, **WAYS["fsd"]))
    assert isinstance(plain._get_logits_processor(GenerationConfig(fsd_alpha=0.5), 6)[0], FrustratinglySimple)


# ---------------------------------------------------------------------- transformers' own ways, by our loop


class NeverNeeded:
    """A fallback for a swarm that doesn't fail; the text goes through our loop all the same."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    def finish_if_swarm_fails(self, in_swarm: Any, model: Any, method: str, ids: Any, criteria: Any, *_: Any) -> Any:
        self.methods.append(method)
        return in_swarm(criteria)


class Kept(BaseStreamer):
    """Keeps what a reader sees."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ids.append(-1)


_letters = Tokenizer(BPE({chr(ord("a") + token): token for token in range(VOCABULARY)}, []))
_letters.decoder = Fuse()
LETTERS = PreTrainedTokenizerFast(tokenizer_object=_letters)
MODES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "greedy": ("_sample", {}),
    "sampled": ("_sample", {"do_sample": True, "top_k": 5, "temperature": 1.5}),
    "with details": ("_sample", {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}),
    "beams": ("_beam_search", {"num_beams": 3, "num_return_sequences": 2}),
    "sampled beams": ("_beam_search", {"num_beams": 3, "do_sample": True}),
    "until a string": ("_sample", {"stop_strings": ["e", "g"], "tokenizer": LETTERS}),
    "until a string of a config": (
        "_sample",
        {"generation_config": GenerationConfig(stop_strings="e", max_length=18, do_sample=False), "tokenizer": LETTERS},
    ),
    "guesses by lookup": (None, {"prompt_lookup_num_tokens": 3}),
    "a loop of the caller's": (None, {"custom_generate": lambda model, input_ids, **_: input_ids + 0}),
}


@pytest.mark.parametrize("name", MODES)
def test_our_loop_writes_what_transformers_own_does(name: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method, options = MODES[name]
    length = {} if "generation_config" in options else {"max_new_tokens": 12}
    found: list[Any] = []
    loop = NeverNeeded()
    for fallback in (None, loop):
        monkeypatch.setattr(Plain, "local_fallback", fallback)
        streamer = None if "beams" in name else Kept()
        torch.manual_seed(3)
        output = plain.generate(IDS, **length, **options, streamer=streamer)
        details = {} if isinstance(output, Tensor) else {"scores": output.scores, "logits": output.logits}
        sequences = output if isinstance(output, Tensor) else output.sequences
        found.append(({"sequences": sequences, **details}, streamer and streamer.ids))
    assert loop.methods == ([] if method is None else [method])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
    assert found[0][1] == found[1][1]

"""The bytes of tokens, of each kind of tokenizer that the library `tokenizers` trains: together they are the text, and
each token says where in the text it begins."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from swarmllm.gateway.text import Spelling, TextRow

CORPUS = [
    "once upon a time there was a little fox",
    "the fox was happy, the bear wasn't",
    "Zoë — à propos 宇宙 🦊 🦊",
] * 3
SPECIAL = ["<s>", "</s>", "<unk>"]
TEXTS = st.text(st.sampled_from("abefox tuZëé—宇宙🦊🐻\n<>|"), max_size=24)


def byte_level() -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return found


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it."""
    return _with_byte_tokens(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


def byte_fallback_without_prefix() -> Tokenizer:
    """As Gemma has it."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _with_byte_tokens(steps, normalizers.Replace(" ", "▁"))


def _with_byte_tokens(steps: list[Any], normalizer: Any) -> Tokenizer:
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizer
    english = [text for text in CORPUS if text.isascii()]
    trained.train_from_iterator(english, trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIAL))
    given = json.loads(trained.to_str())["model"]
    names = [f"<0x{byte:02X}>" for byte in range(256)] + sorted(given["vocab"], key=given["vocab"].get)
    vocabulary = {name: place for place, name in enumerate(dict.fromkeys([*SPECIAL, *names]))}
    merges = [tuple(pair) for pair in given["merges"]]
    found = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer, found.decoder = normalizer, decoders.Sequence(steps)
    found.add_special_tokens(SPECIAL)
    return found


def metaspace() -> Tokenizer:
    found = Tokenizer(models.BPE(unk_token="<unk>"))
    found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    found.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL))
    return found


def unigram() -> Tokenizer:
    found = Tokenizer(models.Unigram())
    found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    found.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    return found


def word_piece() -> Tokenizer:
    found = Tokenizer(models.WordPiece(unk_token="<unk>"))
    found.pre_tokenizer, found.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    found.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL))
    return found


def word_level() -> Tokenizer:
    found = Tokenizer(models.WordLevel(unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.train_from_iterator(CORPUS, trainers.WordLevelTrainer(vocab_size=60, special_tokens=SPECIAL))
    return found


def ends_of_words() -> Tokenizer:
    """As the first GPT had it."""
    found = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    found.pre_tokenizer, found.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>")
    found.train_from_iterator(CORPUS, trainer)
    return found


KINDS: list[Callable[[], Tokenizer]] = [
    *(byte_level, byte_fallback, byte_fallback_without_prefix, metaspace, unigram),
    *(word_piece, word_level, ends_of_words),
]
HAVE_BYTES = KINDS[:3]


@cache
def tokenizer_of(kind: Callable[[], Tokenizer]) -> Any:
    found = kind()
    found.add_tokens([AddedToken("<|note|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer_of(request.param)


def written(
    tokenizer: Any, ids: list[int], prompt: list[int], kept: frozenset[int]
) -> tuple[str, list[Any], list[int]]:
    """The text of an answer, the bytes of its tokens, and where each begins."""
    row, spelling = TextRow(tokenizer, prompt, kept), Spelling(tokenizer)
    text, spelled, offsets = "", [], []
    for token in ids:
        offsets.append(row.offset)
        spelled.append(spelling.of(row.before, [token], kept)[token])
        text += row.add(token)
    return text + row.end(), spelled, offsets


def check(text: str, spelled: list[Any], offsets: list[int]) -> None:
    assert b"".join(one or b"" for one in spelled) == text.encode()
    for place, offset in enumerate(offsets):
        before = b"".join(one or b"" for one in spelled[:place])
        whole = text[:offset].encode()
        assert before.startswith(whole)
        assert not before[len(whole) :].decode(errors="ignore"), "only a character that is not complete is behind it"


@given(text=TEXTS, prompt=TEXTS, keeps=st.booleans())
@settings(max_examples=40, deadline=None)
def test_together_they_are_the_text(tokenizer: Any, text: str, prompt: str, keeps: bool) -> None:
    note = tokenizer.convert_tokens_to_ids("<|note|>")
    kept = frozenset([note] if keeps else [])
    ids = [1, *tokenizer(text).input_ids, note, 2]
    found, spelled, offsets = written(tokenizer, ids, tokenizer(prompt).input_ids, kept)
    check(found, spelled, offsets)
    assert (spelled[0], spelled[-1]) == (None, None)
    assert (b"<|note|>" in (spelled[-2] or b"")) == keeps
    alone, spelled, offsets = written(tokenizer, ids, [], frozenset())
    check(alone, spelled, offsets)
    assert alone == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(ids=st.lists(st.integers(3, 89), max_size=20))
@settings(max_examples=40, deadline=None)
def test_of_any_tokens_that_make_a_text(tokenizer: Any, ids: list[int]) -> None:
    text, spelled, offsets = written(tokenizer, ids, [], frozenset())
    if "\N{REPLACEMENT CHARACTER}" not in text:
        check(text, spelled, offsets)


@pytest.mark.parametrize("kind", HAVE_BYTES, ids=lambda kind: kind.__name__)
def test_a_part_of_a_character_has_its_own_bytes(kind: Any) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer("🐻", add_special_tokens=False).input_ids
    spelled = [Spelling(tokenizer).of(ids[:place], [token])[token] for place, token in enumerate(ids)]
    assert b"".join(one or b"" for one in spelled).strip() == "🐻".encode()
    parts = [one for one in spelled if one and len(one) == 1 and one[0] > 127]
    assert len(parts) > 1
    for token, part in zip(ids, spelled, strict=True):  # behind whatever comes before
        assert Spelling(tokenizer).of([5], [token])[token] == part or not part.startswith(b"\xf0")


@given(data=st.binary(max_size=12))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_text(data: bytes) -> None:
    """The text of a tokenizer whose tokens are bytes: each invalid byte is a replacement character."""
    tokenizer = tokenizer_of(byte_level)
    ids = tokenizer.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in data])
    text, spelled, offsets = written(tokenizer, ids, [], frozenset())
    assert offsets == sorted(offsets)
    assert all(offset <= len(text) for offset in offsets)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert spelled == [bytes([byte]) for byte in data]

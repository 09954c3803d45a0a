"""Prompts for what stands between two texts, as models for code have learned it: with special tokens around both.

Made by `language_model`; asked by `request_bodies` for requests with a `suffix`.
"""

from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class MiddleForm:
    """How one model is asked. Its tokens, as ids."""

    before_prefix: int
    before_suffix: int
    before_middle: int | None
    """None: the suffix comes first, and the middle is what follows the prefix."""
    ends: frozenset[int]
    """Tokens that end the middle, besides the model's own end of text."""

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """The form for which a tokenizer has tokens, or None."""
        for names in _FORMS:
            found = [_token(tokenizer, name) for name in names]
            if None not in found:
                prefix, suffix, *middle = found
                ends = {_token(tokenizer, name) for name in _ENDS} | {*found}
                return cls(prefix, suffix, middle[0] if middle else None, frozenset(ends - {None}))
        return None

    def prompt(self, begin: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
        """Token ids; `begin` is what the tokenizer puts before any text."""
        if self.before_middle is None:
            return [*begin, self.before_suffix, *suffix, self.before_prefix, *prefix]
        return [*begin, self.before_prefix, *prefix, self.before_suffix, *suffix, self.before_middle]


_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 and 3 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4, CodeGeeX
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
)
"""The tokens before the prefix, the suffix and the middle, as these models' descriptions have them."""
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|file_sep|>", "<file_sep>", "<|file_separator|>", "▁<EOT>")


def _token(tokenizer: Any, name: str) -> Any:
    token = tokenizer.convert_tokens_to_ids(name)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == name else None

"""Tiny models that give embeddings, and the local reference: one text at a time, pooled by formulas of our own."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
)

from swarmllm import embedded_model_path

SIZE = 64
TEXTS = ["Tom saw a big dog.", "Lily", "One day, a bird and a fox sang under the old tree, and Tom Was Glad."]
COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "lasttoken", "mean_sqrt_len_tokens", "weightedmean_tokens")


@dataclass(frozen=True)
class Kind:
    """A checkpoint, and what is beside it."""

    config: Any
    pooling: tuple[str, ...] = ()
    """Empty: no file says anything of sentence-transformers."""
    normalize: bool = False
    more: tuple[tuple[str, Any], ...] = ()


KINDS = {
    "bert": Kind(BertConfig(**COMMON)),
    "roberta": Kind(RobertaConfig(**COMMON | {"max_position_embeddings": 65}), ("cls_token",), normalize=True),
    "modernbert": Kind(
        ModernBertConfig(**COMMON, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
        ("mean_tokens",),
        normalize=True,
        more=(("sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": True}),),
    ),
    "qwen3": Kind(
        Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2),
        ("lasttoken",),
        normalize=True,
        more=(
            (
                "config_sentence_transformers.json",
                {"prompts": {"passage": "Passage: "}, "default_prompt_name": "passage"},
            ),
        ),
    ),
}


def save(kind: Kind, directory: Path) -> Path:
    """The checkpoint with the embedded model's tokens, which an end follows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModel.from_config(kind.config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(directory)
    tokens = Tokenizer.from_file(f"{embedded_model_path()}/tokenizer.json")
    tokens.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokens, **names).save_pretrained(directory)
    for name, said in kind.more:
        (directory / name).write_text(json.dumps(said))
    if kind.pooling:
        describe(directory, {f"pooling_mode_{name}": name in kind.pooling for name in POOLINGS}, kind.normalize)
    return directory


def describe(directory: Path, pooling: dict[str, Any], normalize: bool) -> None:
    """sentence-transformers' files."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    described = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{module}"}
        for number, (module, path) in enumerate(zip(modules, paths, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(described))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


class Reference:
    """The local model, one text at a time: no padding, no batches, nothing of ours."""

    def __init__(self, directory: Path, kind: Kind) -> None:
        self.kind = kind
        self.model = AutoModel.from_pretrained(directory).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        more = dict(kind.more)
        self.lower = more.get("sentence_bert_config.json", {}).get("do_lower_case", False)
        self.prompt = "Passage: " if "config_sentence_transformers.json" in more else ""

    def ids(self, text: str) -> list[int]:
        text = self.prompt + text
        return list(self.tokenizer(text.lower() if self.lower else text).input_ids)

    @torch.no_grad()
    def embed(self, text: str | list[int]) -> Tensor:
        ids = self.ids(text) if isinstance(text, str) else text
        hidden = self.model(torch.tensor([ids])).last_hidden_state[0]
        found = pooled(hidden, self.kind.pooling[0] if self.kind.pooling else "mean_tokens")
        return found / found.norm() if self.kind.normalize else found


def pooled(hidden: Tensor, how: str) -> Tensor:
    """The formulas of sentence-transformers, for one text `[seq, hidden]`."""
    seq = len(hidden)
    weights = torch.arange(1, seq + 1)[:, None]
    return {
        "cls_token": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "max_tokens": lambda: hidden.max(0).values,
        "mean_tokens": lambda: hidden.sum(0) / seq,
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / seq**0.5,
        "weightedmean_tokens": lambda: (hidden * weights).sum(0) / weights.sum(),
    }[how]()

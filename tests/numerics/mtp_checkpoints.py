"""Tiny checkpoints with heads for multi-token prediction, in each layout that is published, and what they guess.

The reference computes everything anew for each guess, from transformers' modules and a norm written down here: no
cache, nothing of ours.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

NUM_BLOCKS = 4


@dataclass(frozen=True)
class Published:
    """How one family publishes its head."""

    model_type: str
    block: str
    parts: dict[str, str]
    """Norm of tokens, norm of hidden states, projection, final norm."""
    hidden_first: bool = False
    offset: float = 0.0
    """The number that its norms add to their weights."""
    repeats: tuple[str, ...] = ()
    """Names under which embeddings and head are there once more."""
    beside: bool = False
    called: str = ""
    """Its model type in config.json, if transformers has it under another name."""


def _parts(*names: str) -> dict[str, str]:
    return dict(zip(("token", "hidden", "projection", "final"), names, strict=True))


_APPENDED = f"model.layers.{NUM_BLOCKS}"
_DEEPSEEK = _parts(*(f"{_APPENDED}.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")))
_REPEATS = (f"{_APPENDED}.embed_tokens.weight", f"{_APPENDED}.shared_head.head.weight")
PUBLISHED = {
    "deepseek": Published("deepseek_v3", _APPENDED, _DEEPSEEK, repeats=_REPEATS),
    "glm": Published("glm4_moe", _APPENDED, _DEEPSEEK, repeats=_REPEATS),
    "qwen3-next": Published(
        "qwen3_next",
        "mtp.layers.0",
        _parts("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight"),
        offset=1.0,
    ),
    "mimo": Published(
        "qwen2",
        "model.mtp_layers.0",
        _parts(
            *(
                f"model.mtp_layers.0.{name}.weight"
                for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
            )
        ),
        hidden_first=True,
        called="mimo",
    ),
    "trained later": Published("llama", _APPENDED, _DEEPSEEK, beside=True),
}


@dataclass(frozen=True)
class WithHead:
    """A checkpoint on disk, the whole model in this process, and its head."""

    directory: Path
    model: PreTrainedModel
    block: Any
    tensors: dict[str, Tensor]
    published: Published

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        scale = hidden.pow(2).mean(-1, keepdim=True).add(self.model.config.rms_norm_eps).rsqrt()
        return hidden * scale * (self.tensors[name] + self.published.offset)

    @torch.no_grad()
    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The formula."""
        stack = self.model.get_decoder()
        hidden = stack(torch.tensor([tokens])).last_hidden_state[0, :-1]
        found: list[int] = []
        for _ in range(count):
            embeds = self.model.get_input_embeddings()(torch.tensor((tokens + found)[1:]))
            pair = [self._norm(embeds, "token"), self._norm(hidden, "hidden")]
            joined = torch.cat(pair[::-1] if self.published.hidden_first else pair, dim=-1)
            entering = (joined @ self.tensors["projection"].T)[None]
            seq = entering.shape[1]
            positions = torch.arange(seq)[None]
            mask = torch.full((seq, seq), torch.finfo(torch.float32).min).triu(1)[None, None]
            left = self.block(
                entering,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=stack.rotary_emb(entering, positions),
            )
            left = left[0] if isinstance(left, tuple) else left
            state = self._norm(left[0, -1], "final")
            found.append(int(self.model.get_output_embeddings()(state).argmax()))
            hidden = torch.cat([hidden, state[None]])
        return found


def save_with_head(directory: Path, kind: str, **settings: Any) -> WithHead:
    """Write the checkpoint; its head has random weights."""
    published = PUBLISHED[kind]
    config = tiny_config(published.model_type)
    for name, value in settings.items():
        setattr(config, name, value)
    values = config.to_dict()
    longer = type(config)(**values | _longer(values))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        whole = AutoModelForCausalLM.from_config(longer).eval().requires_grad_(False)
        for parameter in whole.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
        size = config.hidden_size
        tensors = {name: 0.5 + 0.5 * torch.rand(size) for name in ("token", "hidden", "final")}
        tensors["projection"] = torch.randn(size, 2 * size) / size**0.5
    whole.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    head = {name: stored.pop(name) for name in list(stored) if name.startswith(f"{_APPENDED}.")}
    head = {name.replace(_APPENDED, published.block): tensor for name, tensor in head.items()}
    head |= {published.parts[name]: tensor for name, tensor in tensors.items()}
    head |= {name: torch.zeros_like(stored["model.embed_tokens.weight"]) for name in published.repeats}
    head = {name: tensor.contiguous() for name, tensor in head.items()}
    if published.beside:
        save_file(head, directory / "mtp.safetensors")
    save_file(stored if published.beside else stored | head, directory / "model.safetensors", {"format": "pt"})
    said = {"architectures": longer.architectures, "model_type": published.called or published.model_type}
    (directory / "config.json").write_text(json.dumps(config.to_dict() | said))
    blocks = whole.get_decoder().layers
    block = blocks[NUM_BLOCKS]
    del blocks[NUM_BLOCKS]
    whole.config = whole.get_decoder().config = config
    return WithHead(directory, whole, block, tensors, published)


def _longer(values: dict[str, Any]) -> dict[str, Any]:
    types = values.get("layer_types")
    return {"num_hidden_layers": NUM_BLOCKS + 1} | ({"layer_types": [*types, "full_attention"]} if types else {})

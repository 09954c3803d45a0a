"""Changes that touch no module of the blocks, so that servers would compute as if they were not there.

`stack_forward` looks for them at each forward: in the config, in the arguments, in rotary embeddings, among hooks on
all modules, and in torch.func's transforms. Changes of blocks are refused by `hollow_modules`.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from swarmllm.errors import ConfigurationError
from swarmllm.models.shell.hollow_modules import ModulePlace, close_hooks, fix_children

_HERE = re.compile(
    r"_.*|output_.*|.*_token_id|.*logit.*|use_cache|(use_)?return_dict|vocab_size|tie_word_embeddings|layerdrop|dtype"
    r"|num_labels|id2label|label2id|problem_type|classifier_dropout|.*aux_loss_coef|summary_.*|mask_.*"
    r"|apply_spec_augment|embedding_multiplier|scale_embedding|architectures|transformers_version|pretraining_tp"
)
"""Config fields that only what is here reads: embeddings, heads, losses, and the code around them."""
_OF_MASKS = ("is_causal", "sliding_window", "attention_chunk_size", "layer_types", "partial_rotary_factor")
"""Config fields that transformers reads for masks and positions, even where a config lacks them."""
_GLOBAL_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))
_OF_PACKED_TEXTS = dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"), "give each text a row of its own")
_OF_BLOCKS = {
    **dict.fromkeys(("is_causal", "position_bias"), "use a mask of four axes"),
    "encoder_hidden_states": "put what the blocks shall see into the text",
}
"""Arguments that a model hands through to its blocks, and what to do instead."""
_ROUNDING, _TINY = 2.0**-7, 1e-6
"""A cast of the model to bfloat16 or half and back changes a rotary embedding by at most this, relative or absolute."""


class UnseenChanges:
    """Remembers how a stack was when it was opened."""

    def __init__(self, stack: nn.Module, *, takes_source: bool) -> None:
        """`takes_source`: whether encoder outputs are an argument that servers are sent."""
        self._config: Any = stack.config
        fields = dict.fromkeys(_OF_MASKS) | vars(self._config)
        self._was = {name: copy.deepcopy(value) for name, value in fields.items() if not _HERE.fullmatch(name)}
        layers = DynamicCache(config=self._config).layers
        # Attention keeps packed texts apart by positions alone, recurrent blocks only by these arguments.
        recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        self._arguments = _OF_BLOCKS | (_OF_PACKED_TEXTS if recurrent else {})
        if takes_source:
            del self._arguments["encoder_hidden_states"]
        self._rotary = _RotaryEmbeddings(stack)

    def refuse(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse what servers can't follow; `kwargs` are the arguments of the stack's forward.

        Raises:
            ConfigurationError: there is something.
        """
        fields = vars(self._config)
        for name, was in self._was.items():
            if (now := fields.get(name)) is not was and now != was:
                raise ConfigurationError(
                    f"config.{name} is {now!r} now, but the servers' blocks run with {was!r}, as the checkpoint has "
                    "it: set it back, or serve a checkpoint that was saved with it"
                )
        self._rotary.refuse()
        for name, instead in self._arguments.items():
            if kwargs.get(name) is not None:
                raise ConfigurationError(f"{name} can't be given to blocks on servers: leave it out, and {instead}")
        if any(getattr(nn.modules.module, table) for table in _GLOBAL_HOOKS):
            raise ConfigurationError(
                "hooks on all modules (register_module_forward_hook and the like) can't run in blocks on servers: "
                "remove them, and put hooks on whole blocks"
            )
        if torch._C._are_functorch_transforms_active():
            raise ConfigurationError(
                "torch.func's transforms (grad, vmap, jvp …) can't pass through blocks on servers: call backward() or "
                "torch.autograd.grad(), for gradients of each text with one text at a time"
            )


class _RotaryEmbeddings:
    """The stack's rotary embeddings. It computes them here for nothing: servers have their own."""

    def __init__(self, stack: nn.Module) -> None:
        parts = {name: part for name, part in stack.named_children() if "Rotary" in type(part).__name__}
        for name, part in parts.items():
            close_hooks(part, ModulePlace("the model", name))
        fix_children(stack, ModulePlace("the model"), parts.keys())
        grows = ("dynamic", "longrope")  # these change with the text, by themselves
        still = [one for one in parts.values() if not any(kind in str(getattr(one, "rope_type", "")) for kind in grows)]
        self._scales = [(one, name, value) for one in still for name, value in vars(one).items() if "scaling" in name]
        self._buffers = [(one, name, value.detach().clone()) for one in still for name, value in one.named_buffers()]
        self._seen: dict[int, tuple[Tensor, int]] = {}
        """By index of a buffer: it and its version, when it was last found to be right."""

    def refuse(self) -> None:
        changed = [name for one, name, was in self._scales if getattr(one, name) != was]
        for idx, (one, name, was) in enumerate(self._buffers):
            now = one.get_buffer(name)
            if now.is_meta or (idx in self._seen and self._seen[idx][0] is now and self._seen[idx][1] == now._version):
                continue
            if now.shape == was.shape and torch.allclose(now.double(), was.to(now.device).double(), _ROUNDING, _TINY):
                self._seen[idx] = now, now._version
            else:
                changed.append(name)
        if changed:
            raise ConfigurationError(
                f"{changed[0]} of the rotary embeddings was changed, but servers have embeddings of their own: set it "
                "back, or serve a checkpoint that was saved with other rope_parameters"
            )

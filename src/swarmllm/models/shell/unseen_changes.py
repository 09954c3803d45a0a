"""What somebody changes without touching a module of the blocks, so that servers would compute as if it weren't there.

`stack_forward` has it looked for at each forward: in the config, the arguments, rotary embeddings, hooks on all modules
that there are, and torch.func's transforms. What is done to modules of blocks, `hollow_modules` sees.
"""

import copy
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn

from swarmllm.errors import ConfigurationError
from swarmllm.models.shell.hollow_modules import ModulePlace, close_hooks, fix_children

_OF_MASKS = ("is_causal", "sliding_window", "attention_chunk_size", "layer_types", "num_hidden_layers")
"""Config fields that transformers reads for masks and for the loop over blocks, whatever the architecture."""
_HERE = re.compile(r"_.*|output_.*|.*_token_id|use_cache|use_return_dict|return_dict|vocab_size|layerdrop")
"""Fields that concern what is here alone, or that are looked at elsewhere."""
_READ = re.compile(r"\bconfig\.(\w+)|\bconfig, \"(\w+)\"")
_GLOBAL_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))
_NO_MODELS = ("torch.", "swarmllm.", "builtins", "transformers.modeling_", "transformers.generation.", "peft.")
"""Packages whose classes are no architecture's."""
_OF_BLOCKS = {
    **dict.fromkeys(("is_causal", "position_bias"), "use a mask of four axes"),
    **dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"), "give each text a row of its own"),
    "encoder_hidden_states": "put what the blocks shall see into the text",
}
"""Arguments that a model hands through to its blocks, and what to do instead."""
_RECURRENT = re.compile(r"seq_idx|cu_seq_?lens|causal_conv1d")
"""In the code of blocks that keep packed texts apart by such arguments; attention does it by positions alone."""


class UnseenChanges:
    """Knows how a stack was when it was opened."""

    def __init__(self, stack: nn.Module, blocks: Iterable[nn.Module], *, takes_source: bool) -> None:
        """`takes_source`: whether what an encoder has made is an argument that servers are sent."""
        self._config: Any = stack.config
        types = {type(part) for block in blocks for part in block.modules()}
        of_blocks = "\n".join(source for cls in types for source in _sources(cls))
        read = _READ.findall("\n".join([of_blocks, *_sources(type(stack), ("forward",))]))
        known = (name for name in {*_OF_MASKS, *(one or other for one, other in read)} if not _HERE.fullmatch(name))
        self._was = {name: copy.deepcopy(getattr(self._config, name, None)) for name in sorted(known)}
        harmless = {"encoder_hidden_states"} if takes_source else set()
        harmless |= set() if _RECURRENT.search(of_blocks) else {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"}
        self._arguments = [name for name in _OF_BLOCKS if name not in harmless]
        self._rotary = _Rotary(stack)

    def refuse(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse what servers can't follow; `kwargs` are the arguments of the stack's forward.

        Raises:
            ConfigurationError: there is something.
        """
        for name, was in self._was.items():
            if (now := getattr(self._config, name, None)) != was:
                raise ConfigurationError(
                    f"config.{name} is {now!r} now, but the servers' blocks run with {was!r}, as the checkpoint has "
                    "it: set it back, or serve a checkpoint that was saved with it"
                )
        self._rotary.refuse()
        for name in self._arguments:
            if kwargs.get(name) is not None:
                instead = _OF_BLOCKS[name]
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


class _Rotary:
    """The stack's rotary embeddings, which it computes here for nothing: servers have their own.

    So casts are harmless, whatever they round: `model.to(bfloat16)` and back.
    """

    def __init__(self, stack: nn.Module) -> None:
        parts = {name: part for name, part in stack.named_children() if "Rotary" in type(part).__name__}
        for name, part in parts.items():
            close_hooks(part, ModulePlace("the model", name))
        fix_children(stack, ModulePlace("the model"), parts.keys())
        grows = ("dynamic", "longrope")  # with the text, by themselves
        still = [
            part for part in parts.values() if not any(one in str(getattr(part, "rope_type", "")) for one in grows)
        ]
        self._scales = [
            (part, name, value) for part in still for name, value in vars(part).items() if "scaling" in name
        ]
        self._buffers = [_Buffer(part, name) for part in still for name, _ in part.named_buffers()]
        for part in still:
            part.__dict__["swarm_buffers"] = [one for one in self._buffers if one.part is part]
            cls: Any = type(part)
            part.__class__ = _castable(cls)

    def refuse(self) -> None:
        changed = [name for part, name, was in self._scales if getattr(part, name) != was]
        changed += [one.name for one in self._buffers if not one.is_same()]
        if changed:
            raise ConfigurationError(
                f"{changed[0]} of the rotary embeddings was changed, but servers have embeddings of their own: set it "
                "back, or serve a checkpoint that was saved with other rope_parameters"
            )


class _Buffer:
    """One of a module, and what it was when it was last known to be right."""

    def __init__(self, part: nn.Module, name: str) -> None:
        self.part, self.name = part, name
        self.keep()

    def keep(self) -> None:
        """It is right as it is."""
        self._seen = self.part.get_buffer(self.name)
        self._version, self._was = self._seen._version, self._seen.detach().clone()

    def is_same(self) -> bool:
        """Whether it is right still: nobody has changed it, except to another device or dtype."""
        now = self.part.get_buffer(self.name)
        if now.is_meta or (now is self._seen and now._version == self._version):
            return True
        was = self._was.to(now.device, now.dtype)
        same = now.shape == was.shape and torch.allclose(now.double(), was.double())
        if same:
            self.keep()
        return same


@cache
def _castable(cls: Any) -> Any:
    """The class of a rotary embedding, with buffers that stay right when all tensors of the model are converted."""

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        right = [one for one in self.__dict__["swarm_buffers"] if one.is_same()]
        found: nn.Module = cls._apply(self, *args, **kwargs)
        for one in right:
            one.keep()
        return found

    return type(cls.__name__, (cls,), {"_apply": _apply, "__module__": cls.__module__})


def _sources(cls: type, methods: Iterable[str] | None = None) -> Iterator[str]:
    """What an architecture's class does in these methods; None: in all but its constructor."""
    for one in cls.__mro__:
        if one.__module__.startswith(_NO_MODELS):
            continue
        for name, method in vars(one).items():
            if inspect.isfunction(method) and (name in methods if methods else name != "__init__"):
                with suppress(OSError):  # code that came without a file
                    yield inspect.getsource(method)

"""Vectors before the text that are trained in place of weights: prompts, or keys and values (prefix tuning).

`tuning_mode="ptune"` puts `pre_seq_len` trained embeddings before every text (prompt tuning; Lester et al. 2021,
arXiv:2104.08691). `"deep_ptune"` also adds trained vectors to the inputs of each block at these positions (P-Tuning v2;
Liu et al. 2021, arXiv:2110.07602). They travel to the servers like any other adapter (`adapters/block_adapter`,
`prompt`).

The stack prepends the prompts to its inputs and drops their outputs. So the code around it (heads, losses,
`generate()`) sees the text alone. The cache holds both: within the stack it tells its whole length, outside that of the
text.

Prefix tuning (Li & Liang 2021, arXiv:2101.00190): peft's `PrefixTuningConfig` trains keys and values for each block,
and gives them to the model as a filled cache, the same for each row. They are read from it here, and travel to the
servers once, like any other adapter (`prefix`). Servers begin the caches of sessions and sessionless requests with
them. The positions of a session are those of the text; its cache tells transformers both together.

Called by `stack_forward`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from swarmllm.data_structures import Patch
from swarmllm.errors import ConfigurationError
from swarmllm.models.adapters.block_adapter import MAX_PROMPTS
from swarmllm.models.adapters.peft_layers import check_rows
from swarmllm.models.architecture import decoder_stack, is_encoder, text_config
from swarmllm.models.boundary.phantom_cache import PhantomCache
from swarmllm.models.shell.hollow_modules import row_names
from swarmllm.models.shell.remote_cache import RemoteCache

MODES = ("ptune", "deep_ptune")

LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of caches that hold keys and values alone."""


class TunedPrompts(nn.Module):
    """The trained vectors; registered in the model as `tuned_prompts`."""

    def __init__(self, pre_seq_len: int, hidden_size: int, num_blocks: int, std: float) -> None:
        """`num_blocks` 0: shallow prompts only."""
        super().__init__()
        self.shallow = nn.Parameter(torch.randn(pre_seq_len, hidden_size) * std)
        """`[prompts, hidden]`, in float32 whatever the model computes in: small steps must not be lost."""
        self.deep: nn.Parameter | None = None
        if num_blocks:
            self.deep = nn.Parameter(torch.zeros(num_blocks, pre_seq_len, hidden_size))  # begins as shallow prompts
        self._shapes = {name: parameter.shape for name, parameter in self.named_parameters()}

    def __len__(self) -> int:
        return self._shapes["shallow"][0]

    def check(self) -> None:
        """Raise ConfigurationError if prompts of another shape have been put in their place."""
        for name, parameter in self.named_parameters():
            if parameter.shape != self._shapes.get(name):
                raise ConfigurationError(
                    f"tuned_prompts.{name} must be {list(self._shapes[name])} for this model and pre_seq_len, "
                    f"not {list(parameter.shape)}"
                )

    def patches(self) -> Iterator[tuple[Patch, list[Tensor]]]:
        """The deep prompts as changes of blocks."""
        if self.deep is not None:
            for block_idx, values in enumerate(self.deep):
                yield Patch(block=block_idx, path="", kind="prompt", shapes=(tuple(values.shape),)), [values]

    def prepend(self, stack: PreTrainedModel, kwargs: dict[str, Any], cache: RemoteCache | None) -> bool:
        """Put the prompts into the arguments of the stack's forward. Returns whether they are part of this call.

        They are, until the cache holds them.
        """
        self.check()
        num_prompts = len(self)
        begins = cache is None or cache.session.position == 0
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.ndim != 2:
                raise ConfigurationError("with tuning_mode, attention_mask must be [batch, seq] of 0 and 1")
            kwargs["attention_mask"] = torch.cat([mask.new_ones(len(mask), num_prompts), mask], dim=1)
        if positions is not None:
            shifted = positions + num_prompts
            before = torch.arange(num_prompts, device=positions.device).expand(*positions.shape[:-1], num_prompts)
            kwargs["position_ids"] = torch.cat([before.to(shifted), shifted], dim=-1) if begins else shifted
        if not begins:
            return False
        ids, embeds = kwargs.pop("input_ids", None), kwargs.get("inputs_embeds")
        if embeds is None:
            if ids is None:
                raise ConfigurationError("give the model either input_ids or inputs_embeds")
            embeds = stack.get_input_embeddings()(ids)
        prompts = self.shallow.to(embeds).expand(len(embeds), -1, -1)
        kwargs["inputs_embeds"] = torch.cat([prompts, embeds], dim=1)
        if (types := kwargs.get("token_type_ids")) is not None:
            kwargs["token_type_ids"] = torch.cat([types.new_zeros(len(types), num_prompts), types], dim=1)
        return True

    def drop(self, outputs: Any) -> Any:
        """The stack's outputs without the prompts' positions."""
        if isinstance(outputs, tuple):
            first, *others = outputs
            return (first[:, len(self) :], *(self._dropped(part) if type(part) is tuple else part for part in others))
        outputs.last_hidden_state = outputs.last_hidden_state[:, len(self) :]
        if (hidden := getattr(outputs, "hidden_states", None)) is not None:
            outputs.hidden_states = self._dropped(hidden)
        return outputs

    def _dropped(self, hidden: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else one[:, len(self) :] for one in hidden)


def prompts_in_use(found: TunedPrompts | ModulesToSaveWrapper) -> TunedPrompts:
    """The prompts of the next forward: those of peft's active adapter, if it has its own (`modules_to_save`).

    Raises:
        ConfigurationError: peft wants an adapter for each row, and one of these has its own.
    """
    if isinstance(found, TunedPrompts):
        return found
    copies: Any = found.modules_to_save
    active, prompts = found.active_adapters, found.original_module
    if not found.disable_adapters and active and all(name in copies for name in active):
        names = row_names(found)  # of adapters without prompts of their own, like LoRA alone
        check_rows(copies, names, "tuned_prompts")
        prompts = copies[active[0]] if names is None else prompts
    assert isinstance(prompts, TunedPrompts)
    return prompts


def attach_prompts(
    model: PreTrainedModel, mode: str | None, pre_seq_len: int, num_blocks: int, new_head: set[str]
) -> None:
    """Give the model prompts to train, and freeze everything else but a head that is new.

    Raises:
        ConfigurationError: it can't have any, or the arguments make no sense.
    """
    if mode not in MODES:
        raise ConfigurationError(f"tuning_mode must be one of {', '.join(MODES)}, not {mode!r}")
    if type(pre_seq_len) is not int or not 1 <= pre_seq_len <= MAX_PROMPTS:
        raise ConfigurationError(
            f"tuning_mode needs pre_seq_len, 1 to {MAX_PROMPTS} trained positions, not {pre_seq_len!r}"
        )
    name = type(model).__name__
    if is_encoder(model.config):
        raise ConfigurationError(f"{name} is an encoder, whose heads look at the first position: use peft's prompts")
    if "input_ids" in model.swarm_traits.extra_inputs or model.swarm_traits.batch_axis:
        raise ConfigurationError(f"the blocks of {name} need token ids, which prompts don't have: use peft's LoRA")
    embeddings = decoder_stack(model).get_input_embeddings()
    hidden_size = int(text_config(model.config).hidden_size)
    if embeddings.weight.shape[1] != hidden_size:
        raise ConfigurationError(f"the embeddings of {name} are narrower than its blocks: use peft's prompts")
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name in new_head)
    std = float(embeddings.weight.detach().float().std())
    model.tuned_prompts = TunedPrompts(pre_seq_len, hidden_size, num_blocks if mode == "deep_ptune" else 0, std)


@contextmanager
def whole_length(cache: RemoteCache) -> Iterator[None]:
    """Within, the cache counts the prompts as well."""
    hidden, cache.num_hidden = cache.num_hidden, 0
    try:
        yield
    finally:
        cache.num_hidden = hidden


class TunedPrefixCache(PhantomCache):
    """The past of a forward without a session: only a length."""

    def __init__(self, config: PreTrainedConfig, num_prefix: int) -> None:
        super().__init__(config)
        self.num_prefix = num_prefix

    @property
    def length(self) -> int:
        return self.num_prefix

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


class TunedPrefix:
    """The keys and values `[heads, prefix, head]` by block, in the trainer's graph."""

    def __init__(self, pairs: dict[int, tuple[Tensor, Tensor]], num_prefix: int) -> None:
        self._pairs = pairs
        self._num_prefix = num_prefix

    def __len__(self) -> int:
        return self._num_prefix

    @classmethod
    def read(cls, cache: Any, model: PreTrainedModel, batch_size: int) -> "TunedPrefix":
        """Read a prefix for the blocks of `model` from `cache`, which is given for `batch_size` rows.

        Raises:
            ConfigurationError: it is no prefix, or the model can't have one.
        """
        name = type(model).__name__
        config = text_config(model.config)
        if isinstance(cache, EncoderDecoderCache):
            raise ConfigurationError(
                "past_key_values of models with an encoder can only be what an earlier call has returned: use peft's "
                "prompt tuning in place of prefix tuning"
            )
        layers = cache.layers if isinstance(cache, DynamicCache) else []
        if not any(layer.is_initialized for layer in layers):
            raise ConfigurationError(
                f"the keys and values live on the servers, so a {type(cache).__name__} can't be used as "
                "past_key_values; leave it out, or continue an inference_session()"
            )
        if is_encoder(config):
            raise ConfigurationError(f"{name} is an encoder, which keeps no keys and values: use peft's prompt tuning")
        if model.tuned_prompts is not None:
            raise ConfigurationError("tuning_mode and peft's prefix tuning don't go together")
        num_blocks = int(config.num_hidden_layers)
        num_owners = num_blocks - (getattr(config, "num_kv_shared_layers", 0) or 0)  # the others take theirs
        if any(type(layer) not in LAYERS for layer in DynamicCache(config=config).layers[:num_owners]):
            raise ConfigurationError(f"some blocks of {name} keep other things than keys and values: use peft's LoRA")
        if len(layers) < num_owners or not all(layer.is_initialized for layer in layers[:num_owners]):
            raise ConfigurationError(f"a prefix must have keys and values for each of the {num_blocks} blocks")
        num_prefix = max(layer.get_seq_length() for layer in layers[:num_owners])
        if not 1 <= num_prefix <= MAX_PROMPTS:
            raise ConfigurationError(f"a prefix may have 1 to {MAX_PROMPTS} positions, not {num_prefix}")
        pairs = [_pair(layer, batch_size, num_prefix) for layer in layers[:num_owners]]
        return cls(dict(enumerate(pairs)), num_prefix)

    def patches(self) -> Iterator[tuple[Patch, list[Tensor]]]:
        """The prefix as changes of blocks."""
        for block_idx, pair in self._pairs.items():
            shapes = tuple(tuple(tensor.shape) for tensor in pair)
            yield Patch(block=block_idx, path="", kind="prefix", shapes=shapes), list(pair)


def _pair(layer: Any, batch_size: int, num_prefix: int) -> tuple[Tensor, Tensor]:
    """The keys and values `[heads, prefix, head]` of one block."""
    pair: list[Tensor] = []
    for tensor in (layer.keys, layer.values):
        # Positions that a sliding window has dropped: none behind the prefix will see them.
        dropped = num_prefix - tensor.shape[-2] if isinstance(layer, DynamicSlidingWindowLayer) else 0
        if tensor.shape[0] != batch_size or layer.get_seq_length() != num_prefix:
            raise ConfigurationError(
                f"a prefix must be [batch, heads, positions, head size], of {batch_size} rows and {num_prefix} "
                f"positions in each block, not {list(tensor.shape)}"
            )
        if not torch.equal(tensor, tensor[:1].expand_as(tensor)) and bool(tensor.isfinite().all()):
            raise ConfigurationError("a prefix must be the same for all rows of a batch")
        pair.append(functional.pad(tensor[0], (0, 0, dropped, 0)) if dropped else tensor[0])
    return pair[0], pair[1]


def text_mask(mask: Tensor, num_prefix: int) -> Tensor:
    """The mask without the prefix's columns, which servers add: `[batch, prefix + seq]` → `[batch, seq]` of 0 and 1.

    Raises:
        ConfigurationError: it isn't that.
    """
    if mask.ndim != 2 or not bool(mask[:, :num_prefix].all()):
        raise ConfigurationError(
            "behind a prefix, attention_mask must be [batch, prefix + seq], and see all of the prefix"
        )
    return (mask[:, num_prefix:] != 0).to(torch.int64)  # peft makes a mask of floats

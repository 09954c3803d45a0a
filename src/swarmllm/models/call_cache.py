"""Which cache a forward of the client shell runs with: a remote one, none, or one that begins with a prefix.

Called by `client_shell` for each forward of the stack, before its code sees the arguments.
"""

import weakref
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedConfig

from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import is_encoder
from swarmllm.models.remote_cache import RemoteCache
from swarmllm.models.tuned_prefix import PrefixCache, TunedPrefix

_prepared: ContextVar[tuple["weakref.ref[Any]", "weakref.ref[RemoteCache]"] | None] = ContextVar(
    "swarmllm_prepared", default=None
)
"""The model and the cache of this thread's last `generate()`."""


def note_prepared(shell: Any, cache: RemoteCache) -> None:
    """`generate()` begins with this cache, as long as it may need; peft puts a prefix in its place."""
    _prepared.set((weakref.ref(shell), weakref.ref(cache)))


def cache_of_call(
    shell: Any, config: PreTrainedConfig, kwargs: dict[str, Any], name: str
) -> tuple[RemoteCache | None, TunedPrefix | None]:
    """The remote cache of this forward: the given one, or a new one where transformers would make its own.

    And the prefix that it begins with, if the caller has given one as a cache. Puts under `name` of `kwargs` what the
    stack is to take for its cache.

    Raises:
        ConfigurationError: what was given as a cache can't be one.
    """
    cache = kwargs.get(name)
    if isinstance(cache, RemoteCache):
        return cache, None
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = embeds if ids is None else ids
    batch_size = 1 if given is None else given.shape[0]
    prefix = None if cache is None else TunedPrefix.read(cache, shell, batch_size)
    use_cache = kwargs.get("use_cache")
    if use_cache is None:  # what can't generate has no use for a session on the servers
        use_cache = shell.can_generate() and getattr(config, "use_cache", False)
    if not use_cache or torch.is_grad_enabled() or is_encoder(config):
        kwargs["use_cache"] = False  # with gradients, the blocks run on the whole batch at once
        kwargs[name] = None if prefix is None else PrefixCache(config, len(prefix))
        return None, prefix
    opened: RemoteCache | None = None
    if prefix is not None:
        opened = _behind(prefix, shell, batch_size)
    elif given is not None:
        opened = shell._remote_cache(batch_size, None)
    kwargs[name] = opened
    return opened, prefix


def _behind(prefix: TunedPrefix, shell: Any, batch_size: int) -> RemoteCache:
    """The cache of `generate()`, or a new one for this call alone."""
    if shell.active_cache_session() is not None:
        raise ConfigurationError("with peft's prefix tuning, call the model outside of inference sessions")
    model, cache = (reference() for reference in _prepared.get() or (lambda: None, lambda: None))
    if model is not shell or cache is None or cache.session.position or cache.batch_size != batch_size:
        cache = shell._remote_cache(batch_size, None)
    cache.num_prefix = len(prefix)
    found: RemoteCache = cache
    return found

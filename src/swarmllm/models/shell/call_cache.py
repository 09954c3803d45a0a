"""The cache of one forward of the client shell: a remote one, none, or one that begins with a prefix.

    a remote cache is given                         its session goes on
    use_cache is False, or the model is an encoder  none: the blocks run on the whole batch at once
    use_cache=True, without gradients               a session is opened, and its cache returned
    the same inside generate() of a user's session  the model has dropped the cache that it was given, as LongRoPE makes
                                                    it do once a text is long enough: the session begins anew
    anything else, where transformers makes one     as without a cache; the one that is returned opens a session only
                                                    when it is continued, which computes what it holds once more

Called by `stack_forward`, before the architecture's code sees the arguments.
"""

import weakref
from contextvars import ContextVar
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import is_encoder, sees
from swarmllm.models.shell.remote_cache import RemoteCache
from swarmllm.models.shell.tuned_prefix import TunedPrefix, TunedPrefixCache

NO_CACHE_IN_TRAINING = {"falcon_mamba", "mamba", "mamba2", "rwkv"}
"""Types of models that make a cache in train mode only if `use_cache` says so (their forward in transformers)."""
_prepared: ContextVar[tuple["weakref.ref[Any]", "weakref.ref[RemoteCache]"] | None] = ContextVar(
    "swarmllm_prepared", default=None
)
"""The model and the cache of this thread's last `generate()`."""
_spent: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Local caches that were taken for a prefix. Locally they would hold the text of that call by now."""


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
        ConfigurationError: what was given as a cache can't be one, or it isn't clear which one is meant.
    """
    cache = kwargs.get(name)
    if isinstance(cache, RemoteCache):
        if cache.config is not shell.config:
            raise ConfigurationError(f"the {name} are those of another model: continue them with that one")
        return cache, None
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = embeds if ids is None else ids
    batch_size = 1 if given is None else given.shape[0]
    if sees(shell.config) and isinstance(cache, DynamicCache) and not cache.get_seq_length():
        cache = None  # some models that see make one before they come to their text model
    prefix = None if cache is None else _prefix(cache, shell, batch_size)
    if not _wants_cache(shell, config, kwargs.get("use_cache")) or given is None:
        kwargs["use_cache"] = False
        kwargs[name] = None if prefix is None else TunedPrefixCache(config, len(prefix))
        return None, prefix
    session = shell.active_cache_session()
    is_replaced = session is not None and session.is_generating and session.position < given.shape[1]
    if session is not None and (prefix is not None or not (is_replaced and kwargs.get("use_cache"))):
        raise ConfigurationError(
            "inside an inference_session(), go on with generate() or session.step(); for a forward beside the session "
            "pass use_cache=False"
            if prefix is None
            else "with peft's prefix tuning, call the model outside of inference sessions"
        )
    length = given.shape[1] + sum(len(before) for before in (prefix, shell.tuned_prompts) if before is not None)
    asked = kwargs.get("use_cache") is not None or length > shell.swarm_runner.longest_row()
    at_once = asked and not torch.is_grad_enabled()
    opened = _of_generate(prefix, shell, batch_size) if at_once else None
    opened = opened or shell.new_remote_cache(batch_size, None)
    if session is not None:
        session.position = 0
    opened.deferred = not at_once
    opened.num_prefix = 0 if prefix is None else len(prefix)
    kwargs[name] = opened
    return opened, prefix


def _wants_cache(shell: Any, config: PreTrainedConfig, use_cache: bool | None) -> bool:
    """Whether transformers would run this forward with a cache."""
    if use_cache is None:
        is_off = shell.training and config.model_type in NO_CACHE_IN_TRAINING
        use_cache = getattr(config, "use_cache", False) and not is_off
    return bool(use_cache) and not is_encoder(config)


def _prefix(cache: Any, shell: Any, batch_size: int) -> TunedPrefix:
    prefix = TunedPrefix.read(cache, shell, batch_size)
    if cache in _spent:
        raise ConfigurationError(
            "this cache has been given to the model before, which doesn't write to it: continue with the "
            "past_key_values of that call's output"
        )
    return prefix


def note_spent(cache: Any) -> None:
    """A forward has taken this local cache for a prefix."""
    _spent.add(cache)


def _of_generate(prefix: TunedPrefix | None, shell: Any, batch_size: int) -> RemoteCache | None:
    """The cache of `generate()`, as long as it needs, in whose place peft has put a prefix."""
    model, cache = (reference() for reference in _prepared.get() or (lambda: None, lambda: None))
    if prefix is None or model is not shell or cache is None or cache.session.position:
        return None
    found: RemoteCache = cache
    return found if found.batch_size == batch_size else None

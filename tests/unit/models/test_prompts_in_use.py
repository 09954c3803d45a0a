"""The trained prompts of a forward, where adapters of peft have prompts of their own."""

from functools import partial
from typing import Any

import pytest
from peft.utils.other import ModulesToSaveWrapper

from swarmllm.errors import ConfigurationError
from swarmllm.models.shell.tuned_prompts import TunedPrompts, prompts_in_use


def tell(_: Any, args: Any, kwargs: Any, adapter_names: list[str]) -> Any:
    """The hook of peft's that tells a module the adapter of each row."""
    return args, kwargs | {"adapter_names": adapter_names}


def test_rows_of_adapters_without_prompts_of_their_own_have_the_models() -> None:
    prompts = TunedPrompts(2, 4, 0, 1.0)
    wrapped = ModulesToSaveWrapper(prompts, "one")
    assert prompts_in_use(wrapped) is wrapped.modules_to_save["one"]
    hook = wrapped.register_forward_pre_hook(partial(tell, adapter_names=["two", "__base__"]), with_kwargs=True)
    assert prompts_in_use(wrapped) is prompts
    hook.remove()
    wrapped.register_forward_pre_hook(partial(tell, adapter_names=["one", "two"]), with_kwargs=True)
    with pytest.raises(ConfigurationError, match="one has its own tuned_prompts"):
        prompts_in_use(wrapped)

"""A model of a swarm where Python or transformers expect a whole one: how it is shown, copied, and opened.

Mixed into the distributed model; `distributed_model` asks which options of `from_pretrained` can't work here.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Never, Self, SupportsIndex

import torch

from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import ClientConfig
from swarmllm.errors import ConfigurationError

_BY_SERVERS = "servers quantize the blocks (--quant_type)"
_BY_CHECKPOINT = "config and weights are those of the checkpoint, as the servers have them"
_SMALL = "only embeddings, final norm and head are here, and what blocks may take is said to servers (--max_memory)"
_REFUSED = {
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), _BY_SERVERS),
    **dict.fromkeys(("config", "state_dict"), _BY_CHECKPOINT),
    **dict.fromkeys(("max_memory", "offload_folder", "offload_state_dict", "offload_buffers"), _SMALL),
    **dict.fromkeys(
        ("tp_plan", "tp_size", "device_mesh", "distributed_config"), "the swarm is what blocks are spread over"
    ),
    "subfolder": "give the directory itself; of a hub repository the model at its root is used",
    "variant": "the checkpoint's usual files are used, as servers do",
    "output_loading_info": "only the model is returned",
}
"""Arguments of transformers that can't work without the blocks, and why."""
MISTYPED = 0.85
"""Names that are as like as this are meant to be the same. Assumed: transformers has none that is so like ours."""
_PLACED = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways of accelerate to spread a model; what is here is small, so all of them put it on the first device."""


def without_refused(hf_kwargs: dict[str, Any], own: Iterable[str] = ()) -> dict[str, Any]:
    """What `from_pretrained` can honour of it; None, False and "" ask for nothing. `own`: its own arguments.

    Raises:
        ConfigurationError: there is something that it can't.
    """
    for option in _REFUSED.keys() & hf_kwargs.keys():
        if hf_kwargs[option] not in (None, "", False):
            raise ConfigurationError(f"{option} can't be given here: {_REFUSED[option]}")
    for option in hf_kwargs.keys() & vars(ClientConfig()).keys():
        raise ConfigurationError(f"give {option} as client_config=ClientConfig({option}=…)")
    for option in hf_kwargs:  # transformers would say so as well, but only when the swarm was found
        if near := difflib.get_close_matches(option, own, n=1, cutoff=MISTYPED):
            raise ConfigurationError(f"there is no argument {option}: did you mean {near[0]}?")
    return {name: value for name, value in hf_kwargs.items() if name not in _REFUSED}


def device_of(device_map: Any) -> torch.device | None:
    """The device for what is here; None: wherever it is loaded.

    Raises:
        ConfigurationError: it names several, or one that this machine lacks.
    """
    if isinstance(device_map, Mapping):
        places = set(device_map.values())
        device_map = places.pop() if len(places) == 1 else ""
    if device_map is None:
        return None
    try:
        if device_map in _PLACED:
            device = torch.accelerator.current_accelerator() or torch.device("cpu")
        else:
            device = torch.device(device_map)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"device_map must be auto or one device of this machine, for embeddings, norm and head: {reason}"
        ) from None
    return device


class PythonSurface:
    """Mixed into the distributed model."""

    swarm: SwarmView

    def extra_repr(self) -> str:
        """The first line of what `print(model)` shows."""
        return f"(swarm): {self.swarm!r}" if "swarm" in self.__dict__ else ""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Never:
        raise ConfigurationError(
            "a model of a swarm can't be pickled or copied deeply, because its blocks are on servers: keep what is "
            "here with save_pretrained() or as its state_dict(), and open another by from_pretrained()"
        )

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

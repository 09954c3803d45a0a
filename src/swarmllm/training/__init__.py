"""One adapter, trained by several homes together. Their data stays at home.

    from swarmllm.training import Together
    with Together(optimizer, run="poems", every=50) as together:
        ...  # any training loop; optimizer.step() as always

Each home trains alone for some steps. Then it sends what has changed, in 8 bits, and all homes apply the same average
(DiLoCo, Douillard et al. 2023). `docs/training.md` says what the others learn about the data.

together          the face: an optimizer in a run
trainer_callback  the same as a callback of transformers' Trainer
trained           what a home trains, in words that homes compare
common_texts      texts on which all homes measure their values and the shared ones
homes             where the other members are: records in the DHT, addresses that are kept
members           the network's side: one peer, streams to the other members, the log of rounds
exchange          bytes that members ask each other for
run_log           the signed lines of all rounds, and their sums; also read by `swarmllm runs` and the gateway
rounds            when a round ends, and whose differences count; pure
differences       8-bit differences, their robust mean, the outer optimizer; pure, and bit for bit the same everywhere
privacy           noise, and the privacy budget that it leaves; pure
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmllm.training.common_texts import text_loss
    from swarmllm.training.together import RunSettings, Together
    from swarmllm.training.trainer_callback import TogetherCallback

__all__ = ["RunSettings", "Together", "TogetherCallback", "text_loss"]
_HOMES = {"TogetherCallback": "trainer_callback", "text_loss": "common_texts"}


def __getattr__(name: str) -> Any:  # torch and transformers take seconds, and `swarmllm runs` needs neither
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"swarmllm.training.{_HOMES.get(name, 'together')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""A batch through the swarm as one node of autograd's graph: what torch needs to call `batches/batch_runner` back."""

from typing import Any, Protocol

import torch
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError
from swarmllm.models.boundary.block_inputs import BESIDE, BlockInputs
from swarmllm.models.boundary.host_copies import in_host_memory


class Runner(Protocol):
    """The computation of a batch, and later of its gradients."""

    def forward(self, inputs: BlockInputs, span: Span, *, keep: bool) -> tuple[Tensor, Any]:
        """Outputs, and what `backward` needs if it will come (`keep`)."""
        ...

    def backward(self, stages: Any, grad_outputs: Tensor) -> dict[str, Tensor]:
        """Gradients by name; `adapter.INDEX` is that of the adapter's parameter of this index."""
        ...


class RemoteCall(torch.autograd.Function):
    """Outputs of a `Runner`, and gradients of its floating-point inputs and of the adapter's parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: Runner,
        inputs: BlockInputs,
        span: Span,
        grad_enabled: bool,
        hidden_states: Tensor,
        *more: Tensor | None,
    ) -> Tensor:
        keep = grad_enabled and any(ctx.needs_input_grad)
        # The backward is of this forward, whatever becomes of the tensors until then; adapters are copies already, and
        # so is what was on a device.
        here = inputs.on_host()
        here = here.copied() if keep and here is inputs else here.detached()
        outputs, stages = runner.forward(here, span, keep=keep)
        if inputs.inner is not None:
            inputs.inner.move(hidden_states.device)
        if keep:
            ctx.runner, ctx.stages = runner, stages
            ctx.devices = [None if t is None else t.device for t in (hidden_states, *more[: len(BESIDE)])]
            ctx.like = [(t.shape, t.device, t.dtype) for t in more[len(BESIDE) :] if t is not None]
            ctx.may_overflow = _scales_losses()
        return outputs.to(hidden_states.device)

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "servers answer gradients, and no gradients of gradients: call backward() or grad() without "
                "create_graph=True"
            )
        if not ctx.may_overflow and not bool(grad_outputs.isfinite().all()):
            raise ConfigurationError(
                "the loss is NaN or infinite, so it has no gradient: call zero_grad(), and leave this batch out or "
                "lower the learning rate"
            )
        (grad_outputs,) = in_host_memory([grad_outputs.contiguous()])
        grads = ctx.runner.backward(ctx.stages, grad_outputs)
        _, _, _, _, hidden, *more = ctx.needs_input_grad
        beside, trained = more[: len(BESIDE)], more[len(BESIDE) :]
        of_adapter: list[Tensor | None] = []
        for index, (wanted, (shape, device, dtype)) in enumerate(zip(trained, ctx.like, strict=True)):
            grad = grads.get(f"adapter.{index}") if wanted else None  # None: of a block outside this span
            of_adapter.append(None if grad is None else grad.view(shape).to(device, dtype))
        names = zip(("hidden_states", *BESIDE), (hidden, *beside), ctx.devices, strict=True)
        of_inputs = (grads[name].to(device) if wanted else None for name, wanted, device in names)
        return (None, None, None, None, *of_inputs, *of_adapter)


def _scales_losses() -> bool:
    """Under float16 autocast a gradient scaler multiplies losses until they overflow, and skips those steps itself."""
    return any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        for device in ("cuda", "cpu")
    )

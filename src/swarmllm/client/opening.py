"""A checkpoint, loaded without its blocks into a swarm that is joined for it. Called by `distributed_model`."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from swarmllm.client.batches.batch_runner import BatchRunner
from swarmllm.client.encoder_decoder import encoder_blocks, tell_stacks
from swarmllm.client.local_blocks import LocalBlocks, wanted_spans
from swarmllm.client.local_fallback import open_fallback
from swarmllm.client.many_prompts import Submitted
from swarmllm.client.python_surface import device_of
from swarmllm.client.remote_blocks import RemoteBlocks
from swarmllm.client.saving import describe_origin
from swarmllm.client.speculative_generation import Speculator, require_no_drafts
from swarmllm.client.view.event_loop import EventLoop
from swarmllm.client.view.swarm_view import SwarmView
from swarmllm.config import ClientConfig, own_cache_dir
from swarmllm.data_structures import Span
from swarmllm.models.architecture import Task, stacks, task_class, text_config
from swarmllm.models.checkpoint.checkpoint import Checkpoint
from swarmllm.models.checkpoint.dtypes import resolve_dtype
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.models.checkpoint.skeleton import block_bytes
from swarmllm.models.shell.loading import load_client_shell
from swarmllm.models.span.probe_results import PROBES
from swarmllm.models.span.small_copy import traits_of


def open_in_swarm(
    checkpoint: Checkpoint, task: Task, mixin: type, config: ClientConfig, dtype: str | torch.dtype, **options: Any
) -> Any:
    """Join the swarm, and load the model as the architecture's class for that task with `mixin`."""
    model_class, dtype = task_class(checkpoint.config, task), resolve_dtype(checkpoint, dtype)
    require_no_drafts(config, task)
    device = device_of(options.pop("device_map", None))
    loop = EventLoop()
    with ExitStack() as undo:
        undo.callback(loop.close)
        spans = [stack.span for stack in stacks(checkpoint.config)]
        view, everything = _view_of(checkpoint, config, dtype, loop, spans), spans[-1]
        wanted = wanted_spans(config, checkpoint.num_blocks)
        loop.run(view.connect(), meanwhile=lambda: _find_traits(checkpoint, view))
        local = LocalBlocks.load(checkpoint, wanted, dtype, progress=options.get("progress", True))
        view.look_ups.spans = (*spans[:-1], *(span for span, here in local.parts(everything) if here is None))
        traits = loop.run(view.begin())
        blocks = RemoteBlocks(view, BatchRunner(view, traits), traits, everything, local)
        encoder = encoder_blocks(view, traits, spans)
        model: Any = load_client_shell(
            checkpoint,
            model_class=model_class,
            mixin=mixin,
            dtype=dtype,
            runner=blocks,
            traits=traits,
            encoder=None if encoder is None else (encoder, encoder.traits),
            here=local.modules(),
            **options,
        )
        if device is not None:
            model.to(device)
        if task == Task.CAUSAL_LM and model.tuned_prompts is None:  # guesses don't know of the prompts' positions
            model.speculator = Speculator(config, checkpoint, model)
        model.local_fallback = open_fallback(config, checkpoint, model)
        model.remote_blocks, model.remote_encoder_blocks, model.swarm = blocks, encoder, view
        view.head_weight = _head_weight(model)
        model.submitted, model.model_tags = Submitted(), describe_origin(checkpoint, task)
        undo.pop_all()
    model._finalizer = weakref.finalize(model, loop.close)
    return model


def _head_weight(model: Any) -> Callable[[], Tensor | None]:
    """The matrix of the model's head; it doesn't keep the model in memory."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return (lambda: None) if weight is None else weakref.ref(weight)


def _find_traits(checkpoint: Checkpoint, view: SwarmView) -> None:
    """Find out what the model's blocks need, so that no server has to be believed."""
    view.own_traits = traits_of(checkpoint, own_cache_dir() / PROBES)


def _view_of(
    checkpoint: Checkpoint, config: ClientConfig, dtype: torch.dtype, loop: EventLoop, spans: Sequence[Span]
) -> SwarmView:
    view = SwarmView(
        config,
        loop,
        name=checkpoint.public_name,
        fingerprint=fingerprint(checkpoint),
        num_blocks=checkpoint.num_blocks,
    )
    view.model_place = checkpoint.place
    tell_stacks(view, spans, config)
    view.hidden_size = getattr(text_config(checkpoint.config), "hidden_size", None)
    # Here and not when a route is explained: building a model sets torch's random state back to what it was
    # before, and another thread may be sampling by then.
    view.num_bytes = sum(block_bytes(checkpoint, dtype))
    return view

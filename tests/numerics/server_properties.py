"""Properties of the blocks of every architecture on a server: sessions together as alone, pages, cuts, and traits.

`test_architectures` runs them. Each takes a `Subject`.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.numerics import tiny_encoder_decoders, tiny_speech_models
from tests.numerics.architectures import Subject
from tests.numerics.sessions_together import (
    RELATIVE,
    PagedSessions,
    Sessions,
    SessionsWithAxes,
    SessionsWithSources,
    check_together_as_alone,
    packer_of,
    packs_counted,
    some_inputs,
)
from tests.numerics.tiny_models import NUM_BLOCKS
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from swarmllm.client.view.servers import check_claims, lacking_abilities
from swarmllm.data_structures import BlockTraits, ServedBlocks, Span
from swarmllm.errors import UnsupportedModelError
from swarmllm.models.architecture import stacks
from swarmllm.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from swarmllm.models.quantization import FULL_PRECISION, Quantization
from swarmllm.models.quantization.line import why_no_steps
from swarmllm.models.span import probes, small_copy
from swarmllm.models.span.block_span import BlockSpan
from swarmllm.models.span.decode_graphs import StaticInputs, trace
from swarmllm.models.span.loading import load_block_span
from swarmllm.models.span.packing import Packer, Packing, SessionCall
from swarmllm.models.span.packing_probe import right_ways
from swarmllm.models.span.paged_attention import PagedAttention
from swarmllm.models.span.small_copy import traits_of
from swarmllm.models.span.span_cache import SpanCache
from swarmllm.models.span.trials import kind_of
from swarmllm.server.device import throughput
from swarmllm.server.device.throughput import measure_packing, measure_throughput

# ---------------------------------------------------------------------- spans


def any_span(subject: Subject) -> None:
    """One span after the other gives the bits of all blocks at once."""
    blocks = subject.load()
    inputs = some_inputs(blocks, 2, 5, torch.Generator().manual_seed(0))
    allowed = [cut for cut in range(1, NUM_BLOCKS) if cut not in blocks.traits.forbidden_cuts]
    with torch.no_grad():
        whole = blocks.forward(inputs)
        for cuts in ([], *([cut] for cut in allowed), allowed):
            step = inputs
            for start, end in pairwise([0, *cuts, NUM_BLOCKS]):
                step = step.with_hidden(blocks.forward(step, Span(start, end)))
            assert torch.equal(step.hidden_states, whole), cuts


def one_block_of_each_kind(subject: Subject) -> None:
    """Probes of one block of each kind find what probes of every block find."""
    found: list[Any] = []
    for kinds in (kind_of, lambda _, block_idx: block_idx):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probes, "kind_of", kinds)
            try:
                found.append(subject.load().traits)
            except UnsupportedModelError as error:
                found.append(str(error))
    assert found[0] == found[1]


# ---------------------------------------------------------------------- one client after the other


class Client:
    """One text on a server that others use too."""

    def __init__(self, blocks: BlockSpan, number: int, lengths: Sequence[int]) -> None:
        self.blocks = blocks
        self.cache: SpanCache = blocks.new_cache()
        random = torch.Generator().manual_seed(number)
        self.inputs = [some_inputs(blocks, 1, length, random) for length in lengths]
        self.outputs: list[Tensor] = []

    @property
    def next(self) -> SessionCall:
        return SessionCall(self.inputs[len(self.outputs)], self.blocks.span, self.cache)

    def step(self) -> None:
        call = self.next
        self.outputs.append(self.blocks.forward(call.inputs, call.span, call.cache).clone())


def interleavings(lengths: Sequence[Sequence[int]], count: int) -> Iterator[list[int]]:
    """Orders of turns: each client alone after the others, then some shuffled orders."""
    turns = [number for number, steps in enumerate(lengths) for _ in steps]
    yield sorted(turns, reverse=True)
    for seed in range(count):
        order = torch.randperm(len(turns), generator=torch.Generator().manual_seed(seed)).tolist()
        yield [turns[place] for place in order]


def check_interleavings(blocks: BlockSpan, lengths: Sequence[Sequence[int]], count: int = 2) -> None:
    """Each call gives the bits that it gives on blocks that nobody else has used."""
    alone = []
    for number, steps in enumerate(lengths):
        client = Client(blocks, number, steps)
        for _ in steps:
            client.step()
        alone.append(client.outputs)
    for order in interleavings(lengths, count):
        clients = [Client(blocks, number, steps) for number, steps in enumerate(lengths)]
        for number in order:
            clients[number].step()
        for got, want in zip(clients, alone, strict=True):
            assert all(map(torch.equal, got.outputs, want)), order


def interleaved_clients(subject: Subject) -> None:
    blocks = subject.load()
    most = min(blocks.max_positions or 40, 40)
    check_interleavings(blocks, ((5, 1, 1), (most // 2, 1, 1), (most - 3, 1, 1)))


# ---------------------------------------------------------------------- sessions in one forward

ONE_BY_ONE = {
    "bamba": "its decoding of a batch isn't that of its rows",
    "deepseek_v4": "compresses its past into cache layers of its own",
    "llama4_text": "scales queries by the length of the cache",
    "qwen4_exp_text": "cache layers of its own",
    # LED's attention asks its mask for sizes, which that of a row of several sessions hasn't, and its padded rows gave
    # other numbers.
    "led": "attention in windows",
    "nllb-moe": "its router takes the last columns of the mask for the tokens of a batch",
}
"""Their sessions run one by one, with the reason."""
TRACED = {
    "arcee", "bitnet", "cohere", "cohere2", "cohere_compass_text", "ctrl", "cwm", "ernie4_5", "exaone4",
    "gemma", "gemma3_text", "gemma4_unified_text", "glm", "glm4", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox",
    "granite", "helium", "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama",
    "ministral", "mistral", "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "opt",
    "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2",
}  # fmt: skip
"""Their decode steps run as lines of operations on CPUs (`models/span/traced_step`). Others have experts, states
besides keys and values, attention of their own, or rare operations."""
PADDED_STACKS = {
    "longt5",  # looks up keys in its cache by a way of its own
    "longt5_global",
    "mvp",  # looks into its masks
    "seamless_m4t",
    "seamless_m4t_v2",
    "switch_transformers",
    "t5gemma2",  # attends to text and encoder outputs at once
}
"""Encoder-decoders whose sessions are padded. Sessions of all others run as one row."""


def sessions_together(subject: Subject) -> None:
    blocks = subject.load()
    way = check_together_as_alone(blocks)
    assert (way == Packing.ONE_BY_ONE) == (subject.name in ONE_BY_ONE)
    assert measure_packing(packer_of(blocks), decode_ms_per_block=0.5) in packer_of(blocks).ways


def steps_as_lines(subject: Subject) -> None:
    if why_no_steps():
        pytest.skip(why_no_steps())
    blocks = subject.load(quantization=Quantization("int8", smallest=1))
    packer = packer_of(blocks)
    packer.trace()
    assert packer.traces == (subject.name in TRACED)
    if packer.traces:
        sessions = Sessions(blocks)
        assert max(map(sessions.step, ((4, 3, 11, 2), (1, 1, 2, 5), (1, 1, 1, 1)))) <= RELATIVE


def sessions_with_encoder_outputs_together(subject: Subject) -> None:
    blocks = subject.load()
    sessions = SessionsWithSources(blocks, rows=(1, 2, 1, 3), sources=(9, 4, 17, 1))
    usual = Packing.PADDED if subject.name in PADDED_STACKS else Packing.RAGGED
    alone = subject.name in ONE_BY_ONE
    assert sessions.packer.way == (Packing.ONE_BY_ONE if alone else usual)
    with packs_counted(sessions.packer) as sizes:
        errors = [sessions.step(lengths) for lengths in ((1, 3, 1, 0), (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1))]
        for caches in (sessions.packed, sessions.alone):
            caches[3].select_batch([2, 2])
        sessions.rows = (1, 2, 1, 2)
        errors.append(sessions.step((1, 1, 1, 1)))
    assert max(errors) <= RELATIVE, errors
    assert sizes == ([] if alone else [3, 4, 4, 4]), "sessions that had begun ran together"
    assert measure_packing(sessions.packer, decode_ms_per_block=0.5) in sessions.packer.ways


SEVERAL_AXES = frozenset(
    {
        *("cohere_compass", "cosmos3_edge", "ernie4_5_vl_moe", "glm46v", "glm4v", "glm4v_moe", "glm_ocr"),
        *("paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
    }
)
"""Vision models whose positions have several axes."""


def sessions_with_several_axes_together(subject: Subject) -> None:
    if subject.name not in SEVERAL_AXES:
        return
    blocks = subject.load()
    sessions = SessionsWithAxes(blocks, rows=(1, 2, 1, 1, 1, 1, 2), axes=(3, 3, 3, 0, 1, 4, 4))
    steps = ((4, 3, 11, 5, 2, 3, 6), (1, 1, 2, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1))
    with packs_counted(sessions.packer) as sizes:
        errors = [sessions.step(lengths) for lengths in steps]
    assert max(errors) <= RELATIVE, errors
    together = {Packing.RAGGED: [3, 2, 2] * 4, Packing.PADDED: [2, 2, 2, 3, 2, 2, 3, 2, 2]}
    assert sizes == together[sessions.packer.way], "those with as many axes ran together"
    sessions.check_that_positions_matter()


NOT_PAGED = frozenset(
    {
        # Some of their blocks keep something else than keys and values of all positions.
        *("axk2", "bailing_hybrid", "bamba", "deepseek_v32", "deepseek_v4", "dots3_note_text", "falcon_h1"),
        *("falcon_mamba", "gemma3n_shared_kv", "gemma4_shared_kv", "glm_moe_dsa", "granitemoehybrid", "hy_v4"),
        *("inkling_text", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h"),
        *("nemotron_h_experts", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text"),
        *("zamba", "zamba2"),
        # The probe of a server finds that their attention on pages computes something else.
        *("axk1", "biogpt", "bloom", "codegen", "deepseek_v2", "deepseek_v3", "diffllama", "doge", "falcon"),
        *("falcon_alibi", "flint", "gemma2", "glm4_moe_lite", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj"),
        *("granite_swa", "granitemoe_swa", "jetmoe", "llama4_text", "mimo_v2_flash", "minicpm3", "mpt", "qwen2_moe"),
        *("trocr", "vaultgemma", "xglm", "youtu"),
    }
)
"""Their sessions can't be on pages."""
NOT_RECORDED = {
    "dbrx": "asks on the host which experts were chosen",
    "gemma3n_text": "takes words besides hidden states",
    "gemma4_text": "takes words besides hidden states",
}
"""Their steps on pages can't be recorded, with the reason."""


def paged_blocks(subject: Subject, dtype: torch.dtype | None = None) -> BlockSpan | None:
    """Blocks with a pool of pages; None if pages aren't for this architecture, or give something else."""
    blocks = subject.load(dtype)
    if blocks.why_not_paged:
        return None
    blocks.pool = blocks.new_pool(64)
    return blocks if Packing.PAGED in right_ways(blocks) else None


def sessions_on_pages(subject: Subject) -> None:
    """Prompts longer than a page, prompts beside tokens, several tokens at once."""
    if (blocks := paged_blocks(subject)) is None:
        assert subject.name in NOT_PAGED
        return
    assert subject.name not in NOT_PAGED
    sessions, most = PagedSessions(blocks), (blocks.max_positions or 1000) // 2
    steps = [[min(length, most) for length in lengths] for lengths in PagedSessions.STEPS]
    assert max(map(sessions.step, steps)) <= RELATIVE


def steps_on_pages_read_nothing_on_the_host(subject: Subject) -> None:
    """Else they could not be recorded as a CUDA graph."""
    blocks = paged_blocks(subject, torch.bfloat16)  # the dtype of products of experts
    if blocks is None:
        return
    hidden = some_inputs(blocks, 1, 1, torch.Generator().manual_seed(1)).hidden_states
    if blocks.traits.batch_axis or blocks.traits.extra_inputs or hidden.ndim != 3:  # as `Packer.record` asks
        assert subject.name in NOT_RECORDED
        return
    inputs = StaticInputs(hidden.shape[-1], blocks.dtype, blocks.device, 8)
    if subject.name in NOT_RECORDED:
        with pytest.raises(RuntimeError):
            trace(PagedAttention(blocks).step, inputs, 4)
    else:
        trace(PagedAttention(blocks).step, inputs, 4)


# ---------------------------------------------------------------------- traits, as clients find them


def found_by_a_client(checkpoint: Checkpoint) -> BlockTraits:
    """On a small copy of the model, with nothing known before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_copy, "_known", {})
        random_state = torch.get_rng_state()
        found = traits_of(checkpoint)
        assert torch.equal(random_state, torch.get_rng_state()), "the random state of the user was changed"
    assert found is not None
    return found


def clients_find_the_traits_of_servers(subject: Subject) -> None:
    checkpoint = subject.checkpoint
    found = found_by_a_client(checkpoint)
    spans = [stack.span for stack in stacks(checkpoint.config)]
    *encoder, decoder = [load_block_span(checkpoint, span, progress=False).traits for span in spans]
    cuts = tuple(cut for traits in (*encoder, decoder) for cut in traits.forbidden_cuts)
    assert found.model_copy(update={"encoder": None}) == decoder.model_copy(update={"forbidden_cuts": cuts})
    for traits in encoder:
        assert found.of_encoder == traits


def clients_find_traits_in_half_precision(subject: Subject) -> None:
    """Some traits can't be observed in bfloat16. And no honest server, quantized or not, contradicts what is found."""
    checkpoint = open_checkpoint(str(subject.directory(torch.bfloat16)))
    found = found_by_a_client(checkpoint)
    assert found == load_block_span(checkpoint, Span(0, NUM_BLOCKS), progress=False).traits
    for span in (Span(0, 3), Span(1, 4)):
        if {span.start, span.end} & {*found.forbidden_cuts}:
            continue
        for quantization in (FULL_PRECISION, Quantization("int8", smallest=1)):
            blocks = load_block_span(checkpoint, span, progress=False, quantization=quantization)
            served = ServedBlocks(start=span.start, end=span.end, traits=blocks.traits)
            check_claims("server", served, found, None)
            assert lacking_abilities(served, found, None) == ()


# ---------------------------------------------------------------------- few positions

FEW_POSITIONS = {
    "max_position_embeddings": 96,
    "max_source_positions": 96,
    "max_encoder_position_embeddings": 96,
    "max_target_positions": 40,
    "max_decoder_position_embeddings": 40,
}


def throughput_of_stacks_with_few_positions(subject: Subject) -> None:
    """A server that starts measures no more positions than each stack has."""
    tiny: Any = tiny_speech_models if subject.kind == "speech" else tiny_encoder_decoders
    config: Any = tiny.tiny_config(subject.name)
    for field, positions in FEW_POSITIONS.items():
        if getattr(config, field, None):
            setattr(config, field, positions)
    maker = AutoModelForSpeechSeq2Seq if subject.kind == "speech" else AutoModelForSeq2SeqLM
    directory = subject.new_directory()
    maker.from_config(config).save_pretrained(directory)
    checkpoint = open_checkpoint(str(directory))
    with pytest.MonkeyPatch.context() as patch:
        never_out_of_time(patch)
        for stack in stacks(checkpoint.config):
            blocks = load_block_span(checkpoint, stack.span, dtype=torch.float32, progress=False)
            assert measure_throughput(Packer(blocks, right_ways(blocks))).forward_tokens_per_s > 0


def never_out_of_time(patch: pytest.MonkeyPatch) -> None:
    """Measurements leave nothing out, however busy the machine is."""
    for name in ("BUDGET_S", "PACKING_BUDGET_S", "CONTEXT_BUDGET_S"):
        patch.setattr(throughput, name, 1e9)

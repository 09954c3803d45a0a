"""Blocks in words: `4:8`, or `encoder 2:4, decoder 0:6` in a model with both stacks.

Messages and `--block_indices` number the blocks of both stacks one after the other. Used wherever a swarm is shown. The
page `/swarm` writes them in the same way (`gateway/pages/picture.js`).
"""

from collections.abc import Sequence

from swarmllm.config import is_of_machines
from swarmllm.data_structures import Span


def stack_spans(num_blocks: int, encoder_blocks: int) -> list[tuple[str, Span]]:
    """(name, blocks) of each stack; a single one without a name if the model has no encoder."""
    if not 0 < encoder_blocks < num_blocks:
        return [("", Span(0, num_blocks))]
    return [("encoder", Span(0, encoder_blocks)), ("decoder", Span(encoder_blocks, num_blocks))]


def describe_span(start: int, end: int, encoder_blocks: int = 0) -> str:
    """Blocks [start, end) in words, numbered from 0 in each stack."""
    parts = []
    for name, stack in stack_spans(max(end, encoder_blocks + 1), encoder_blocks):
        first, last = max(start, stack.start), min(end, stack.end)
        if first < last:
            parts.append(f"{name} {first - stack.start}:{last - stack.start}".lstrip())
    return ", ".join(parts)


def describe_blocks(blocks: Sequence[int], encoder_blocks: int = 0) -> str:
    """[3, 4, 5, 9] → 'blocks 3:6, 9:10'; with 4 of an encoder, [3, 4, 5] → 'blocks 3:6 (encoder 3:4, decoder 0:2)'."""
    runs = _runs(blocks)
    text = f"blocks {', '.join(f'{start}:{end}' for start, end in runs)}"
    if not encoder_blocks:
        return text
    return f"{text} ({', '.join(describe_span(start, end, encoder_blocks) for start, end in runs)})"


def how_to_serve(blocks: Sequence[int], model: str, initial_peers: Sequence[str], swarm_name: str | None) -> str:
    """The mend in a message about missing blocks."""
    if is_of_machines(swarm_name):
        return "the machines may be loading them: `swarmllm use` shows how far they are, `swarmllm up` adds a machine"
    command = command_to_serve(blocks, model, initial_peers, is_private=swarm_name is not None)
    return f"start a server of them, {command}"


def command_to_serve(
    blocks: Sequence[int], model: str, initial_peers: Sequence[str] = (), *, is_private: bool = False
) -> str:
    """The command that serves the first run of these blocks, for messages about missing blocks.

    `is_private`: only an invite brings a server into this swarm. With an address alone it would be announced publicly.
    """
    start, end = _runs(blocks)[0]
    peer = "INVITE" if is_private else next(iter(initial_peers), "")
    peers = f" --initial_peers {peer}" if peer else ""
    place = model if "/" in model else f"/path/to/{model}"  # the swarm knows a directory by its own name alone
    return f"swarmllm server --model {place} --block_indices {start}:{end}{peers}"


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Join neighbours: [3, 4, 5, 9] → [(3, 6), (9, 10)]."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if runs and block == runs[-1][1]:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs

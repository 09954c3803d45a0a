"""How blocks are written where people read: `4:8`, or `encoder 2:4, decoder 0:6` in a model that has both stacks.

Messages and `--block_indices` number the blocks of both one after the other. Used wherever a swarm is shown; the page
`/swarm` writes them in the same way (`gateway/pages/picture.js`).
"""

from collections.abc import Sequence

from swarmllm.data_structures import Span


def stack_spans(num_blocks: int, encoder_blocks: int) -> list[tuple[str, Span]]:
    """(name, blocks) of each stack; one without a name, if the model has no encoder beside its decoder."""
    if not 0 < encoder_blocks < num_blocks:
        return [("", Span(0, num_blocks))]
    return [("encoder", Span(0, encoder_blocks)), ("decoder", Span(encoder_blocks, num_blocks))]


def describe_span(start: int, end: int, encoder_blocks: int = 0) -> str:
    """Blocks [start, end), in each stack numbered from 0."""
    parts = []
    for name, stack in stack_spans(max(end, encoder_blocks + 1), encoder_blocks):
        first, last = max(start, stack.start), min(end, stack.end)
        if first < last:
            parts.append(f"{name} {first - stack.start}:{last - stack.start}".lstrip())
    return ", ".join(parts)


def describe_blocks(blocks: Sequence[int], encoder_blocks: int = 0) -> str:
    """[3, 4, 5, 9] → 'blocks 3–5, 9'; with 4 of an encoder, [3, 4, 5] → 'blocks 3–5 (encoder 3:4, decoder 0:2)'."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    text = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
    text = f"block{'s' if len(blocks) > 1 else ''} {text}"
    if not encoder_blocks:
        return text
    return f"{text} ({', '.join(describe_span(a, b + 1, encoder_blocks) for a, b in runs)})"

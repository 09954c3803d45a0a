"""How long a text may be for a model: the entries of its tables of positions.

Called by `span/` and by whoever measures or limits texts.
"""

from torch import nn
from transformers import PreTrainedModel

from swarmllm.models.architecture import text_config

MOST_PADDING = 16
"""Entries that a table of positions may have beyond those of texts: 2 in OPT and RoBERTa. Assumed."""
_LENGTHS = (
    *("max_position_embeddings", "max_seq_len", "max_target_positions"),
    *("max_decoder_position_embeddings", "max_encoder_position_embeddings"),
)


def max_positions(stack: PreTrainedModel) -> int | None:
    """Positions that the stack was made for; some have a learned embedding for each, and none for more."""
    found = _length_of(stack)
    for part in stack.modules():  # RoBERTa and its kin begin to count behind the position of padding
        if found and hasattr(part, "position_embeddings") and getattr(part, "padding_idx", None) is not None:
            return found - int(part.padding_idx) - 1
    return found


def _length_of(stack: PreTrainedModel) -> int | None:
    """Positions of a text, by any of the names that configs have for them: the first of which the stack has a table."""
    config = text_config(stack.config)
    stated = (getattr(config, name, None) for name in _LENGTHS)
    found = [length for length in stated if isinstance(length, int) and length > 0]
    parts = stack.named_modules() if len(found) > 1 else ()
    tables = [len(part.weight) for name, part in parts if isinstance(part, nn.Embedding) and "pos" in name]
    of_tables = (length for length in found if any(_is_table(rows, length) for rows in tables))
    return next(of_tables, found[0] if found else None)


def _is_table(rows: int, length: int) -> bool:
    return length <= rows <= length + MOST_PADDING


def table_positions(stack: PreTrainedModel) -> range | None:
    """The `position_ids` for which the stack's tables have an entry; None if it looks up nothing by them."""
    length = _length_of(stack) or 0
    ranges: list[range] = []
    for name, part in stack.named_modules() if length else ():
        tables = [part.weight] if isinstance(part, nn.Embedding) else []
        # Sines and cosines of all positions, as GPT-J and XGLM keep them.
        tables += [b for key, b in part.named_buffers(name, recurse=False) if b.ndim == 2 and "pos" in key]
        offset = int(getattr(part, "offset", 0))  # OPT and its kin add it to each position
        rows = [len(table) for table in tables if _is_table(len(table), length)]
        ranges += [range(-offset, number - offset) for number in rows]
    return range(max(r.start for r in ranges), min(r.stop for r in ranges)) if ranges else None

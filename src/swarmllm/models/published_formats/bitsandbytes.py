"""bitsandbytes: nf4 and fp4 in groups of a flat weight, their scales perhaps in 8 bits; int8 with a scale per row."""

import json
from typing import Any

import torch
from torch import Tensor

from swarmllm.models.published_formats.stored_format import Parts, StoredFormat
from swarmllm.models.quantization import published
from swarmllm.models.quantization.codes import nibbles, pairs, scaled
from swarmllm.models.quantization.packed import Packed

SCALE_OF_INT8 = 1 / 127
STATES = {
    ".weight.quant_state.bitsandbytes__nf4": published.Nf4Pairs,
    ".weight.quant_state.bitsandbytes__fp4": published.Fp4Pairs,
}


class BitsAndBytes(StoredFormat):
    """Bytes `[out·in/2, 1]` whose first code is above; or int8 `[out, in]`."""

    parts = (
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *STATES,
        ".SCB",
        ".weight_format",
        ".weight",
    )
    main = (".weight",)

    def dequantize(self, parts: Parts) -> Tensor:
        if ".SCB" in parts:
            return parts[".weight"].float() * parts[".SCB"].float()[:, None] * SCALE_OF_INT8
        state = _state(parts)
        if state is None:
            return parts[".weight"].float()
        codes = nibbles(parts[".weight"].flatten(), low_first=False)
        values = parts[".weight.quant_map"].float()[codes.int()].view(1, -1)
        return scaled(values, _scale(parts, state).view(1, -1)).view(state["shape"])

    def keep(self, parts: Parts, dtype: torch.dtype) -> Packed | None:
        if ".SCB" in parts:
            scale = parts[".SCB"].float()[:, None] * SCALE_OF_INT8
            return published.Published(parts[".weight"], scale, dtype)
        state = _state(parts)
        if state is None:
            return None
        form = next(form for part, form in STATES.items() if part in parts)
        rows, columns = state["shape"]
        values = torch.tensor(form.values)
        if columns % state["blocksize"] or not torch.equal(parts[".weight.quant_map"].float(), values):
            return None
        codes = pairs(nibbles(parts[".weight"].flatten(), low_first=False).view(rows, columns))
        return form(codes, _scale(parts, state).view(rows, -1), dtype)

    def kept_bits(self) -> float:
        return 8.25 if self.settings.get("load_in_8bit") else 4 + 32 / 64


def _state(parts: Parts) -> dict[str, Any] | None:
    """What the checkpoint says of a weight in 4 bits."""
    packed = next((parts[part] for part in STATES if part in parts), None)
    return None if packed is None else dict(json.loads(bytes(packed.tolist())))


def _scale(parts: Parts, state: dict[str, Any]) -> Tensor:
    """The scale of each group of the flat weight; float32."""
    scale = parts[".weight.absmax"]
    if ".weight.nested_absmax" not in parts:
        return scale.float()
    group = torch.arange(scale.numel()) // state["nested_blocksize"]
    nested: Tensor = (
        parts[".weight.nested_quant_map"].float()[scale.int()] * parts[".weight.nested_absmax"].float()[group]
    )
    return nested + float(state["nested_offset"])

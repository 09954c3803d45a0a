"""Tolerances: how much honest servers differ, so that spot checks forgive it, and who can't be checked because of it.

Pure; used by `batches/spot_checks`, and by `view/look_ups` to leave out servers that can't be checked.
"""

import math

from swarmllm.config import ClientConfig
from swarmllm.data_structures import ServerInfo

BY_DTYPE = {"float64": 1e-3, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""Relative error of one position's hidden states. Assumed: ten times what other batch shapes and threads change."""
BY_QUANT_TYPE = {
    "none": 0.0, "int8": 0.15, "llm_int8": 0.3, "int6": 0.3, "int5": 0.4, "int4": 0.5, "nf4": 0.5, "q3.5": 0.7,
    "int3": 0.8, "int2": 2.0,
}  # fmt: skip
"""The difference between a server that quantizes and one that doesn't. Measured through all blocks of the embedded
model, the largest error of each of 2400 positions in 20 texts: int8 0.029, llm_int8 0.081, int6 0.078, int5 0.17, int4
0.27, nf4 0.41, q3.5 0.43, int3 0.46, int2 1.23; bfloat16, which comes on top, 0.092 alone. On single tokens an earlier
measurement gave up to 0.05 for int8 and 0.29 for nf4. Deeper models add up more. No tolerance of a client lets int2
in."""
BY_COMPRESSION = 0.05
"""Added for messages of 8 bits a value, which both sides of a comparison have rounded. Measured: 0.009 per boundary
(docs/benchmarks.md)."""


def honest_error(server: ServerInfo) -> float:
    """The largest error of an honest server of that kind; infinite if nobody knows."""
    by_dtype = BY_DTYPE.get(server.dtype, math.inf)
    return max(by_dtype, BY_QUANT_TYPE.get(server.quant_type, math.inf))


def is_checkable(server: ServerInfo, config: ClientConfig) -> bool:
    """Whether an honest server of that kind is always within the client's tolerance.

    What a server announces decides whether it is used, never how much it may be wrong by: otherwise a liar would
    announce the coarsest kind of weights, and be forgiven everything.
    """
    return honest_error(server) <= config.verify_tolerance

"""Which of the compiled kernels run on this processor, so that tests try each of them."""

from swarmllm.models.quantization import kernels

LEVELS = [] if kernels.library() is None else [level for level in (1, 3, 4) if level <= kernels.level()]

"""What setup.cfg can't say: the kernels for CPUs. Without a compiler the installation goes on, and these are slower."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "swarmllm.models.quantization._kernels",
            ["src/swarmllm/models/quantization/kernels.c"],
            depends=[f"src/swarmllm/models/quantization/{name}.h" for name in ("bit_planes", "gguf_blocks")],
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        )
    ]
)

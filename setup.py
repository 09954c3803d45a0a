"""What setup.cfg can't say: the kernels for CPUs. Without a compiler the installation goes on, and these are slower."""

from setuptools import Extension, setup

HERE = "src/swarmllm/models/quantization"

setup(
    ext_modules=[
        Extension(
            "swarmllm.models.quantization._kernels",
            [f"{HERE}/{name}.c" for name in ("kernels", "products_3", "products_4")],
            depends=[f"{HERE}/{name}.h" for name in ("products", "vectors", "weight", "bit_planes", "gguf_blocks")],
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-g0"],
            optional=True,
        )
    ]
)

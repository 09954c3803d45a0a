"""What setup.cfg can't say: the kernels for CPUs. Without a compiler the installation goes on, and these are slower.

They know nothing of Python, so a wheel with them is for every version of it: py3-none, and the platform.
"""

import sys

from setuptools import Extension, setup

if sys.version_info < (3, 11):  # noqa: UP036
    # pip looks at python_requires too late: it fails before, on a dependency, with a page of version numbers.
    here = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"swarmllm needs Python 3.11 or newer, and this is {here}: /path/to/python3.11 -m pip install .")

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = "src/swarmllm/models/quantization"


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except CompileError:  # an assembler before binutils 2.35
            ext.extra_compile_args.append("-DNO_TILES")
            super().build_extension(ext)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols  # no module's function to begin with


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


HEADERS = (
    *("compiler", "products", "side_by_side", "int8_products", "vectors", "weight", "bit_planes", "gguf_blocks"),
    *("step", "step_line", "rounding", "strips", "strips_opened", "strips_tiles", "tiles"),
    *("whole", "whole_attention", "whole_attention_3", "whole_attention_4", "whole_eights", "whole_lanes"),
    *("whole_pairs", "whole_tiles", "whole_turned", "whole_weight"),
)
SOURCES = (
    *("kernels", "products_3", "products_4", "int8_kernels", "int8_3", "int8_3_vnni", "int8_4_vnni"),
    *("strips", "strips_3", "strips_3_vnni", "strips_4_vnni", "rounding", "rounding_3", "rounding_4"),
    *("whole", "whole_3", "whole_4"),
)

setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
    ext_modules=[
        Extension(
            "swarmllm.models.quantization._kernels",
            [f"{HERE}/{name}.c" for name in SOURCES],
            depends=[f"{HERE}/{name}.h" for name in HEADERS],
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-g0"],
            libraries=["m"],
            optional=True,
        )
    ],
)

"""Calibration files: how large the inputs of each weight are, seen on a text. Servers that round weights read them.

`swarmllm calibrate` writes such a file, in safetensors: the mean squares of the inputs of each matrix of the blocks,
`[…, in]`, under the matrix's name in the model.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmllm.errors import ConfigurationError
from swarmllm.files import replaced
from swarmllm.models.checkpoint.sources import first_line


def write_calibration(path: Path, squares: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write mean squares by name; `about` tells people where they come from.

    Raises:
        OSError: the file can't be written.
    """
    with replaced(path) as beside:
        save_file(dict(squares), beside, metadata=dict(about))


def read_calibration(path: Path) -> dict[str, Tensor]:
    """Mean squares of the inputs of each matrix, by name.

    Raises:
        ConfigurationError: the file is missing, or is no calibration.
    """
    try:
        found: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(
            f"the calibration {path} can't be read ({first_line(error)}): make one with swarmllm calibrate"
        ) from error
    if not found or not all(_are_squares(one) for one in found.values()):
        raise ConfigurationError(f"{path} is no calibration: make one with swarmllm calibrate")
    return found


def _are_squares(numbers: Tensor) -> bool:
    return numbers.is_floating_point() and bool(numbers.isfinite().all()) and bool((numbers >= 0).all())

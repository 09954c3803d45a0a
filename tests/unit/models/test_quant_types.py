"""The types of weights have the same names wherever they are listed."""

from itertools import pairwise

import pytest

from swarmllm.client.view.servers import BY_QUANT_TYPE
from swarmllm.errors import ConfigurationError
from swarmllm.models.quantization import resolve_quantization
from swarmllm.models.quantization.block_search import MAKERS
from swarmllm.models.quantization.decoded import KERNELS, KINDS, PLANES
from swarmllm.models.quantization.rules import BITS, BLOCKS, FOR_OTHER_ROWS, QUANT_TYPES
from swarmllm.server import settings


def test_flag_spot_checks_and_forms_know_the_same_types() -> None:
    assert ("auto", *QUANT_TYPES) == settings.QUANT_TYPES
    assert BY_QUANT_TYPE.keys() == set(QUANT_TYPES)
    assert set(QUANT_TYPES) == {"none", "int8", "nf4", "llm_int8", *BITS, "q8_0", *FOR_OTHER_ROWS}
    assert list(BITS.values()) == list(PLANES)
    assert all(sum(planes) == (7 if bits == 3.5 else bits) for bits, planes in PLANES.items())


def test_blocks_are_those_of_gguf() -> None:
    for name, (kind, *sizes) in BLOCKS.items():
        assert KINDS[kind] == (name.upper(), *sizes)
    assert {kind for kind, *_ in BLOCKS.values()} == MAKERS.keys() <= KERNELS
    assert {*FOR_OTHER_ROWS, *FOR_OTHER_ROWS.values()} == BLOCKS.keys()


def test_fewer_bits_are_forgiven_more() -> None:
    for quant_types in ((*BITS, "int8", "none"), ("int4", "q4_k", "q5_k", "q6_k", "q8_0", "none")):
        errors = [BY_QUANT_TYPE[quant_type] for quant_type in quant_types]
        assert all(less < more for more, less in pairwise(errors))


def test_a_calibration_is_for_types_that_are_found_by_search() -> None:
    assert set(settings.SEARCHED) == BLOCKS.keys() & set(QUANT_TYPES)
    for quant_type in settings.QUANT_TYPES:
        options = {"model": "m", "new_swarm": True, "quant_type": quant_type, "calibration": "file"}
        if quant_type in settings.SEARCHED:
            assert settings.ServerConfig(**options).calibration == "file"
        else:
            with pytest.raises(ConfigurationError, match=r"give --quant_type q8_0, .*or leave --calibration out"):
                settings.ServerConfig(**options)


@pytest.mark.parametrize("quant_type", [*QUANT_TYPES, "auto"])
def test_known_types(quant_type: str) -> None:
    assert resolve_quantization(quant_type).quant_type == ("int8" if quant_type == "auto" else quant_type)


@pytest.mark.parametrize("quant_type", ["int7", "q3.50", "3.5", ""])
def test_unknown_types_are_refused_with_a_list_of_all(quant_type: str) -> None:
    with pytest.raises(ConfigurationError, match=r"none, int8, q8_0, q6_k, .*, llm_int8, .*, int6$"):
        resolve_quantization(quant_type)

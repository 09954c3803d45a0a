"""The types of weights have the same names wherever they are listed."""

from itertools import pairwise

import pytest

from swarmllm.client.view.servers import BY_QUANT_TYPE
from swarmllm.errors import ConfigurationError
from swarmllm.models.quantization import resolve_quantization
from swarmllm.models.quantization.decoded import PLANES
from swarmllm.models.quantization.rules import BITS, QUANT_TYPES
from swarmllm.server import settings


def test_flag_spot_checks_and_forms_know_the_same_types() -> None:
    assert ("auto", *QUANT_TYPES) == settings.QUANT_TYPES
    assert BY_QUANT_TYPE.keys() == set(QUANT_TYPES)
    assert set(QUANT_TYPES) == {"none", "int8", "nf4", "llm_int8", *BITS}
    assert list(BITS.values()) == list(PLANES)
    assert all(sum(planes) == (7 if bits == 3.5 else bits) for bits, planes in PLANES.items())


def test_fewer_bits_are_forgiven_more() -> None:
    errors = [BY_QUANT_TYPE[quant_type] for quant_type in (*BITS, "int8", "none")]
    assert all(less < more for more, less in pairwise(errors))


@pytest.mark.parametrize("quant_type", [*QUANT_TYPES, "auto"])
def test_known_types(quant_type: str) -> None:
    assert resolve_quantization(quant_type).quant_type == ("int8" if quant_type == "auto" else quant_type)


@pytest.mark.parametrize("quant_type", ["int7", "q3.50", "3.5", ""])
def test_unknown_types_are_refused_with_a_list_of_all(quant_type: str) -> None:
    with pytest.raises(ConfigurationError, match=r"none, int2, int3, q3\.5, int4, int5, int6, int8, nf4, llm_int8$"):
        resolve_quantization(quant_type)

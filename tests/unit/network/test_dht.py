"""What is put right of hivemind's answers, without any node."""

from types import SimpleNamespace
from typing import Any

from swarmllm.network._hivemind import ValueWithExpiration
from swarmllm.network.dht import _date_by_entries

INFINITE = float("inf")


def found(claimed: float, **entries: float) -> Any:
    items = {owner: ValueWithExpiration(b"value", expiration) for owner, expiration in entries.items()}
    return ValueWithExpiration(SimpleNamespace(items=items.items), claimed)


async def test_an_answer_is_as_late_as_its_latest_valid_record() -> None:
    answers = {1: (found(INFINITE, a=5.0, b=7.0), "near"), 2: (found(INFINITE), "near"), 3: (None, "near")}

    async def call_find(peer: Any, keys: Any) -> Any:
        return answers if peer == "answers" else None

    dated = await _date_by_entries(call_find)("answers", [1, 2, 3])
    assert dated is not None
    assert dated[1][0].expiration_time == 7.0
    assert dated[2] == (None, "near")  # no valid record is no answer, so the search goes on
    assert dated[3] == (None, "near")
    assert await _date_by_entries(call_find)("silent", [1]) is None

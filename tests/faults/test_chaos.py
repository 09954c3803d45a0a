"""Texts of all kinds on random layouts of servers, each disturbed at a random moment: each ends as it should.

What the texts are is in `chaos_plan`; benchmarks/chaos.py runs more of them. A failure begins with the number of its
text: `python benchmarks/chaos.py --seed NUMBER --texts 1` runs it alone.
"""

from collections import Counter
from collections.abc import Iterable

import pytest
from chaos_plan import NUM_BLOCKS, TEXTS_PER_LAYOUT, Disturbance, Kind, covers, layout, layout_of, text
from chaos_run import run_layout

QUICK = (102, 103, 104, 115, 119)
"""Texts on three servers: a client leaves, out of memory, KILL, p2pd KILL, KILL while an adapter drops out."""


def check(numbers: Iterable[int]) -> None:
    texts = [text(number) for number in numbers]
    outcomes = list(run_layout(layout_of(texts[0].number), texts))
    assert [outcome.text for outcome in outcomes] == texts
    failed = "\n".join(str(outcome) for outcome in outcomes if not outcome.passed)
    assert not failed, failed


def test_some_texts_end_as_they_should() -> None:
    check(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(5))
def test_all_texts_of_a_layout_end_as_they_should(number: int) -> None:
    check(range(number * TEXTS_PER_LAYOUT, (number + 1) * TEXTS_PER_LAYOUT))


def test_every_kind_meets_every_disturbance() -> None:
    texts = [text(number) for number in range(1000)]
    met = Counter((text.kind, text.disturbance) for text in texts)
    assert len(met) == len(Kind) * len(Disturbance)
    assert min(met.values()) >= 10
    assert texts == [text(number) for number in range(1000)]


def test_layouts_cover_the_model() -> None:
    for spans in map(layout, range(200)):
        assert 3 <= len(spans) <= 7
        assert all(0 <= start < end <= NUM_BLOCKS for start, end in spans)
        assert covers(spans)

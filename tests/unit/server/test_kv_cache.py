"""The byte budget of caches: never more than there is, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.errors import CacheFullError, SessionTooLargeError
from swarmllm.server.sessions.kv_cache import CacheBudget


def test_a_lease_is_refused_when_it_does_not_fit() -> None:
    budget = CacheBudget(100)
    first = budget.lease(60)
    with pytest.raises(CacheFullError, match="max_length"):
        budget.lease(41)
    second = budget.lease(40)
    assert budget.left_bytes == 0
    first.release()
    first.release()
    assert budget.left_bytes == 60
    second.resize(100)
    with pytest.raises(SessionTooLargeError, match="in all: use a smaller max_length"):
        second.resize(101)
    assert (budget.left_bytes, second.num_bytes) == (0, 100)
    with pytest.raises(CacheFullError) as caught:
        budget.lease(1)
    assert type(caught.value) is CacheFullError, "others may give back what they have"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 120)), max_size=30))
def test_the_books_balance(actions: list[tuple[int, int]]) -> None:
    budget = CacheBudget(100)
    leases = [budget.lease(0) for _ in range(4)]
    for index, num_bytes in actions:
        if index == 4:
            leases[num_bytes % 4].release()
            continue
        before = leases[index].num_bytes
        try:
            leases[index].resize(num_bytes)
        except CacheFullError:
            assert leases[index].num_bytes == before
        assert sum(lease.num_bytes for lease in leases) == budget.leased_bytes <= budget.capacity_bytes


def test_the_budget_shrinks_when_memory_runs_out_and_grows_again_with_later_sessions() -> None:
    budget = CacheBudget(1000)
    leases = [budget.lease(200) for _ in range(3)]
    for _ in range(4):  # several calls may fail by one lack
        budget.shrink()
        assert (budget.offered_bytes, budget.left_bytes) == (450, 0)
    for lease in leases:
        lease.release()
    assert budget.left_bytes == 1000, "only by trying can a server show that it has memory again"
    other = budget.lease(0)
    other.resize(1)
    assert budget.left_bytes == 449, "these are the sessions that were too much"
    budget.lease(400).release()
    assert budget.left_bytes == 849
    budget.lease(400).release()
    assert budget.left_bytes == 999
    budget.shrink()
    assert budget.left_bytes == 249, "something is offered in any case"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 120)), max_size=30))
def test_leases_stay_within_the_offered_bytes(actions: list[tuple[int, int]]) -> None:
    budget = CacheBudget(100)
    leases = [budget.lease(0) for _ in range(4)]
    for index, num_bytes in actions:
        if index == 5:
            budget.shrink()
        elif index == 4:
            leases[num_bytes % 4].release()
            leases[num_bytes % 4] = budget.lease(0)
        else:
            left, before = budget.left_bytes, leases[index].num_bytes
            try:
                leases[index].resize(num_bytes)
            except CacheFullError:
                assert num_bytes - before > left
            else:
                assert num_bytes - before <= left
        assert 25 <= budget.offered_bytes <= 100
        assert sum(lease.num_bytes for lease in leases) == budget.leased_bytes

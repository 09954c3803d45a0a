"""Pages of sessions: what the device knows of them, and what is left when there is no room."""

import pytest
import torch

from swarmllm.errors import CacheFullError
from swarmllm.models.span.decode_graphs import DecodeGraphs, StaticInputs
from swarmllm.models.span.page_pool import PAGE_TOKENS, PagePool, PageTable

CPU = torch.device("cpu")


def new_pool(num_pages: int) -> PagePool:
    return PagePool({0: ((1, 2), (1, 2))}, num_pages, torch.float32, CPU)


def on_device(table: PageTable, num_pages: int) -> list[list[int]]:
    return table.pool.tables[table.rows, :num_pages].tolist()


def on_host(table: PageTable) -> list[list[int]]:
    return [pages for _, pages in table._held.rows]


def test_a_step_without_room_leaves_the_device_up_to_date() -> None:
    table = PageTable(new_pool(num_pages=3))  # two pages, and the one of nobody
    with pytest.raises(CacheFullError):
        table.prepare(1, 3 * PAGE_TOKENS)
    table.prepare(1, 2 * PAGE_TOKENS)
    assert on_device(table, 2) == on_host(table)
    assert 0 not in on_device(table, 2)[0]


def test_a_copied_page_is_on_the_device_though_the_step_has_no_room() -> None:
    pool = new_pool(num_pages=4)
    first, second = PageTable(pool), PageTable(pool)
    first.prepare(1, PAGE_TOKENS)
    first.advance(PAGE_TOKENS)
    second.append_shared(first.shared_page(0))
    second.advance(PAGE_TOKENS)
    second.advance(-1)  # its next step writes to the shared page
    with pytest.raises(CacheFullError):
        second.prepare(1, 3 * PAGE_TOKENS)
    second.prepare(1, 2 * PAGE_TOKENS)
    assert on_device(second, 2) == on_host(second)
    assert on_device(second, 1) != on_device(first, 1)


def test_rows_of_a_batch_are_selected_all_or_none() -> None:
    pool = new_pool(num_pages=8)
    pool._free_rows = [1, 2]
    table = PageTable(pool)
    table.prepare(1, PAGE_TOKENS)
    table.advance(PAGE_TOKENS)
    (page,), uses = on_host(table)[0], list(pool.uses)
    with pytest.raises(CacheFullError):
        table.select([0, 0, 0])
    assert on_host(table) == [[page]]
    assert pool.uses == uses
    table.select([0, 0])
    assert on_device(table, 1) == [[page], [page]]
    del table
    assert pool.num_free == 7
    assert sorted(pool._free_rows) == [1, 2]


def test_every_row_of_a_batch_gets_pages_of_its_own_to_write_to() -> None:
    table = PageTable(new_pool(num_pages=8))
    with pytest.raises(CacheFullError):
        table.prepare(1, 9 * PAGE_TOKENS)
    table.pool.drop(table._held.rows[0][1][3:])
    del table._held.rows[0][1][3:]
    table.select([0, 0])  # the pages of a step that failed are shared, too
    table.prepare(2, PAGE_TOKENS)
    table.prepare(2, 3 * PAGE_TOKENS)
    assert not {*on_host(table)[0]} & {*on_host(table)[1]}
    assert on_device(table, 3) == on_host(table)


def test_steps_are_not_recorded_where_their_trial_has_no_pages() -> None:
    graphs = DecodeGraphs(lambda *_: torch.zeros(1), new_pool(num_pages=2), StaticInputs(4, torch.float32, CPU))
    graphs.record((64,))
    assert graphs.sizes == ()

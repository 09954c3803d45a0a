"""Memory goes back to the operating system, and to the other users of a GPU where there is one."""

import pytest
import torch

from swarmllm.machine_memory import return_free_memory, trim_heap


@pytest.mark.parametrize("is_initialized", [False, True])
def test_what_torch_keeps_of_a_gpu_goes_back_where_one_is_in_use(
    is_initialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda"))
    trim_heap()
    assert not emptied
    return_free_memory()
    assert emptied == ["cuda"] * is_initialized

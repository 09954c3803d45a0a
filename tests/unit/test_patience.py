"""Lines of a terminal while something takes long."""

import gc
import sys
from queue import SimpleQueue

import pytest

from swarmllm import command_line
from swarmllm.command_line import Patience, announced_imports


def test_it_says_what_is_waited_for_and_only_while_something_is() -> None:
    said: SimpleQueue[str] = SimpleQueue()
    with Patience(said.put, every_s=0.01) as patience:
        patience.wait_for(lambda: "1 of 3 servers are up")
        assert said.get(timeout=60).endswith(" s: 1 of 3 servers are up")
        patience.wait_for(lambda: "the client")
        while not said.get(timeout=60).endswith(" s: the client"):
            pass  # what was on its way
        patience.wait_for(None)
    while not said.empty():
        assert said.get().endswith(" s: the client")


def test_it_is_silent_while_others_speak() -> None:
    said: SimpleQueue[str] = SimpleQueue()
    with Patience(said.put, every_s=3600) as patience:
        patience.wait_for(lambda: "servers")
    assert said.empty()


def test_imports_that_last_are_announced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(command_line, "EVERY_S", 0.01)
    monkeypatch.setattr(command_line.logger, "info", lambda text, *args: said.put(text % args))
    monkeypatch.setitem(sys.modules, "torch", sys)
    with announced_imports():
        pass
    assert said.empty()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with announced_imports():
        found = [said.get(timeout=60) for _ in range(3)]
    assert found[0] == "importing PyTorch and transformers …"
    assert all(" s: still importing PyTorch and transformers" in line for line in found[1:])


def test_what_is_imported_is_never_scanned_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    frozen = gc.get_freeze_count()
    with announced_imports():
        assert not gc.isenabled()
        imported: list[list[int]] = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(imported)

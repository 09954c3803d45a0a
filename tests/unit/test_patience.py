"""What a terminal says while something takes long."""

from queue import SimpleQueue

from swarmllm.demo.patience import Patience


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

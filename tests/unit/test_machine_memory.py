"""Memory that a process may use, by the cgroups that it is in: trees as they are found on machines."""

from pathlib import Path

import psutil
import pytest
import torch

from swarmllm import machine_memory
from swarmllm.client.view.swarm_view import decode_ms
from swarmllm.network.wire.frames import MAX_MESSAGE_BYTES
from swarmllm.network.wire.stream import Intake
from swarmllm.server.device import device as server_device

MIB = 1 << 20
V1_NO_LIMIT = 0x7FFFFFFFFFFFF000


class Tree:
    """A file system with cgroups, and what /proc says of a process in it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        (path / "proc").mkdir()
        self._mounts = ["31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755"]
        monkeypatch.setattr(machine_memory, "PROC", path / "proc")
        self.process_in()

    def process_in(self, *lines: str) -> None:
        (self.path / "proc" / "cgroup").write_text("\n".join(lines) + "\n")
        (self.path / "proc" / "mountinfo").write_text("\n".join(self._mounts) + "\n")

    def mount(self, kind: str, options: str, root: str = "/") -> Path:
        top = self.path / f"{kind}-{options}"
        top.mkdir()
        self._mounts.append(f"41 31 0:38 {root} {top} rw,relatime shared:5 - {kind} {kind} {options}")
        return top


def group(directory: Path, **files: str | int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".", 1)).write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_a_systemd_unit(tree: Tree) -> None:
    """The limit is that of a slice above the unit's own group; nothing is at the top."""
    top = tree.mount("cgroup2", "rw")
    group(top / "llm.slice", memory__max=900 * MIB, memory__current=300 * MIB)
    group(top / "llm.slice/server.service", memory__max="max", memory__high="max", memory__current=300 * MIB)
    tree.process_in("0::/llm.slice/server.service")
    assert machine_memory.total_memory_bytes() == 900 * MIB
    assert machine_memory.available_memory_bytes() == 600 * MIB


def test_the_least_of_all_levels(tree: Tree) -> None:
    top = tree.mount("cgroup2", "rw")
    group(top / "a", memory__max=500 * MIB, memory__current=450 * MIB)
    group(top / "a/b", memory__max=400 * MIB, memory__high=300 * MIB, memory__current=100 * MIB)
    tree.process_in("0::/a/b")
    assert machine_memory.total_memory_bytes() == 300 * MIB
    assert machine_memory.available_memory_bytes() == 50 * MIB


def test_cached_files_give_way(tree: Tree) -> None:
    """Weights that were read stay in the page cache, and count as used until memory is short."""
    top = tree.mount("cgroup2", "rw")
    group(top, memory__max=900 * MIB, memory__current=850 * MIB)
    (top / "memory.stat").write_text(f"anon 1\nfile {600 * MIB}\ninactive_file {500 * MIB}\nactive_file {50 * MIB}\n")
    tree.process_in("0::/")
    assert machine_memory.available_memory_bytes() == 600 * MIB


def test_version_1(tree: Tree) -> None:
    tree.mount("cgroup", "rw,cpu")
    top = tree.mount("cgroup", "rw,memory")
    group(top, memory__limit_in_bytes=V1_NO_LIMIT, memory__usage_in_bytes=9 * MIB)
    group(top / "batch/job", memory__limit_in_bytes=700 * MIB, memory__usage_in_bytes=300 * MIB)
    stat = f"inactive_file 1\ntotal_inactive_file {80 * MIB}\ntotal_active_file {20 * MIB}\n"
    (top / "batch/job/memory.stat").write_text(stat)
    tree.process_in("5:cpu:/elsewhere", "4:memory:/batch/job", "0::/")
    assert machine_memory.total_memory_bytes() == 700 * MIB
    assert machine_memory.available_memory_bytes() == 500 * MIB


def test_a_container_that_sees_only_its_own_part(tree: Tree) -> None:
    """Docker with --cgroupns=host: the path is the machine's, and the mount begins at the container."""
    top = tree.mount("cgroup2", "rw", root="/docker/1234")
    group(top, memory__max=800 * MIB, memory__current=0)
    group(top / "worker", memory__max=600 * MIB, memory__current=0)
    tree.process_in("0::/docker/1234/worker")
    assert machine_memory.total_memory_bytes() == 600 * MIB
    tree.process_in("0::/../other")
    assert machine_memory.total_memory_bytes() == 800 * MIB


def test_more_is_used_than_is_allowed(tree: Tree) -> None:
    group(tree.mount("cgroup2", "rw"), memory__max=100 * MIB, memory__current=200 * MIB)
    tree.process_in("0::/")
    assert machine_memory.available_memory_bytes() == 0


def test_without_limits(tree: Tree) -> None:
    group(tree.mount("cgroup2", "rw"), memory__max="max", memory__current=200 * MIB)
    tree.process_in("0::/gone")
    assert machine_memory.total_memory_bytes() == psutil.virtual_memory().total


def test_where_there_are_no_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "PROC", tmp_path / "nothing")
    assert machine_memory.total_memory_bytes() == psutil.virtual_memory().total
    assert machine_memory.available_memory_bytes() > 0


def test_all_that_is_sized_by_memory_keeps_to_the_limit(tree: Tree) -> None:
    group(tree.mount("cgroup2", "rw"), memory__max=MAX_MESSAGE_BYTES * 8, memory__current=0)
    tree.process_in("0::/")
    cpu = torch.device("cpu")
    assert server_device.total_bytes(cpu) == server_device.free_bytes(cpu) == MAX_MESSAGE_BYTES * 8
    assert server_device.usable_bytes(cpu, "50%") == MAX_MESSAGE_BYTES * 4
    assert Intake()._max_bytes == MAX_MESSAGE_BYTES * 2
    assert decode_ms(MAX_MESSAGE_BYTES * 8) is None


def test_short_lived_tensors_use_the_heap_while_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, afterwards = machine_memory.WHILE_LOADING_BYTES, machine_memory.AFTERWARDS_BYTES
    limits: list[int] = []
    monkeypatch.setattr(machine_memory, "_allocate_pages_from", limits.append)
    monkeypatch.setattr(machine_memory, "return_free_memory", lambda: None)
    with machine_memory.reused_heap():
        assert limits == []  # glibc's own limit counts
    with machine_memory.separate_weights():
        with pytest.raises(ZeroDivisionError), machine_memory.reused_heap():
            raise ZeroDivisionError
        assert limits == [loading, afterwards, loading]
    assert limits[3:] == [afterwards]

"""The table and the JSON of `status`, from servers that exist only here."""

import json
import re
from pathlib import Path

import pytest

from swarmllm.commands import status as status_command
from swarmllm.commands.status import ModelStatus, fingerprint_of_files, is_on_this_machine, look_twice, look_up
from swarmllm.data_structures import ModelRecord, ServerInfo, ServerState, SwarmSnapshot, printable
from swarmllm.demo.local_swarm import embedded_model_path
from swarmllm.errors import ConfigurationError, MissingBlocksError
from swarmllm.models.checkpoint.checkpoint import open_checkpoint
from swarmllm.models.checkpoint.fingerprint import fingerprint
from swarmllm.network.wire.messages import ErrorHeader, Target
from swarmllm.swarm.block_map import (
    describe_adapters,
    describe_coverage,
    describe_machines,
    describe_swarm,
    draw_blocks,
    state_name,
)

RECORD = ModelRecord(name="some/model", fingerprint="0123456789abcdef", num_blocks=8)


def server(name: str, start: int, end: int, state: int = ServerState.ONLINE, **values: object) -> ServerInfo:
    return ServerInfo(
        peer_id=name.rjust(44, "x"),
        start=start,
        end=end,
        state=state,
        **{"throughput": 100.0, "decode_ms_per_block": 0.5, **values},
    )


class Directory:
    """Answers of a BlockDirectory about `models`: servers by record."""

    def __init__(self, models: dict[ModelRecord, list[ServerInfo]]) -> None:
        self._models = models

    async def models(self) -> dict[str, ModelRecord]:
        return {server.peer_id: record for record, servers in self._models.items() for server in servers}

    async def servers(self, fingerprint: str) -> tuple[ServerInfo, ...]:
        return tuple(next(servers for record, servers in self._models.items() if record.fingerprint == fingerprint))


def test_a_block_is_a_character() -> None:
    assert draw_blocks(range(2, 5), 8) == "··███···"
    assert draw_blocks([], 3) == "···"


@pytest.mark.parametrize("num_blocks", [64, 65, 126, 4096])
def test_many_blocks_share_columns(num_blocks: int) -> None:
    assert len(draw_blocks([], num_blocks)) <= 64
    assert set(draw_blocks(range(num_blocks), num_blocks)) == {"█"}


def test_servers_of_one_machine_are_named_together() -> None:
    servers = [server("b", 4, 8, machine="0f"), server("a", 0, 4, machine="0f"), server("c", 0, 8, machine="1f")]
    assert describe_machines(SwarmSnapshot(8, tuple(servers))) == ["one machine: …xxxxxa, …xxxxxb"]
    assert describe_machines(SwarmSnapshot(8, (server("d", 0, 8),))) == []


def test_a_column_that_is_held_in_part() -> None:
    assert draw_blocks(range(3), 128)[:3] == "█▒·"


def test_the_table() -> None:
    lines = describe_swarm(SwarmSnapshot(8, (server("late1", 4, 8), server("early", 0, 4))))
    assert len(lines) == 3
    assert lines[1].split()[:6] == ["████····", "…xearly", "0:4", "online", "100", "2.0"]
    assert lines[2].split()[:3] == ["····████", "…xlate1", "4:8"]
    assert "name" not in lines[0]


@pytest.mark.parametrize(("share", "state"), [(1.0, "online  "), (0.25, "online at 25%"), (0.0, "online, paused")])
def test_a_server_that_gives_way_says_so(share: float, state: str) -> None:
    _, line = describe_swarm(SwarmSnapshot(8, (server("a", 0, 8, speed_share=share),)))
    assert f"  {state}" in line


def test_the_stacks_of_a_model_with_an_encoder() -> None:
    record = RECORD.model_copy(update={"encoder_blocks": 5})
    snapshot = SwarmSnapshot(8, (server("a", 0, 4), server("b", 3, 7)), record.encoder_blocks)
    text = " ".join(ModelStatus(record, snapshot).as_text().split())
    assert "encoder 0:5 is --block_indices 0:5, decoder 0:3 is --block_indices 5:8" in text
    assert "████·│··· …xxxxxa encoder 0:4 online" in text
    assert "···██│██· …xxxxxb encoder 3:5, decoder 0:2 online" in text
    assert "nobody serves blocks 7:8 (decoder 2:3)" in text
    assert ModelStatus(record, snapshot).as_json()["encoder_blocks"] == 5


def test_an_encoder_that_cant_be_is_not_shown() -> None:
    """A stranger's record may say anything."""
    record = RECORD.model_copy(update={"encoder_blocks": 9})
    text = ModelStatus(record, SwarmSnapshot(8, (server("a", 0, 8),), record.encoder_blocks)).as_text()
    assert "████████  …xxxxxa" in text
    assert "decoder" not in text


def test_public_names_get_a_column() -> None:
    lines = describe_swarm(SwarmSnapshot(8, (server("a", 0, 8, public_name="Ada"),)))
    assert lines[0].split()[:3] == ["peer", "name", "blocks"]
    assert lines[1].split()[1:4] == ["…xxxxxa", "Ada", "0:8"]


@pytest.mark.parametrize("width", [40, 58, 78, 98, 118])
def test_a_narrow_terminal_gets_a_narrow_table(width: int) -> None:
    """Whole columns go, and what goes is named."""
    snapshot = SwarmSnapshot(8, (server("a", 0, 4, public_name="Ada", hardware="NVIDIA H100"), server("b", 2, 8)))
    whole, (*lines, note) = describe_swarm(snapshot), describe_swarm(snapshot, width)
    assert max(map(len, lines)) <= width < max(map(len, whole))
    assert note.startswith("a wider terminal also shows: version")
    left_out = note.partition(": ")[2].split(", ")
    assert re.split("  +", lines[0].strip()) == [
        head for head in re.split("  +", whole[0].strip()) if head not in left_out
    ]
    assert [line[:17] for line in lines] == [line[:17] for line in whole], "the map and who it is of stay"
    assert describe_swarm(snapshot, max(map(len, whole))) == whole


def test_a_gap_is_drawn_and_named() -> None:
    snapshot = SwarmSnapshot(8, (server("a", 0, 3), server("b", 6, 8), server("c", 3, 6, ServerState.JOINING)))
    assert describe_swarm(snapshot)[-1].split()[0] == "███···██"
    assert describe_coverage(snapshot) == "missing: nobody serves blocks 3:6"


def test_missing_memory() -> None:
    snapshot = SwarmSnapshot(8, (server("a", 0, 5),))
    told = RECORD.model_copy(update={"block_bytes": 2_500_000_000})
    text = ModelStatus(told, snapshot).as_text(None, ["/ip4/1.2.3.4/tcp/5/p2p/12D3"])
    assert "  3 blocks of 2.50 GB are missing: 7.50 GB" in text
    serve = "swarmllm server --model some/model --block_indices 5:8 --initial_peers /ip4/1.2.3.4/tcp/5/p2p/12D3"
    assert f"  to serve them: {serve}" in text.splitlines()
    small = ModelStatus(told.model_copy(update={"block_bytes": 500_000}), snapshot)
    assert "  3 blocks of 0.5 MB are missing: 1.5 MB" in small.as_text()
    for record, servers in ((RECORD, snapshot), (told, SwarmSnapshot(8, (server("a", 0, 8),)))):
        assert "GB" not in ModelStatus(record, servers).as_text()


def test_nobody() -> None:
    assert describe_coverage(SwarmSnapshot(4)) == "missing: nobody serves blocks 0:4"


def test_the_best_route() -> None:
    snapshot = SwarmSnapshot(8, (server("a", 0, 4), server("b", 4, 8)))
    lines = describe_coverage(snapshot).splitlines()
    assert lines[0] == "all 8 blocks are served; best route: 2 servers, about 6.0 ms per token"
    assert "network 2.0 ms, queue 0.0 ms, computing 4.0 ms" in lines[1]
    assert [line.split()[:2] for line in lines[2:4]] == [["0:4", "…xxxxxa:"], ["4:8", "…xxxxxb:"]]
    assert lines[4].endswith("alone would take about 5.0 ms if it held all 8 blocks (it holds 0:4)")


def test_the_expected_time_is_shown_beside_the_seen_one() -> None:
    used = {"step_ms_p50": 3.25, "step_ms_p95": 7.5, "token_ms": 12.5, "version": "1"}
    snapshot = SwarmSnapshot(8, (server("a", 0, 4, **used), server("b", 4, 8, **used | {"token_ms": 14.5})))
    headline = describe_coverage(snapshot).splitlines()[0]
    assert "about 6.0 ms per token; recent texts took 13.5 ms" in headline
    head, row, *_ = (re.split("  +", line) for line in describe_swarm(snapshot))
    shown = dict(zip(head[1:], row[1:], strict=True))
    assert (shown["ms/token"], shown["seen ms"], shown["p95 ms"]) == ("2.0", "3.2", "7.5")
    status = ModelStatus(RECORD, snapshot).as_json()
    assert (status["expected_ms_per_token"], status["seen_ms_per_token"]) == (6.0, 13.5)
    unused = ModelStatus(RECORD, SwarmSnapshot(8, (server("a", 0, 8),))).as_json()
    assert (unused["expected_ms_per_token"], unused["seen_ms_per_token"]) == (5.0, None)


def test_strangers_cannot_steer_the_terminal() -> None:
    evil = server("evil", 0, 8, public_name="\x1b[2Jgone\n", version="\a1")
    assert "\x1b" not in "".join(describe_swarm(SwarmSnapshot(8, (evil,))))
    assert evil.public_name == "?[2Jgone "
    assert printable("a\x1b[2J\n\u202eä") == "a?[2J ?ä"
    assert ModelRecord(name="\x1bm", fingerprint="0123456789abcdef", num_blocks=8).name == "?m"
    assert ErrorHeader(code="x\r", message="\x1b[1m\nrun this").message == "?[1m run this"
    # Servers log whom they don't reach.
    named = Target(peer_id="\x1b[2J".ljust(50, "1"), addrs=("\x1b[2J",), token="t" * 32)
    assert (named.peer_id[:4], named.addrs) == ("?[2J", ("?[2J",))


def test_states_of_newer_servers() -> None:
    assert (state_name(ServerState.LEAVING), state_name(77)) == ("leaving", "state 77")


def test_json() -> None:
    status = ModelStatus(RECORD, SwarmSnapshot(8, (server("a", 0, 4), server("b", 4, 7))))
    said = json.loads(json.dumps(status.as_json()))
    assert (said["name"], said["num_blocks"]) == ("some/model", 8)
    assert said["missing_blocks"] == [7]
    assert said["expected_ms_per_token"] is None
    assert [(s["start"], s["end"], s["state"], s["throughput"]) for s in said["servers"]] == [
        (0, 4, "online", 100.0),
        (4, 7, "online", 100.0),
    ]


def test_json_of_a_complete_model() -> None:
    said = ModelStatus(RECORD, SwarmSnapshot(8, (server("a", 0, 8),))).as_json()
    assert (said["missing_blocks"], said["expected_ms_per_token"]) == ([], 5.0)


def test_the_text_names_the_model() -> None:
    text = ModelStatus(RECORD, SwarmSnapshot(8, (server("a", 0, 8),))).as_text()
    assert text.startswith("some/model (fingerprint 0123456789ab)\n")


async def test_all_models_or_one() -> None:
    other = ModelRecord(name="/models/other", fingerprint="f" * 16, num_blocks=2)
    directory = Directory({RECORD: [server("a", 0, 8)], other: [server("b", 0, 2), server("c", 1, 2)]})
    assert [status.record.name for status in await look_up(directory)] == ["/models/other", "some/model"]
    for name in ("/models/other", "other"):
        assert [len(status.snapshot.servers) for status in await look_up(directory, name)] == [2]
    with pytest.raises(MissingBlocksError, match="it serves /models/other, some/model"):
        await look_up(directory, "another")


async def test_a_server_that_answers_late_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_command, "SECOND_LOOK_S", 0)

    class Late(Directory):
        looks = 0

        async def servers(self, fingerprint: str) -> list[ServerInfo]:
            self.looks += 1
            return (await super().servers(fingerprint))[: self.looks]

    late = Late({RECORD: [server("a", 0, 4), server("b", 4, 8)]})
    (status,) = await look_twice(late)  # type: ignore[arg-type]
    assert (status.snapshot.missing_blocks(), late.looks) == ((), 2)
    (status,) = await look_twice(late)  # type: ignore[arg-type]
    assert late.looks == 3


async def test_a_swarm_without_models() -> None:
    assert await look_up(Directory({})) == []
    with pytest.raises(MissingBlocksError, match="it serves no model"):
        await look_up(Directory({}), "some/model")


def test_adapters_and_where_they_are_missing() -> None:
    snapshot = SwarmSnapshot(
        8, (server("a", 0, 5, adapters=("poet@1", "clerk@2")), server("b", 5, 8, adapters=("poet@1",)))
    )
    assert describe_adapters(snapshot) == ["adapter clerk@2: not on blocks 5:8", "adapter poet@1: complete"]


def test_a_directory_is_the_checkpoint_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(embedded_model_path()).parent)
    expected = fingerprint(open_checkpoint(str(embedded_model_path())))
    for model in (str(embedded_model_path()), "./embedded", "embedded"):
        assert is_on_this_machine(model)
        assert fingerprint_of_files(model) == expected
    assert not is_on_this_machine("owner/name")
    assert not is_on_this_machine("name-of-a-model")
    with pytest.raises(ConfigurationError, match=r"the directory '\./none' does not exist"):
        is_on_this_machine("./none")
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        fingerprint_of_files(str(tmp_path))


async def test_models_of_one_name_are_told_apart_by_files() -> None:
    other = RECORD.model_copy(update={"fingerprint": "fedcba9876543210"})
    directory = Directory({RECORD: [server("a", 0, 8)], other: [server("b", 0, 4)]})
    (found,) = await look_up(directory, "./model", other.fingerprint)
    assert found.record == other
    with pytest.raises(MissingBlocksError, match=r"serves the checkpoint in \./model \(fingerprint 0{12}\); it serves"):
        await look_up(directory, "./model", "0" * 16)

"""The log of a run: whose figures a summary believes."""

import json
from pathlib import Path
from typing import Any

from swarmllm.network.p2p.identity import Identity
from swarmllm.training.run_log import LOG_FILE, is_genuine_line, run_summary, signed_line


def member(peer_id: str, own: float | None, shared: float | None) -> dict[str, Any]:
    told = {"own_loss": own, "shared_loss": shared}
    return {"peer_id": peer_id, "name": peer_id[:1], "tokens": 10, "loss": 1.0, "share": 1.0, **told}


def write(directory: Path, home: Identity, *lines: dict[str, Any]) -> Path:
    path = directory / LOG_FILE
    fields = [{"run": "R", "tokens": 1, "sent_bytes": 5, "at": 1.0, **line} for line in lines]
    path.write_text("".join(json.dumps(signed_line(line, home)) + "\n" for line in fields))
    return path


def test_lines_are_signed() -> None:
    line = signed_line({"round": 3, "members": [{"tokens": 5}]}, Identity.generate())
    assert is_genuine_line(line)
    assert not is_genuine_line({**line, "round": 4})
    assert not is_genuine_line({**line, "by": Identity.generate().peer_id})


def test_the_own_measurement_of_shared_values_counts_and_contradicts_others(tmp_path: Path) -> None:
    home = Identity.generate()
    path = write(
        tmp_path,
        home,
        {"round": 0, "members": [member("liar", 0.1, 0.1), member(home.peer_id, 3.5, 4.0)]},
        {"round": 1, "members": [member("liar", 0.1, 3.0), member(home.peer_id, 2.5, 3.0)]},
        {"round": 2, "members": [], "shared_loss": 2.0},
    )
    found = run_summary(path)
    assert found.shared_losses == [(0, 4.0), (1, 3.0), (2, 2.0)]
    assert found.homes[home.peer_id].own_losses == [(0, 3.5), (1, 2.5)]
    assert found.homes["liar"].contradicted == 1
    assert found.homes[home.peer_id].contradicted == 0
    assert (found.round, found.homes_in_last_round, found.sent_bytes) == (1, 2, 5)


def test_a_home_that_does_not_measure_believes_the_median(tmp_path: Path) -> None:
    home = Identity.generate()
    claims = [member("a", 1.0, 3.0), member("b", None, 99.0), member("c", 2.0, 3.1), member(home.peer_id, None, None)]
    found = run_summary(write(tmp_path, home, {"round": 4, "members": claims}))
    assert found.shared_losses == [(4, 3.1)]
    assert not any(one.contradicted for one in found.homes.values())


def test_signed_nonsense_is_left_out(tmp_path: Path) -> None:
    found = run_summary(
        write(tmp_path, Identity.generate(), {"round": "x", "members": []}, {"round": 1, "members": [{}]})
    )
    assert found.wrong_lines == 2
    assert found.round is None

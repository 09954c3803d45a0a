"""The log of a run: signed lines, a line for each round. `members` writes them; `swarmllm runs` and pages read them.

A line is signed by the home that wrote it, and holds what the others signed. A line with a wrong signature is counted
and left out. At its end a home adds a line without members: its measurement of the last shared values.

    figure                 comes from
    tokens, loss           the claims of each home
    own loss               the claims of each home about its own values on the common texts
    shared loss            the home of this log; before it came or if it didn't measure, the median of all claims
"""

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from swarmllm.data_structures import PeerModel
from swarmllm.files import read_text
from swarmllm.network.p2p.identity import Identity, verify
from swarmllm.training.rounds import canonical

LOG_FILE = "rounds.jsonl"
"""The log of rounds in the directory of a home."""
DIFFERS_BY = 0.05
"""A claim about the shared values is counted if it differs by this share from this home's own measurement. Assumed:
homes whose servers round differently differ less."""

_LINE = b"swarmllm round 1\x00"


def signed_line(fields: dict[str, object], identity: Identity) -> dict[str, object]:
    """A line of the log, with the peer id and signature of the home that wrote it."""
    fields = {**fields, "by": identity.peer_id}
    return {**fields, "signature": identity.sign(_LINE + canonical(fields)).hex()}


def add_line(directory: Path, fields: dict[str, object], identity: Identity) -> None:
    """Write a line into the log of this home."""
    line = json.dumps(signed_line(fields, identity), separators=(",", ":"))
    with (directory / LOG_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def is_genuine_line(line: dict[str, object]) -> bool:
    """True if the peer that a line names has written all of it."""
    fields = {name: value for name, value in line.items() if name != "signature"}
    return verify(str(line.get("by")), bytes.fromhex(str(line.get("signature"))), _LINE + canonical(fields))


def logs_in(place: Path) -> list[Path]:
    """The logs in this directory, and up to three levels below it."""
    return sorted({path for depth in range(4) for path in place.glob("*/" * depth + LOG_FILE)})


class MemberOfRound(PeerModel):
    """A home in a line."""

    peer_id: str
    name: str = ""
    tokens: int = 0
    loss: float | None = None
    own_loss: float | None = None
    shared_loss: float | None = None
    share: float = 1.0


class RoundLine(PeerModel):
    """The fields of a line that are shown."""

    run: str
    by: str
    round: int
    members: tuple[MemberOfRound, ...]
    tokens: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    shared_loss: float | None = None
    at: float = 0.0

    def shared_claims(self) -> dict[str, float]:
        """Each home's loss of the shared values before this round."""
        return {one.peer_id: one.shared_loss for one in self.members if one.shared_loss is not None}


@dataclass
class HomeSummary:
    """A home in a run."""

    name: str
    rounds: int = 0
    tokens: int = 0
    shortened: int = 0
    """Rounds in which its difference was larger than the median."""
    contradicted: int = 0
    """Rounds in which it told another loss of the shared values than the home of this log has measured."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Round, and mean loss of its steps before it."""
    own_losses: list[tuple[int, float]] = field(default_factory=list)
    """Round, and loss of its own values on the common texts after its steps of that round."""


@dataclass(kw_only=True)
class RunSummary:
    """Sums and curves of one log."""

    directory: str
    run: str = ""
    """The run's public key."""
    by: str = ""
    """The home that wrote the log."""
    round: int | None = None
    homes_in_last_round: int = 0
    tokens: int = 0
    sent_bytes: int = 0
    """Differences and shared values that the home of this log has sent since it last began."""
    received_bytes: int = 0
    at: float | None = None
    """Time of the last round."""
    wrong_lines: int = 0
    homes: dict[str, HomeSummary] = field(default_factory=dict)
    shared_losses: list[tuple[int, float]] = field(default_factory=list)
    """Round, and loss of the shared values at its beginning on the common texts."""


def run_summary(path: Path) -> RunSummary:
    """Read a log."""
    found, shared = RunSummary(directory=str(path.parent)), dict[int, float]()
    for text in read_text(path).splitlines():
        line = _line(text)
        if line is None:
            found.wrong_lines += 1
            continue
        claims = line.shared_claims()
        measured = claims.get(line.by, line.shared_loss)
        if measured is not None or claims:
            shared[line.round] = statistics.median(claims.values()) if measured is None else measured
        for member in line.members:
            home = found.homes.setdefault(member.peer_id, HomeSummary(member.name))
            _add(home, member, line.round)
            if measured is not None and member.shared_loss is not None:
                home.contradicted += not math.isclose(member.shared_loss, measured, rel_tol=DIFFERS_BY)
        if line.members:
            found.run, found.by, found.round, found.at = line.run, line.by, line.round, line.at
            found.homes_in_last_round, found.tokens = len(line.members), line.tokens
            found.sent_bytes, found.received_bytes = line.sent_bytes, line.received_bytes
    found.shared_losses = sorted(shared.items())
    return found


def _line(text: str) -> RoundLine | None:
    """None: nobody has signed this line, or it is none."""
    try:
        line = json.loads(text)
        return RoundLine.model_validate_json(text) if is_genuine_line(line) else None
    except (ValueError, AttributeError, RecursionError):
        return None


def _add(home: HomeSummary, member: MemberOfRound, round_number: int) -> None:
    home.rounds += 1
    home.tokens += member.tokens
    home.shortened += member.share < 1
    if member.loss is not None:
        home.losses.append((round_number, member.loss))
    if member.own_loss is not None:
        home.own_losses.append((round_number, member.own_loss))

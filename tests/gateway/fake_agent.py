"""An agent that commands nobody: it shows what a test gives it, and notes what it was asked."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmllm.errors import ConfigurationError

KEY = "page-key-of-tests"
GB = 10**9


def two_machines() -> dict[str, Any]:
    """Two machines, one of them here."""
    return {
        "swarm": {"id": "s" * 52, "name": "attic’s machines", "open": True},
        "machines": [machine("desk", is_here=True, page="http://192.168.1.5:8080/"), machine("attic")],
        "models": [],
        "commands": [],
        "leaving": [],
    }


def machine(name: str, **more: Any) -> dict[str, Any]:
    return {
        "peer_id": name.ljust(52, "x"),
        "name": name,
        "is_here": False,
        "seen_s": 1.0,
        "memory_bytes": 16 * GB,
        "used_bytes": 0,
        "disk_left_bytes": 100 * GB,
        "page": "",
        "round_trip_ms": None,
        "hosted": [],
        **more,
    }


def hosted(model: str, start: int, end: int, state: str = "online", **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "start": start,
        "end": end,
        "quant_type": "q4_k",
        "state": state,
        "done_bytes": 0,
        "total_bytes": 0,
        "bytes_from_machines": 0,
        "bytes_from_hub": 0,
        "problem": "",
        **more,
    }


def served(name: str, num_blocks: int, state: str = "ready", **more: Any) -> dict[str, Any]:
    """A model of the picture."""
    return {
        "name": name,
        "manifest": "0" * 64,
        "num_blocks": num_blocks,
        "quant_type": "q4_k",
        "state": state,
        "missing_bytes": 0,
        "one_tokens_per_s": None,
        "hosts": [],
        "problem": "",
        **more,
    }


@dataclass
class FakeOffer:
    name: str
    manifest: str = "0" * 64
    ready: bool = True
    initial_peers: Sequence[str] = ()
    swarm_name: str | None = None
    place: str = ""


@dataclass
class FakeAgent:
    shown: dict[str, Any] = field(default_factory=two_machines)
    listed: list[dict[str, Any]] = field(default_factory=list)
    offers: list[FakeOffer] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    """Commands, previews and preparations, in their order."""
    num_listings: int = 0
    may_list: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_list.set()

    def picture(self) -> dict[str, Any]:
        return copy.deepcopy(self.shown)

    def offered(self) -> Sequence[FakeOffer]:
        return tuple(self.offers)

    def invite(self) -> str:
        return "swarm-invite-of-tests"

    async def prepare(self, name: str) -> str:
        self.asked.append(("prepare", name))
        return next(one.place for one in self.offers if one.name == name)

    async def catalogue(self) -> list[dict[str, Any]]:
        self.num_listings += 1
        await self.may_list.wait()
        return self.listed

    async def preview(self, model: str, add: bool) -> dict[str, Any]:
        self._check("preview", model, add)
        before = {one["name"]: one["hosts"] for one in self.shown["models"]}
        now = [{"peer_id": "d", "machine": "desk", "start": 0, "end": 24}]
        return {
            "model": model,
            "before": before,
            "after": {**(before if add else {}), model: now},
            "loaded_bytes": {"desk": 3 * GB},
            "quant_type": "q4_k",
            "one_tokens_per_s": 14.2,
            "all_tokens_per_s": 40.0,
            "missing_bytes": 0,
        }

    async def use(self, model: str, *, add: bool = False) -> dict[str, Any]:
        self._check("use", model, add)
        return self._note(f"{'add' if add else 'use'} {model}")

    async def drop(self, name: str) -> dict[str, Any]:
        self._check("drop", name)
        self.shown["models"] = [one for one in self.shown["models"] if one["name"] != name]
        return self._note(f"drop {name}")

    def _note(self, what: str) -> dict[str, Any]:
        number = len(self.shown["commands"]) + 1
        by = {"by": "desk", "peer_id": "d", "at": 1_790_000_000.0 + number}
        self.shown["commands"].append({"number": number, "what": what, **by})
        return {"number": number, "what": what}

    def _check(self, *asked: Any) -> None:
        self.asked.append(asked)
        if asked[1] == "no/such":
            raise ConfigurationError("no/such is not among the models of these machines: choose one of the list")

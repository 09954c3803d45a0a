"""A swarm of machines as people see it, as JSON: pages, `swarmllm use`, and plans that nobody has commanded yet.

The agent gives a `View`; nothing here changes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from swarmllm.data_structures import Span
from swarmllm.errors import ConfigurationError
from swarmllm.machines.catalogue import NEAR, Entry, Machines, answer
from swarmllm.machines.decisions import Facts, has_failed, links_of, machine_of, plan_models, present_plan, span_bytes
from swarmllm.machines.hosting import Hosting
from swarmllm.machines.membership import Membership
from swarmllm.machines.models import Model, SwarmModels, named_entry
from swarmllm.machines.records import Command, Hosted, MachineRecord, Wanted
from swarmllm.server.downloads import in_background
from swarmllm.swarm.planning import Plan, PlannedModel, loaded_bytes, missing_bytes

NUM_COMMANDS = 20
"""Newest commands that are shown."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A swarm as one machine sees it now."""

    facts: Facts
    """Records of all machines, this one's first."""
    swarm: Membership
    names: Mapping[str, str]
    """Names for people, by peer id."""
    seen_s: Mapping[str, float]
    """Seconds since a look has found the record of each other machine."""
    round_trips: Mapping[str, float]
    commands: Sequence[Command]
    models: SwarmModels
    plans: Mapping[str, Plan | None]
    hostings: Sequence[Hosting]
    """The servers of this machine."""

    @property
    def machines(self) -> Machines:
        """The machines for plans, as if nothing was served."""
        records = self.facts.records.values()
        number = f"{len(records)} machine{'' if len(records) == 1 else 's'}"
        machines = tuple(machine_of(one, one.memory_bytes) for one in records)
        return Machines(machines, self.names, links_of(records), NEAR, f"{number} of the swarm")


def picture(view: View) -> dict[str, Any]:
    """The machines, models and commands."""
    names = {one.manifest: one.name for command in view.commands for one in command.wanted}
    leaving: dict[str, int] = {}
    for hosting in view.hostings:
        if (manifest := hosting.target.manifest) in view.models.left:
            leaving[manifest] = max(leaving.get(manifest, 0), hosting.num_sessions or 0)
    return {
        "swarm": {"id": view.swarm.swarm_id, "name": view.swarm.name, "open": view.swarm.is_open},
        "machines": [_machine(view, record, names) for record in view.facts.records.values()],
        "models": [_model(view, manifest, one) for manifest, one in view.models.wanted.items()],
        "commands": [
            {
                "number": one.number,
                "what": one.what,
                "by": view.names.get(one.given_by, one.given_by[-8:]),
                "peer_id": one.given_by,
                "at": one.given_at,
            }
            for one in view.commands[-NUM_COMMANDS:]
        ],
        "leaving": [
            {"name": names.get(manifest, manifest[:8]), "sessions": sessions} for manifest, sessions in leaving.items()
        ],
    }


def _machine(view: View, record: MachineRecord, names: Mapping[str, str]) -> dict[str, Any]:
    peer_id = record.peer_id
    return {
        "peer_id": peer_id,
        "name": view.names[peer_id],
        "is_here": peer_id == view.facts.own,
        "seen_s": round(view.seen_s.get(peer_id, 0.0), 1),
        "memory_bytes": record.memory_bytes,
        "used_bytes": sum(_used_bytes(view, one) for one in record.hosted),
        "disk_left_bytes": record.disk_left_bytes,
        "kept_bytes": record.kept_bytes,
        "page": record.page,
        "round_trip_ms": view.round_trips.get(peer_id),
        "hosted": [
            {"model": names.get(one.manifest, one.manifest[:8]), **one.model_dump(exclude={"manifest"})}
            for one in record.hosted
        ],
    }


def _used_bytes(view: View, hosted: Hosted) -> int:
    """Memory of blocks that a machine holds, as far as this one knows their sizes."""
    model = view.models.get(hosted.manifest)
    sizes = None if model is None else model.sizes
    if sizes is None or hosted.quant_type not in sizes.block_bytes or hosted.state in ("waiting", "fetching", "failed"):
        return 0
    if not hosted.start < hosted.end <= sizes.num_blocks:
        return 0
    return span_bytes(sizes, hosted.quant_type, Span(hosted.start, hosted.end))


def _model(view: View, manifest: str, model: Model) -> dict[str, Any]:
    plan, sizes = view.plans.get(manifest), model.sizes
    state, missing = _state_of(view, manifest, model), 0
    if state == "does not fit" and sizes is not None:
        able = [one for one in view.facts.records.values() if not has_failed(one, manifest)]
        missing = missing_bytes([machine_of(one, one.memory_bytes) for one in able], sizes)
    problem = model.problem
    if not problem and state != "ready":
        said = ((peer_id, one) for peer_id, record in view.facts.records.items() for one in record.hosted)
        told = (
            f"{view.names[peer_id]}: {one.problem}" for peer_id, one in said if one.manifest == manifest and one.problem
        )
        problem = next(told, "")
    return {
        "name": model.wanted.name,
        "manifest": manifest,
        "num_blocks": sizes.num_blocks if sizes is not None else 0,
        "quant_type": plan.format if plan is not None else model.wanted.quant_type,
        "state": state,
        "missing_bytes": missing,
        "one_tokens_per_s": round(plan.one_tokens_per_s, 3) if plan is not None else None,
        "hosts": _hosts(plan, view.names),
        "problem": problem,
    }


def _state_of(view: View, manifest: str, model: Model) -> str:
    if model.sizes is None:
        return "incomplete" if model.problem else "planning"
    if model.is_online():
        return "ready"
    if manifest not in view.plans:
        return "planning"
    return "does not fit" if view.plans[manifest] is None else "loading"


async def catalogue(view: View, listed: Sequence[Entry]) -> list[dict[str, Any]]:
    """These models with their plan on the machines, as if nothing else was served."""
    where = view.machines
    answers = await in_background(lambda: [answer(one, where) for one in listed])
    return [{**one.as_json(where.names), "text": one.as_text(where.names)} for one in answers]


async def preview(view: View, model: str, add: bool) -> dict[str, Any]:
    """The plan before and after a command.

    Raises:
        SwarmError: the model can't be found or served.
    """
    name, entry = await in_background(partial(named_entry, model))
    if entry.sizes is None:
        raise ConfigurationError(f"{name} can't be served: {entry.problem}")
    facts = view.facts
    known = next((one.manifest for one in facts.wanted if one.name == name), "0" * 64)
    kept = tuple(one for one in facts.wanted if one.manifest != known) if add else ()
    wanted = (*kept, Wanted(name=name, manifest=known))
    after = replace(facts, wanted=wanted, sizes={**facts.sizes, known: entry.sizes})
    plans = await in_background(partial(plan_models, after))
    plan = plans[known]
    present = {one.manifest: present_plan(facts, one) for one in facts.wanted if one.manifest in facts.sizes}
    return {
        "model": name,
        "before": {one.name: _hosts(present.get(one.manifest), view.names) for one in facts.wanted},
        "after": {one.name: _hosts(plans.get(one.manifest), view.names) for one in wanted},
        "loaded_bytes": {} if plan is None else _loaded(present.get(known), plan, entry.sizes, view.names),
        "quant_type": plan and plan.format,
        "one_tokens_per_s": plan and round(plan.one_tokens_per_s, 3),
        "all_tokens_per_s": plan and round(plan.all_tokens_per_s, 3),
        "missing_bytes": 0 if plan is not None else missing_bytes(view.machines.machines, entry.sizes),
    }


def _hosts(plan: Plan | None, names: Mapping[str, str]) -> list[dict[str, Any]]:
    hosts = plan.hosts if plan is not None else ()
    return [
        {"peer_id": peer_id, "machine": names.get(peer_id, peer_id[-8:]), "start": span.start, "end": span.end}
        for peer_id, span in hosts
    ]


def _loaded(present: Plan | None, plan: Plan, sizes: PlannedModel, names: Mapping[str, str]) -> dict[str, int]:
    return {names.get(peer_id, peer_id[-8:]): count for peer_id, count in loaded_bytes(present, plan, sizes).items()}

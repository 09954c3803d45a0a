"""One machine in a process: the agent without pages. It takes orders as lines of JSON, and prints its picture.

    {"use": PLACE, "add": bool}   {"drop": NAME}   {"preview": PLACE}   {"invite": true}   {"prepare": NAME}

The argument holds the settings: {"state": PATH, "invite": WORD | null, "config": {…}}.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from swarmllm.command_line import run_command
from swarmllm.errors import SwarmError
from swarmllm.invite import read_invite
from swarmllm.machines.agent import Agent
from swarmllm.machines.settings import MachineConfig
from swarmllm.machines.state import StateDirectory


async def obey(agent: Agent, order: dict[str, Any]) -> Any:
    match order:
        case {"use": place, **rest}:
            return await agent.use(place, add=rest.get("add", False))
        case {"drop": name}:
            return await agent.drop(name)
        case {"preview": place}:
            return await agent.preview(place, False)
        case {"invite": _}:
            return agent.invite()
        case {"prepare": name}:
            return str(await agent.prepare(name))
        case {"offered": _}:
            return [{"name": one.name, "ready": one.ready, "peers": one.initial_peers, "swarm_name": one.swarm_name,
                     "place": str(one.place)} for one in agent.offered()]  # fmt: skip
    raise ValueError(order)


def say(kind: str, content: Any) -> None:
    print(json.dumps({kind: content}), flush=True)


async def show(agent: Agent) -> None:
    while True:
        agent.changed.clear()
        say("picture", agent.picture())
        await agent.changed.wait()


async def run() -> None:
    settings = json.loads(sys.argv[1])
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    agent = await Agent.start(
        MachineConfig(**settings["config"]),
        StateDirectory(Path(settings["state"])),
        invite=read_invite(settings["invite"]) if settings["invite"] else None,
    )
    tasks = [asyncio.create_task(agent.run()), asyncio.create_task(show(agent))]
    try:
        while line := await reader.readline():
            try:
                say("answer", await obey(agent, json.loads(line)))
            except SwarmError as error:
                say("error", str(error))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await agent.close()


if __name__ == "__main__":
    sys.exit(run_command(run))

"""Routes: how good and how quick the search is, and whether the client finds the fastest of real routes.

    python benchmarks/routes.py [--tokens 40]

First 1000 imagined servers of 80 blocks: the time of one search, and what its route costs in comparison with the exact
shortest path. Then real servers behind TCP proxies that delay by 20, 80 and 160 ms each way: every route is measured by
generating through it alone, then the client may choose; and a session that runs over the far server, when a near one
joins, moves.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import plots
import torch
import transformers
from common import Stopwatch, median, save_random_model, save_results, table

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm
from swarmllm.data_structures import ServerInfo, SwarmSnapshot
from swarmllm.swarm.route_costs import RouteCosts
from swarmllm.swarm.routing import find_route, route_cost_ms

sys.path.append(str(Path(__file__).parents[1] / "tests" / "swarm"))
from delay_proxies import DelayProxies

DELAYS_MS = (20.0, 80.0, 160.0)


def imagined_swarm(seed: int, num_servers: int, num_blocks: int, most: int) -> tuple[SwarmSnapshot, RouteCosts]:
    """Servers of 4 to `most` blocks at random places, with queues, some of whose distances are known."""
    generator = random.Random(seed)
    names = [f"s{index}".ljust(46, "x") for index in range(num_servers)]
    servers = []
    for name in names:
        length = generator.randint(4, most)
        start = generator.randint(0, num_blocks - length)
        servers.append(
            ServerInfo(
                peer_id=name,
                start=start,
                end=start + length,
                decode_ms_per_block=generator.uniform(0.3, 6),
                queue_ms=generator.choice([0.0, 0.0, 5.0, 40.0]),
                round_trips=tuple((generator.choice(names), generator.uniform(1, 200)) for _ in range(8)),
            )
        )
    known = {name: generator.uniform(2, 250) for name in names[::2]}
    return SwarmSnapshot(num_blocks, tuple(servers)), RouteCosts(round_trips_ms=known)


def search(num_servers: int = 1000, num_blocks: int = 80) -> list[dict[str, Any]]:
    results = []
    for most in (20, 80):
        times_ms, ratios = [], []
        for seed in range(10):
            snapshot, costs = imagined_swarm(seed, num_servers, num_blocks, most)
            began_at = time.process_time()
            route = find_route(snapshot, costs=costs)
            times_ms.append((time.process_time() - began_at) * 1e3)
            exact = find_route(snapshot, costs=costs, beam_width=num_servers)
            ratios.append(route_cost_ms(route, costs) / route_cost_ms(exact, costs))
        results.append(
            {
                "servers": num_servers,
                "blocks": num_blocks,
                "blocks per server": f"4 to {most}",
                "CPU ms, median": median(times_ms),
                "CPU ms, most": max(times_ms),
                "cost / optimum, most": max(ratios),
            }
        )
    return results


def ms_per_token(model: Any, num_tokens: int) -> float:
    """Milliseconds per token of decoding, without the first token."""
    watch = Stopwatch()
    ids = torch.randint(3, 4000, (1, 8), generator=torch.Generator().manual_seed(0))
    model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, streamer=watch)
    return 1e3 / watch.tokens_per_s


def real_routes(num_tokens: int) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory, DelayProxies() as proxies:
        path = save_random_model("512x8", Path(directory))
        options = {"quant_type": "none", "num_threads": 1}
        with LocalSwarm(path, spans=[(0, 8)], **options, **proxies.in_front_of_new_server(DELAYS_MS[-1])) as swarm:

            def client(**settings: Any) -> Any:
                settings = {"ping_period_s": 0.5, "update_period_s": 0.5, "speculation": "off", **settings}
                config = ClientConfig(**settings)
                return AutoDistributedModel.from_pretrained(
                    str(path), initial_peers=swarm.initial_peers, client_config=config
                )

            with client() as model:
                far_ms = ms_per_token(model, num_tokens)
                with model.inference_session(max_length=4096) as session, torch.inference_mode():
                    ids = torch.randint(3, 4000, (1, 8))
                    session.step(model.embed(ids))
                    swarm.add_server((0, 8), **proxies.in_front_of_new_server(DELAYS_MS[1]))
                    began_at, steps = time.perf_counter(), 0
                    while session.route[0].server.peer_id == swarm.servers[0].peer_id:
                        session.step(model.embed(ids[:, :1]))
                        steps += 1
                    moved_s = time.perf_counter() - began_at
            swarm.add_server((0, 4), **proxies.in_front_of_new_server(DELAYS_MS[0]))
            swarm.add_server((4, 8), **proxies.in_front_of_new_server(DELAYS_MS[0]))
            by_servers = {
                f"one server, {DELAYS_MS[2]:.0f} ms": swarm.servers[:1],
                f"one server, {DELAYS_MS[1]:.0f} ms": swarm.servers[1:2],
                f"two servers, {DELAYS_MS[0]:.0f} ms": swarm.servers[2:],
            }
            for name, servers in by_servers.items():
                with client(allowed_servers=tuple(server.peer_id for server in servers)) as model:
                    results.append({"route": name, "ms per token": ms_per_token(model, num_tokens)})
            with client() as model:
                chosen_ms = ms_per_token(model, num_tokens)
                route = model.swarm.route()
                results.append({"route": f"chosen by the client: {len(route)} servers", "ms per token": chosen_ms})
                print(route, "\n")
    results.append({"route": f"before a better server joined ({DELAYS_MS[2]:.0f} ms)", "ms per token": far_ms})
    print(f"moved to the server that joined {moved_s:.1f} s after it was online ({steps} steps)\n")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    for name, rows in (("search", search()), ("real", real_routes(args.tokens))):
        results[name] = rows
        print(table(list(rows[0]), [list(row.values()) for row in rows]), "\n")
    print(f"written to {save_results('routes', results)}")
    plots.bars("routes", "ms per token", {row["route"]: row["ms per token"] for row in results["real"]})


if __name__ == "__main__":
    main()

"""Generation by several clients while random servers are killed and replaced every few seconds.

    python benchmarks/chaos.py [--minutes 2] [--clients 3] [--kill_every_s 4]

Every client generates the same stories again and again and compares each token with the local model. Counts wrong
tokens, errors and hung clients, and measures how long a repair keeps a client waiting: the longest time between two
tokens of a generation in which a server died, less the usual time between tokens.
"""

import argparse
import random
import statistics
import threading
import time
from dataclasses import dataclass, field

import torch
import transformers
from common import Stopwatch, save_results, table
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm, SwarmError, embedded_model_path

PROMPT_TOKENS = 512
NEW_TOKENS = 48
HANG_S = 120.0
"""A generation that takes longer counts as hung."""


@dataclass
class Tally:
    """What one client saw."""

    generations: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    repairs_s: list[float] = field(default_factory=list)
    last_sign: float = field(default_factory=time.monotonic)


def client(peers: list[str], ids: torch.Tensor, expected: torch.Tensor, stop: threading.Event, tally: Tally) -> None:
    """Generate until told to stop."""
    config = ClientConfig(initial_peers=tuple(peers), update_period_s=5)
    with AutoDistributedModel.from_pretrained(embedded_model_path(), client_config=config, dtype="float32") as model:
        while not stop.is_set():
            watch = Stopwatch()
            tally.last_sign = time.monotonic()
            try:
                with model.inference_session(max_length=PROMPT_TOKENS + NEW_TOKENS) as session:
                    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
                    tokens = model.generate(ids, streamer=watch, **options)
                    repairs = session.num_repairs
            except SwarmError as error:
                tally.errors.append(f"{type(error).__name__}: {error}")
                continue
            tally.generations += 1
            tally.wrong += int(not torch.equal(tokens, expected))
            gaps = [after - before for before, after in zip(watch.times, watch.times[1:], strict=False)]
            if repairs and gaps:
                tally.repairs_s.append(max(gaps) - statistics.median(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--kill_every_s", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    random_ = random.Random(args.seed)
    path = embedded_model_path()
    local = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = AutoTokenizer.from_pretrained(path)("Once upon a time there was a little fox. " * 80, return_tensors="pt")
    ids = text.input_ids[:, :PROMPT_TOKENS]
    expected = local.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    half = local.config.num_hidden_layers // 2
    spans = [(0, half), (half, 2 * half)]
    stop, kills = threading.Event(), 0
    options = {"quant_type": "none", "dtype": "float32", "num_threads": 1, "update_period": 5}
    # Two servers for each half; the first one is never killed, so that newcomers have somebody to join.
    with LocalSwarm(path, spans=[*spans, *spans], **options) as swarm:
        tallies = [Tally() for _ in range(args.clients)]
        threads = [
            threading.Thread(target=client, args=(swarm.initial_peers, ids, expected, stop, tally)) for tally in tallies
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end:
            time.sleep(args.kill_every_s * random_.uniform(0.5, 1.5))
            victim = random_.choice([server for server in swarm.servers[1:] if server.alive])
            span = victim.span
            victim.kill()
            kills += 1
            if span is not None:
                swarm.add_server((span.start, span.end))
        stop.set()
        for thread in threads:
            thread.join(HANG_S)
        hung = sum(thread.is_alive() for thread in threads)
    repairs = sorted(repair for tally in tallies for repair in tally.repairs_s)
    result = {
        "kills": kills,
        "generations": sum(tally.generations for tally in tallies),
        "wrong generations": sum(tally.wrong for tally in tallies),
        "errors": sum(len(tally.errors) for tally in tallies),
        "hung clients": hung,
        "clients that never generated": sum(not tally.generations for tally in tallies),
        "repairs": len(repairs),
        "repair p50 s": repairs[len(repairs) // 2] if repairs else 0.0,
        "repair p95 s": repairs[int(len(repairs) * 0.95)] if repairs else 0.0,
    }
    print(table(list(result), [list(result.values())]))
    for message in sorted({error for tally in tallies for error in tally.errors}):
        print("error:", message)
    print(f"written to {save_results('chaos', result)}")


if __name__ == "__main__":
    main()

"""Where the inputs for rebuilding a lost cache should come from: the predecessor's copy, or the client's.

    python benchmarks/repair.py [--shape 512x8] [--tokens 512]

The last of four servers is given up by the client in the middle of a session, again and again. Either only its cache
is rebuilt, from what the third server has kept of its outputs; or, as if only the client had kept anything, all caches
are, from the inputs of the first block. The two alternate in one run; medians.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from common import median, save_random_model, save_results, table

from swarmllm import AutoDistributedModel, LocalSwarm


def repair_s(session: Any, hidden: torch.Tensor, num_lost: int) -> float:
    """Seconds of a decode step that finds the last `num_lost` servers' sessions gone."""
    for hop in session.chains[0]._hops[-num_lost:]:
        hop.lost = True
    started = time.perf_counter()
    session.step(hidden)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="512x8")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        path = save_random_model(args.shape, Path(directory))
        with (
            LocalSwarm(path, num_servers=4, quant_type="none", num_threads=1) as swarm,
            AutoDistributedModel.from_pretrained(str(path), initial_peers=swarm.initial_peers) as model,
            torch.inference_mode(),
            model.inference_session(max_length=args.tokens + 4 * args.repeats + 8) as session,
        ):
            ids = torch.randint(3, 4000, (1, args.tokens))
            session.step(model.embed(ids))
            hidden = model.embed(ids[:, :1])
            times: dict[str, list[float]] = {"predecessor's copy": [], "client's copy": []}
            for _ in range(args.repeats):
                times["predecessor's copy"].append(repair_s(session, hidden, 1))
                times["client's copy"].append(repair_s(session, hidden, 4))
            kept_bytes = hidden.nbytes
    result = {name: median(values) for name, values in times.items()}
    result["ratio"] = result["predecessor's copy"] / result["client's copy"]
    result["bytes kept per token and server"] = kept_bytes
    print(table(["", args.shape], [[name, value] for name, value in result.items()]))
    print(f"written to {save_results('repair', result)}")


if __name__ == "__main__":
    main()

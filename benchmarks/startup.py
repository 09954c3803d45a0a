"""How long people wait before the first token, and what a server costs: on the embedded model, medians of some runs.

python benchmarks/startup.py [--repeats 3]
"""

import argparse
import statistics
import subprocess
import sys
import time

import psutil
from common import save_results, table

from swarmllm import LocalSwarm, embedded_model_path

CLIENT = """
import sys, time
started = time.perf_counter()
import torch
torch.set_num_threads(1)
from transformers import AutoTokenizer
from swarmllm import AutoDistributedModel
imported = time.perf_counter()
path, peers = sys.argv[1], sys.argv[2:]
with AutoDistributedModel.from_pretrained(path, initial_peers=peers) as model:
    connected = time.perf_counter()
    ids = AutoTokenizer.from_pretrained(path)("Once upon a time", return_tensors="pt").input_ids
    model.generate(ids, max_new_tokens=1)
    print(imported - started, connected - imported, time.perf_counter() - connected)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    path = embedded_model_path()
    runs: list[dict[str, float]] = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        with LocalSwarm(path, spans=[(0, 8)], quant_type="none", num_threads=1) as swarm:
            online_s = time.perf_counter() - started
            command = [sys.executable, "-c", CLIENT, path, *swarm.initial_peers]
            started = time.perf_counter()
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            imports_s, connect_s, first_s = map(float, output.split())
            server = psutil.Process(swarm.servers[0].pid)
            family = [server, *server.children(recursive=True)]
            runs.append(
                {
                    "server command to ONLINE, s": online_s,
                    "client: imports, s": imports_s,
                    "connect, s": connect_s,
                    "first token, s": first_s,
                    "whole client process, s": time.perf_counter() - started,
                    "server processes": len(family),
                    "server memory (PSS), MiB": sum(process.memory_full_info().pss for process in family) / 2**20,
                }
            )
    imports = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import swarmllm"], check=True)
        imports.append(time.perf_counter() - started)
    result = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    result["import swarmllm, whole process, s"] = statistics.median(imports)
    print(table(["", "median"], [[name, value] for name, value in result.items()]))
    print(f"written to {save_results('startup', result)}")


if __name__ == "__main__":
    main()

"""Speculation over slow links: tokens per second with and without, alternating on the same swarm.

    python benchmarks/speculation.py [--servers 4] [--delay_ms 50 0] [--tokens 100] [--repeats 1]

Texts of the embedded model in fp32: its own greedy list copies, a prescribed code rename (what a larger model would
write: a logits processor chooses the tokens, everything else runs as always), and sampling at a temperature at which
nothing can be foreseen. Beside the floor of plain decoding: (servers + 1) ways, the local model's own time and bytes
over bandwidth. With `--delay_ms 0` it shows that "auto" costs nothing where it doesn't pay. Writes
results/speculation.json.
"""

import argparse
import math
from typing import Any

import plots
import torch
import transformers
from common import Stopwatch, median, save_results, table
from delay_proxy import SlowNetwork
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from swarmllm import AutoDistributedModel, ClientConfig, embedded_model_path

ITEMS = ["pencil", "drum", "lantern", "puzzle", "lamp", "shell", "clock"]
LIST_COPY = (
    "List:\n"
    + "".join(f"{number}. {item}\n" for number, item in enumerate(ITEMS, 1))
    + "The same list with mirror instead of pencil:\n"
)
CODE = """class Box:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def scaled(self, factor):
        return Box(self.width * factor, self.height * factor)
"""
CODE_RENAME = f"Code:\n{CODE}\nThe same with breadth instead of width:\n"
MESSAGE_BYTES = 500
"""Assumed: of headers and frames per hop."""


class Prescribed(LogitsProcessor):
    """Makes the next token of a given text the likeliest."""

    def __init__(self, prompt_tokens: int, tokens: list[int]) -> None:
        self._start, self._tokens = prompt_tokens, tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        index = input_ids.shape[1] - self._start
        scores[:, self._tokens[index % len(self._tokens)]] = math.inf
        return scores


def texts(tokenizer: Any, num_tokens: int) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """Name → (prompt, options of generate())."""

    def ids(text: str) -> Tensor:
        return tokenizer(text, return_tensors="pt").input_ids

    renamed = tokenizer(CODE.replace("width", "breadth"), add_special_tokens=False).input_ids
    code = ids(CODE_RENAME)
    length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    prescribed = LogitsProcessorList([Prescribed(code.shape[1], renamed)])
    return {
        "list copies, greedy": (ids(LIST_COPY), {**length, "do_sample": False}),
        "code rename, prescribed": (
            code,
            {"max_new_tokens": min(num_tokens, len(renamed)), "do_sample": False, "logits_processor": prescribed},
        ),
        "unpredictable, sampled": (ids("The"), {**length, "do_sample": True, "temperature": 3.0, "top_k": 0}),
    }


def timed(model: Any, prompt: Tensor, options: dict[str, Any]) -> tuple[float, list[int]]:
    """Seconds per token after the first, and the tokens."""
    torch.manual_seed(0)
    watch = Stopwatch()
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=watch, **options)
    return 1 / watch.tokens_per_s, output[0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--delay_ms", type=float, nargs="+", default=[50.0, 0.0], help="one way")
    parser.add_argument("--mbit_s", type=float, default=100.0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--speculation", default="auto", help="compared with off")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    path = embedded_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    local = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    hidden_bytes = local.config.hidden_size * 4 + MESSAGE_BYTES
    rows, results = [], []
    options = {"dtype": "float32", "quant_type": "none", "num_threads": 1}
    with SlowNetwork() as network, network.swarm(path, num_servers=args.servers, **options) as swarm:
        for delay_ms in args.delay_ms:
            network.set(delay_ms=delay_ms, mbit_s=args.mbit_s)
            clients = [
                AutoDistributedModel.from_pretrained(
                    path,
                    initial_peers=swarm.initial_peers,
                    client_config=ClientConfig(speculation=mode),
                    dtype="float32",
                    progress=False,
                )
                for mode in ("off", args.speculation)
            ]
            for client in clients:  # whoever has generated before knows the swarm's pace
                timed(client, torch.tensor([[1, 5, 9]]), {"max_new_tokens": 6, "min_new_tokens": 6})
            for name, (prompt, choices) in texts(tokenizer, args.tokens).items():
                runs: dict[str, list[float]] = {"local": [], "plain": [], "ahead": []}
                same = True
                for _ in range(args.repeats):
                    here_s, expected = timed(local, prompt, choices)
                    (plain_s, plain), (ahead_s, ahead) = (timed(client, prompt, choices) for client in clients)
                    same = same and plain == ahead == expected
                    for kind, seconds in zip(runs, (here_s, plain_s, ahead_s), strict=True):
                        runs[kind].append(seconds)
                here_s, plain_s, ahead_s = (median(values) for values in runs.values())
                transfer_s = (args.servers + 1) * hidden_bytes * 8 / (args.mbit_s * 1e6)
                floor_s = (args.servers + 1) * delay_ms / 1e3 + here_s + transfer_s
                gain = median(p / a for p, a in zip(runs["plain"], runs["ahead"], strict=True))
                rows.append(
                    [
                        delay_ms,
                        name,
                        floor_s * 1e3,
                        plain_s * 1e3,
                        plain_s / floor_s,
                        1 / plain_s,
                        1 / ahead_s,
                        gain,
                        same,
                    ]
                )
                results.append(
                    {"delay_ms": delay_ms, "text": name, "floor_s": floor_s, **runs, "gain": gain, "same_tokens": same}
                )
                print(f"{delay_ms:g} ms, {name}: {gain:.2f}", flush=True)
            for client in clients:
                client.close()
    header = ["one way ms", "text", "floor ms/token", "plain ms/token", "plain to floor", "plain tokens/s"]
    print(table([*header, f"{args.speculation} tokens/s", "gain", "same tokens"], rows))
    print(f"written to {save_results('speculation', vars(args) | {'rows': results})}")
    plots.bars(
        "speculation",
        f"tokens/s with speculation ({args.speculation}), relative to without",
        {f"{result['delay_ms']:g} ms, {result['text']}": result["gain"] for result in results},
    )


if __name__ == "__main__":
    main()

"""Speculation over slow links: tokens per second with and without, alternating on the same swarm.

    python benchmarks/speculation.py [--servers 4] [--delay_ms 50 0] [--tokens 100] [--repeats 1]
        [--speculation auto ngram mtp MODEL]

Texts of the embedded model in fp32: new stories, which repeat nothing, its own greedy list copies, a prescribed code
rename (what a larger model would write: a logits processor chooses the tokens, everything else runs as always), and
sampling at a temperature at which nothing can be foreseen. "itself" in place of a model is the embedded model as its
own small model: all guesses are right, at the price of all blocks on the client.

Beside the floor of plain decoding: (servers + 1) ways, the local model's own time and bytes
over bandwidth. With `--delay_ms 0` it shows that "auto" costs nothing where it doesn't pay. Writes
results/speculation.json.
"""

import argparse
import itertools
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

STORIES = ("Once upon a time", "One morning, Mia", "Once upon a time, there was a clever owl")
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
    stories = {
        f"story {number}, {'greedy' if greedy else 'sampled'}": (
            ids(begin),
            {**length, "do_sample": not greedy, **({} if greedy else {"temperature": 1.0, "top_k": 0})},
        )
        for (number, begin), greedy in itertools.product(enumerate(STORIES, 1), (True, False))
    }
    return {
        **stories,
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
    parser.add_argument("--speculation", nargs="+", default=["auto"], help="compared with off, one after the other")
    parser.add_argument("--only", default="", help="texts whose names begin so")
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
            modes = ["off", *(path if mode == "itself" else mode for mode in args.speculation)]
            clients = [
                AutoDistributedModel.from_pretrained(
                    path,
                    initial_peers=swarm.initial_peers,
                    client_config=ClientConfig(speculation=mode),
                    dtype="float32",
                    progress=False,
                )
                for mode in modes
            ]
            for client in clients:  # whoever has generated before knows the swarm's pace
                timed(client, torch.tensor([[1, 5, 9]]), {"max_new_tokens": 6, "min_new_tokens": 6})
            for name, (prompt, choices) in texts(tokenizer, args.tokens).items():
                if not name.startswith(args.only):
                    continue
                here: list[float] = []
                runs: list[list[float]] = [[] for _ in clients]
                same = [True] * len(clients)
                for _ in range(args.repeats):
                    here_s, expected = timed(local, prompt, choices)
                    here.append(here_s)
                    for place, client in enumerate(clients):
                        seconds, tokens = timed(client, prompt, choices)
                        runs[place].append(seconds)
                        same[place] = same[place] and tokens == expected
                transfer_s = (args.servers + 1) * hidden_bytes * 8 / (args.mbit_s * 1e6)
                floor_s = (args.servers + 1) * delay_ms / 1e3 + median(here) + transfer_s
                plain_s = median(runs[0])
                for mode, ahead, right in zip(args.speculation, runs[1:], same[1:], strict=True):
                    gain = median(plain / fast for plain, fast in zip(runs[0], ahead, strict=True))
                    shown = [delay_ms, name, mode, floor_s * 1e3, plain_s * 1e3, plain_s / floor_s]
                    rows.append([*shown, 1 / plain_s, 1 / median(ahead), gain, right and same[0]])
                    found = {"delay_ms": delay_ms, "text": name, "mode": mode, "floor_s": floor_s, "gain": gain}
                    results.append(found | {"local": here, "plain": runs[0], "ahead": ahead, "same_tokens": right})
                    print(f"{delay_ms:g} ms, {name}, {mode}: {gain:.2f}", flush=True)
            for client in clients:
                client.close()
    header = ["one way ms", "text", "guesses", "floor ms/token", "plain ms/token", "plain to floor", "plain tokens/s"]
    print(table([*header, "ahead tokens/s", "gain", "same tokens"], rows))
    print(f"written to {save_results('speculation', vars(args) | {'rows': results})}")
    plots.bars(
        "speculation",
        "tokens/s with speculation, relative to without",
        {f"{result['delay_ms']:g} ms, {result['text']}, {result['mode']}": result["gain"] for result in results},
    )


if __name__ == "__main__":
    main()

"""Servers and clients in processes of their own beside transformers on the same GPU, end to end.

    python benchmarks/gpu_serving.py [--quant_types none int8 nf4] [--only first_token prompt_parts profile]
                                     [--device cpu] [--limit_s 240]

16 blocks of a 7B Llama with random weights in bf16, one server for each kind of weights; clients' own parts are on the
same GPU. decode: a text of 64 tokens after 128. first_token: after prompts of 512 and 2048. step: one token in parts.
prompt_parts: such prompts in chunks of several sizes; of the last chunk, the queue and the computing. clients:
inference sessions with a thread each, six processes, that send one hidden state after the other; beside one batch of
`generate()`; in one case their contexts are 17 to 4000 long. batches: forward, backward of 8 x 128 hidden states.
tuning: a step of prompt tuning and of LoRA, 4 x 64 tokens. same_tokens: texts that are equal to local ones. profile:
samples (`sampling.py`) of a client and a server. `--device cpu` measures a tiny model. After the limit no further
figure begins. Prints a table, writes results/gpu_serving.json after each figure.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from common import median, save_random_model, save_results, table, timed_generation
from concurrency import Clients, measure
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from sampling import Sampler
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarmllm import AutoDistributedModel, ClientConfig, LocalSwarm, SwarmError
from swarmllm.models.quantization import QUANT_TYPES

STEP_TIMEOUT_S = 30.0
ROOM_TOKENS = 1024
LOCAL = "transformers"
PARTS = (
    "decode",
    "first_token",
    "step",
    "prompt_parts",
    "batches",
    "same_tokens",
    "tuning",
    "clients",
    "profile",
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    shape: str
    context: int
    """Tokens before the decoded text."""
    new_tokens: int
    prompts: tuple[int, ...]
    """Lengths of prompts whose first token is timed."""
    chunks: tuple[int, ...]
    """Tokens in each message of a prompt."""
    clients: tuple[int, ...]
    unequal: tuple[int, ...]
    """Contexts of clients at once."""
    batch: tuple[int, int]
    tuned: tuple[int, int]
    seconds: float
    processes: int
    repeats: int


SIZES = {
    "cuda": Sizes(
        shape="4096x16",
        context=128,
        new_tokens=64,
        prompts=(512, 2048),
        chunks=(128, 512, 2048),
        clients=(1, 8, 32),
        unequal=(17, 100, 333, 700, 1200, 2000, 3000, 4000),
        batch=(8, 128),
        tuned=(4, 64),
        seconds=1.5,
        processes=6,
        repeats=5,
    ),
    "cpu": Sizes(
        shape="64x8",
        context=16,
        new_tokens=6,
        prompts=(32, 64),
        chunks=(16, 64),
        clients=(1, 2),
        unequal=(3, 40),
        batch=(2, 16),
        tuned=(2, 8),
        seconds=0.3,
        processes=2,
        repeats=2,
    ),
}


class Figures:
    """Results by column (`transformers`, or a kind of weights) and name. Written after each; left out after the
    limit."""

    def __init__(self, columns: Sequence[str], only: Sequence[str], limit_s: float) -> None:
        self.only = only
        self.values: dict[str, dict[str, Any]] = {column: {} for column in columns}
        self.profiles: dict[str, str] = {}
        self._ends_at = time.monotonic() + limit_s

    def add(self, part: str, column: str, name: str, measured: Callable[..., Any], *args: Any) -> None:
        """Replace the figure by the error if one fails, and go on with the next."""
        if part not in self.only:
            return
        started = time.monotonic()
        if started > self._ends_at:
            value: Any = "no time"
        else:
            try:
                value = measured(*args)
            except (SwarmError, RuntimeError, ValueError, EOFError) as error:
                value = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        self.values[column] |= value if isinstance(value, dict) else {name: value}
        print(f"{column}: {name}: {value} ({time.monotonic() - started:.1f} s)", flush=True)
        self.save()

    def save(self) -> None:
        save_results("gpu_serving", {"figures": self.values, "profiles": self.profiles, "table": str(self)})

    def __str__(self) -> str:
        names = dict.fromkeys(name for column in self.values.values() for name in column)
        rows = [[name, *(column.get(name, "") for column in self.values.values())] for name in names]
        return table(["", *self.values], rows)


class Side:
    """Figures that transformers' model and a swarm's have in common."""

    def __init__(self, model: Any, sizes: Sizes) -> None:
        self.model, self.sizes, self.device = model, sizes, model.device
        random = torch.Generator().manual_seed(3)
        hidden = torch.randn(*sizes.batch, model.config.hidden_size, generator=random)
        self.hidden = hidden.to(self.device, model.dtype)
        self.ids = torch.randint(3, 4000, sizes.tuned, generator=random).to(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(2 + self.sizes.repeats):
            self.wait()
            started = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - started)
        return median(times[2:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def decode(self) -> float:
        """Tokens per second; the first text is a warm-up."""
        runs = [timed_generation(self.model, self.sizes.context, self.sizes.new_tokens) for _ in range(4)]
        return median(run.tokens_per_s for run in runs[1:])

    def first_token(self, prompt: int) -> float:
        """Milliseconds."""
        runs = [timed_generation(self.model, prompt, 1) for _ in range(4)]
        return 1e3 * median(run.first_token_s for run in runs[1:])

    def text(self, seed: int) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 4000, (1, self.sizes.context), generator=random).to(self.device)
        number = self.sizes.new_tokens
        return self.model.generate(ids, max_new_tokens=number, min_new_tokens=number, do_sample=False).cpu()

    def run_blocks(self, hidden: Tensor) -> Tensor:
        if hasattr(self.model, "remote_blocks"):
            return self.model.remote_blocks(hidden)
        return self.model.base_model(inputs_embeds=hidden, use_cache=False).last_hidden_state

    @torch.no_grad()
    def forward(self) -> None:
        self.run_blocks(self.hidden)

    def backward(self) -> None:
        self.run_blocks(self.hidden.clone().requires_grad_()).float().sum().backward()

    def batches(self) -> dict[str, float]:
        tokens = self.hidden[..., 0].numel()
        return {
            "forward, tokens/s": tokens / self.seconds(self.forward),
            "forward and backward, tokens/s": tokens / self.seconds(self.backward),
        }

    def tuning_step(self, config: Any) -> float:
        """Milliseconds of a forward and backward of this adapter."""
        adapted = get_peft_model(self.model.requires_grad_(False), config)

        def step() -> None:
            adapted.zero_grad()
            adapted(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()

        return 1e3 * self.seconds(step)


def prompt_tuning() -> PromptTuningConfig:
    return PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8)


def lora() -> LoraConfig:
    return LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])


def one_batch(model: Any, sizes: Sizes, rows: int) -> float:
    """Tokens per second of all rows of one batch of `generate()`, without its prompt."""

    def seconds(new_tokens: int) -> float:
        ids = torch.randint(3, 4000, (rows, sizes.context)).to(model.device)
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False).cpu()
        return time.perf_counter() - started

    seconds(2)
    return rows * sizes.new_tokens / (seconds(1 + sizes.new_tokens) - seconds(1))


def step_in_parts(model: Any, sizes: Sizes) -> dict[str, float]:
    """Milliseconds of one token: in the client's own parts, on the way, in the server's queue, computing."""
    ids = torch.randint(3, 4000, (1, sizes.context)).to(model.device)
    rows = []
    with torch.inference_mode(), model.inference_session(max_length=sizes.context + sizes.new_tokens) as session:
        session.step(model.embed(ids))
        for _ in range(sizes.new_tokens):
            started = time.perf_counter()
            embedded = model.embed(ids[:, :1])
            sent = time.perf_counter()
            outputs = session.step(embedded)
            received = time.perf_counter()
            model.head(outputs)[:, -1].argmax(-1).item()
            ended = time.perf_counter()
            queue, compute = (sum(times[idx] for times in session.timings) / 1e6 for idx in (1, 2))
            away = received - sent
            rows.append((ended - started, ended - started - away, away - queue - compute, queue, compute))
    names = ("step, ms", "- client", "- wire", "- queue", "- compute")
    return {name: 1e3 * median(row[idx] for row in rows) for idx, name in enumerate(names)}


def prompt_in_parts(path: Path, swarm: LocalSwarm, device: str, sizes: Sizes) -> dict[str, str]:
    """Milliseconds of prompts: until all hidden states are back, and of the last message in the queue and computing."""
    found = {}
    for chunk in sizes.chunks:
        with (
            connected(path, swarm, device, prefill_chunk_tokens=chunk, max_batch_tokens=chunk) as model,
            torch.inference_mode(),
        ):
            for prompt in sizes.prompts:
                rows = [timed_prompt(model, prompt) for _ in range(1 + sizes.repeats)][1:]
                figures = [1e3 * median(row[idx] for row in rows) for idx in range(3)]
                name = f"prompt of {prompt} in chunks of {chunk}, ms: all, queue, compute"
                found[name] = ", ".join(f"{ms:.1f}" for ms in figures)
    return found


def timed_prompt(model: Any, prompt: int) -> tuple[float, float, float]:
    with model.inference_session(max_length=prompt + 1) as session:
        session.step(model.embed(torch.randint(3, 4000, (1, 1)).to(model.device)))  # opens it
        session.position = 0
        hidden = model.embed(torch.randint(3, 4000, (1, prompt)).to(model.device)).cpu()
        started = time.perf_counter()
        session.step(hidden)
        elapsed_s = time.perf_counter() - started
        _, queue_us, compute_us = session.timings[-1]
        return elapsed_s, queue_us / 1e6, compute_us / 1e6


def same_tokens(side: Side, texts: Sequence[Tensor]) -> str:
    """Texts that are equal to transformers', and how many tokens of the others are."""
    found = [side.text(seed)[0] == text[0] for seed, text in enumerate(texts)]
    equal = [int(same.cumprod(0).sum()) - side.sizes.context for same in found]
    return f"{sum(number == side.sizes.new_tokens for number in equal)} of {len(texts)} ({equal} tokens)"


def of_clients(processes: Sequence[Clients], contexts: Sequence[int], seconds: float) -> float:
    """Tokens per second of all clients together."""
    shares = [list(contexts[idx :: len(processes)]) for idx in range(len(processes))]
    jobs = [(process, mine, False) for process, mine in zip(processes, shares, strict=True) if mine]
    return sum(map(len, measure(jobs, seconds))) / seconds


def measure_local(figures: Figures, model: Any, sizes: Sizes) -> list[Tensor]:
    """Figures of transformers; returns its texts."""
    side = Side(model.requires_grad_(False), sizes)
    figures.add("decode", LOCAL, "decode, tokens/s", side.decode)
    for prompt in sizes.prompts:
        figures.add("first_token", LOCAL, f"first token of {prompt}, ms", side.first_token, prompt)
    for rows in sizes.clients:
        figures.add("clients", LOCAL, f"clients: {rows}, tokens/s", one_batch, model, sizes, rows)
    figures.add("batches", LOCAL, "batches", side.batches)
    texts = [side.text(seed) for seed in range(3)] if "same_tokens" in figures.only else []
    figures.add("tuning", LOCAL, "prompt tuning, ms", side.tuning_step, prompt_tuning())
    figures.add("tuning", LOCAL, "LoRA, ms", side.tuning_step, lora())
    return texts


def measure_swarm(
    figures: Figures, name: str, path: Path, swarm: LocalSwarm, sizes: Sizes, texts: list[Tensor], device: str
) -> None:
    """Figures of a swarm with these weights."""
    with connected(path, swarm, device) as model:
        side = Side(model, sizes)
        figures.add("decode", name, "decode, tokens/s", side.decode)
        for prompt in sizes.prompts:
            figures.add("first_token", name, f"first token of {prompt}, ms", side.first_token, prompt)
        figures.add("step", name, "step", step_in_parts, model, sizes)
        figures.add("batches", name, "batches", side.batches)
        if name == "none":
            figures.add("same_tokens", name, "same tokens", same_tokens, side, texts)
            figures.add("tuning", name, "prompt tuning, ms", side.tuning_step, prompt_tuning())
    figures.add("prompt_parts", name, "prompt", prompt_in_parts, path, swarm, device, sizes)
    if name == "none" and "tuning" in figures.only:
        with connected(path, swarm, device) as model:
            figures.add("tuning", name, "LoRA, ms", Side(model, sizes).tuning_step, lora())


def connected(path: Path, swarm: LocalSwarm, device: str, **options: Any) -> Any:
    return AutoDistributedModel.from_pretrained(
        str(path),
        initial_peers=swarm.initial_peers,
        device_map=device,
        client_config=ClientConfig(step_timeout_s=STEP_TIMEOUT_S, max_retries=1, **options),
    )


def measure_clients(figures: Figures, path: Path, swarms: dict[str, LocalSwarm], sizes: Sizes) -> None:
    """Figures of many clients at once; they compute none of the model, as they would have machines of their own."""
    for name, swarm in swarms.items():
        with contextlib.ExitStack() as stack:
            processes = [Clients(path, swarm.initial_peers, room_tokens=ROOM_TOKENS) for _ in range(sizes.processes)]
            for process in processes:
                stack.callback(process.close)
            for process in processes:
                with contextlib.suppress(EOFError):  # it has ended; its figures say so
                    process.wait_until_ready()
            for number in sizes.clients:
                contexts = [sizes.context] * number
                figures.add(
                    "clients", name, f"clients: {number}, tokens/s", of_clients, processes, contexts, sizes.seconds
                )
            longest = f"clients: {len(sizes.unequal)} of {sizes.unequal[0]} to {sizes.unequal[-1]} tokens, tokens/s"
            figures.add("clients", name, longest, of_clients, processes, sizes.unequal, sizes.seconds)


def profile(figures: Figures, path: Path, sizes: Sizes, device: str, directory: Path, options: dict[str, Any]) -> None:
    """Where a client and its server spend their time while they do each of these."""
    report = directory / "server-samples.txt"
    program = [sys.executable, str(Path(__file__).with_name("sampling.py")), str(report)]
    with LocalSwarm(path, num_servers=1, program=program, quant_type="none", **options) as swarm:
        model = connected(path, swarm, device)
        with model, contextlib.closing(Sampler()) as sampler:
            side = Side(model, sizes)
            works = {
                f"first token of {sizes.prompts[0]}": lambda: timed_generation(model, sizes.prompts[0], 1),
                f"first token of {sizes.prompts[-1]}": lambda: timed_generation(model, sizes.prompts[-1], 1),
                "forward": side.forward,
                "forward and backward": side.backward,
                "decode": side.decode,
            }
            for name, work in works.items():
                work(), work()
                sampler.taken(), server_samples(swarm, report)
                ends_at = time.monotonic() + sizes.seconds
                while time.monotonic() < ends_at:
                    work()
                figures.profiles[name] = f"client, {sampler.taken()}\nserver, {server_samples(swarm, report)}"
                print(f"profile of {name}\n{figures.profiles[name]}", flush=True)
                figures.save()


def server_samples(swarm: LocalSwarm, report: Path) -> str:
    report.unlink(missing_ok=True)
    os.kill(swarm.servers[0].pid, signal.SIGUSR1)
    for _ in range(100):
        if report.exists() and report.stat().st_size:
            return report.read_text()
        time.sleep(0.02)
    return "no answer"


@contextlib.contextmanager
def started(path: Path, quant_types: Sequence[str], options: dict[str, Any]) -> Iterator[dict[str, LocalSwarm]]:
    """A server for each kind of weights, all starting at once."""
    swarms = {name: LocalSwarm(path, num_servers=1, quant_type=name, **options) for name in quant_types}
    try:
        with ThreadPoolExecutor(len(swarms)) as starting:
            list(starting.map(LocalSwarm.start, swarms.values()))
        yield swarms
    finally:
        for swarm in swarms.values():
            swarm.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quant_types", nargs="+", choices=QUANT_TYPES, default=["none", "int8", "nf4"])
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--limit_s", type=float, default=240.0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    sizes = SIZES[args.device]
    if args.device == "cpu":
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    figures = Figures([LOCAL, *args.quant_types], args.only, args.limit_s)
    cache_tokens = (max(sizes.clients) + 4) * (sizes.context + ROOM_TOKENS)
    options = {"device": args.device, "attn_cache_tokens": cache_tokens}
    with tempfile.TemporaryDirectory(prefix="swarmllm-bench-") as directory:
        path = save_random_model(sizes.shape, Path(directory), args.device)
        with started(path, args.quant_types, options) as swarms:
            # cuDNN's attention makes a plan for each new length, which would make decoding here slower still.
            torch.backends.cuda.enable_cudnn_sdp(False)
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(args.device)
            texts = measure_local(figures, model, sizes)
            del model
            for name, swarm in swarms.items():
                measure_swarm(figures, name, path, swarm, sizes, texts, args.device)
            if "clients" in args.only:
                measure_clients(figures, path, swarms, sizes)
        if "profile" in args.only:
            profile(figures, path, sizes, args.device, Path(directory), options)
    print(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

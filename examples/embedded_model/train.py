"""Train the embedded model from nothing on the texts of corpus.py, and write the checkpoint.

    nice python train.py --minutes 50 --output checkpoint      # one thread unless told otherwise

The learning rate follows the elapsed share of the time, so a run always ends with it decayed; the number of steps, and
with it the exact weights, depend on the machine. `--steps N` replaces the clock and makes the run reproducible. The
table that is printed at the end is the one in docs/embedded-model.md; score.py beside this file says what came of it.
"""

import argparse
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from corpus import END, documents
from muon import Muon
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TRAIN_SEED, TOKENIZER_SEED, HELD_OUT_SEED = 1, 2, 99  # never train on the last
HELD_OUT_DOCUMENTS = 100  # about 50 KB
PAD, BEGIN = "<pad>", "<s>"
VOCABULARY = 2048
TOKENS_PER_STEP = 2048
WARM_UP_STEPS = 100
DECAY_FROM = 0.3  # of the time; from then on the learning rate goes down to nothing, in a line
LENGTHS = (256, 512, 1024)  # tokens of a row: whole documents, in the shortest row that the longest of them fits in
LONG_FROM, LONG_EVERY = 0.6, 5  # of the time, steps: rows of the longest teach the distances that a chat needs
SAVE_EVERY_S = 240  # a run that is stopped leaves its latest checkpoint
PROMPTS = (
    "Once upon a time", "One morning, Mia", "The little fox", "Once upon a time, there was a clever owl",
    "Tom and Lily", "Question: What is the capital of France?", "List: apple, ball, cat, drum.",
)  # fmt: skip
CHAT_TEMPLATE = (  # as corpus.chat writes conversations; instructions of the system would be new to the model
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}User: {{ message.content }}\n"
    "{% elif message.role == 'assistant' %}Assistant: {{ message.content | trim }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text has a lossless encoding, the words of the corpus have short ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text.replace(END, "") for text in documents(TOKENIZER_SEED, 12_000))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """8 blocks of hidden size 256; sizes are multiples of 64 so that every quantization format fits."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",  # trains faster here than sdpa, whose backward is slow on the CPU
    )
    model = LlamaForCausalLM(config)
    for block in model.model.layers:  # each begins as if it were not there
        torch.nn.init.zeros_(block.self_attn.o_proj.weight)
        torch.nn.init.zeros_(block.mlp.down_proj.weight)
    return model


def token_stream(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[int]]:
    """Encoded documents without end, each seen once."""
    stream = documents(seed, 10**9)
    while True:
        for encoding in tokenizer.backend_tokenizer.encode_batch(list(itertools.islice(stream, 500))):
            yield encoding.ids


class Batches:
    """Batches of whole documents: one that begins in its middle has lost its hero, and would teach to guess names."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, num_tokens: int = TOKENS_PER_STEP) -> None:
        self._documents = token_stream(tokenizer, seed)
        self._num_tokens = num_tokens
        self._filling: dict[int, list[list[int]]] = {length: [] for length in LENGTHS}
        self._full: dict[int, list[list[int]]] = {length: [] for length in LENGTHS}

    def next(self, at_least: int = 0) -> torch.Tensor:
        """`[rows, length]`, with a length of `LENGTHS` that is at least this."""
        while True:
            for length, rows in self._full.items():
                if length >= at_least and len(rows) * length >= self._num_tokens:
                    self._full[length] = []
                    return torch.tensor(rows)
            ids = next(self._documents)[: LENGTHS[-1]]
            self._put(ids, min(length for length in LENGTHS if length >= max(len(ids), at_least)))

    def _put(self, ids: list[int], length: int) -> None:
        """Into the row with the least room for it; of 16 that are begun, the fullest gets the begin of another."""
        rows = self._filling[length]
        fitting = [row for row in rows if len(row) + len(ids) <= length]
        if fitting:
            max(fitting, key=len).extend(ids)
            return
        rows.append(list(ids))
        if len(rows) > 16:
            rows.sort(key=len)
            row = rows.pop()
            while len(row) < length:
                row += next(self._documents)
            self._full[length].append(row[:length])


def held_out_documents() -> list[str]:
    return list(documents(HELD_OUT_SEED, HELD_OUT_DOCUMENTS))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, limit: int | None = None) -> float:
    """Mean loss per token in nats, each document alone."""
    total, count = 0.0, 0
    for text in held_out_documents()[:limit]:
        ids = torch.tensor([tokenizer(text).input_ids])
        total += float(model(input_ids=ids, labels=ids, use_cache=False).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the checkpoint in bfloat16 with the held-out text beside it."""
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    stored.to(torch.bfloat16).save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # written for its owner alone otherwise
    tokenizer.save_pretrained(output)
    (output / "heldout.txt").write_text("\n\n".join(held_out_documents()) + "\n")


def samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_tokens: int = 200) -> Iterator[str]:
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
        yield tokenizer.decode(output[0], skip_special_tokens=True)


def optimizers(model: LlamaForCausalLM, arguments: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings and norms; each group knows its highest rate."""
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    embeddings = [parameter for name, parameter in named if "embed" in name]
    vectors = [parameter for _, parameter in named if parameter.ndim == 1]
    muon = Muon(matrices, lr=arguments.matrix_rate, weight_decay=0.1)
    adam = torch.optim.AdamW(
        [{"params": embeddings, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=arguments.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    for group in itertools.chain(muon.param_groups, adam.param_groups):
        group["highest"] = group["lr"]
    return [muon, adam]


def set_rates(groups: Iterable[dict[str, float]], step: int, share: float) -> None:
    """Warm up, stay, and go down in a line to nothing at the end."""
    height = min(1.0, (step + 1) / WARM_UP_STEPS, (1 - share) / (1 - DECAY_FROM))
    for group in groups:
        group["lr"] = group["highest"] * height


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    tokenizer = train_tokenizer()
    model = new_model(tokenizer)
    if arguments.resume:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(arguments.resume, dtype=torch.float32).state_dict())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters:,} parameters, vocabulary {len(tokenizer)}", flush=True)
    both = optimizers(model, arguments)
    compute = torch.compile(model, dynamic=False) if arguments.compile else model
    data = Batches(tokenizer, arguments.text_seed)
    rows: list[tuple[int, int, float, float, float]] = []
    start = last_save = time.monotonic()
    step, average = 0, 0.0
    while True:
        elapsed = time.monotonic() - start
        share = step / arguments.steps if arguments.steps else elapsed / (60 * arguments.minutes)
        if share >= 1:
            break
        set_rates((group for optimizer in both for group in optimizer.param_groups), step, share)
        ids = data.next(LENGTHS[-1] if share > LONG_FROM and step % LONG_EVERY == 0 else 0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute(input_ids=ids, labels=ids, use_cache=False).loss
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()
        step += 1
        average = loss.item() if step == 1 else 0.98 * average + 0.02 * loss.item()
        if step % arguments.report == 0:
            held_out = held_out_loss(model, tokenizer, 25)
            rows.append((step, step * TOKENS_PER_STEP, (time.monotonic() - start) / 60, average, held_out))
            print(_row(rows[-1]), flush=True)
        if time.monotonic() - last_save > SAVE_EVERY_S:
            save(model, tokenizer, arguments.output)
            last_save = time.monotonic()
    model.eval()
    save(model, tokenizer, arguments.output)
    stored = LlamaForCausalLM.from_pretrained(arguments.output, dtype=torch.float32)
    held_out = held_out_loss(stored, tokenizer)
    rows.append((step, step * TOKENS_PER_STEP, (time.monotonic() - start) / 60, average, held_out))
    print(
        "| step | tokens | minutes | training loss | held-out loss | held-out perplexity |", "|---" * 6 + "|", sep="\n"
    )
    print("\n".join(map(_row, rows)), flush=True)
    for text in samples(stored, tokenizer):
        print(f"\n> {text}", flush=True)


def _row(row: tuple[int, int, float, float, float]) -> str:
    step, tokens, minutes, loss, held_out = row
    return f"| {step} | {tokens / 1e6:.2f}M | {minutes:.1f} | {loss:.3f} | {held_out:.3f} | {math.exp(held_out):.3f} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--minutes", type=float, default=50.0, help="time of the training itself")
    parser.add_argument("--steps", type=int, default=0, help=f"instead of --minutes: steps of {TOKENS_PER_STEP} tokens")
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="of embeddings and norms")
    parser.add_argument("--matrix_rate", type=float, default=0.02, help="of the other weights; see muon.py")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--resume", type=Path, help="checkpoint of an earlier run to go on from")
    parser.add_argument("--text_seed", type=int, default=TRAIN_SEED, help="another one for a run that goes on")
    parser.add_argument("--report", type=int, default=500, help="steps between rows of the table")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C++ compiler")
    train(parser.parse_args())

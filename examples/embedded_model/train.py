"""Train the embedded model from nothing on the texts of corpus.py, and write the checkpoint.

    nice python train.py --minutes 25 --output checkpoint      # one thread unless told otherwise

The learning rate follows the elapsed share of the time, so a run always ends with it decayed; the number of steps, and
with it the exact weights, depend on the machine. `--steps N` replaces the clock and makes the run reproducible. The
table that is printed at the end is the one in docs/embedded-model.md.
"""

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus import END, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TRAIN_SEED, TOKENIZER_SEED, HELD_OUT_SEED = 1, 2, 99  # never train on the last
HELD_OUT_DOCUMENTS = 100  # about 50 KB
PAD, BEGIN = "<pad>", "<s>"
VOCABULARY = 2048
TOKENS_PER_STEP = 1024  # small: how well names are kept track of depends on the number of steps
WARM_UP_STEPS = 100
SHORT, LONG = 256, 1024  # tokens of a training sequence; long ones teach the distances that a chat needs,
LONG_FROM = 0.85  # in every third step from this share of the training on
SAVE_EVERY_S = 240  # a run that is stopped leaves its latest checkpoint
PROMPTS = (
    "Once upon a time", "One morning, Mia", "The little fox", "Once upon a time, there was a clever owl",
    "Tom and Lily", "Question: What is the capital of France?", "List: apple, ball, cat, drum.",
)  # fmt: skip
CHAT_TEMPLATE = (  # as corpus.chat writes conversations; instructions of the system would be new to the model
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}User: {{ message.content }}\n"
    "{% elif message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}\n{% endif %}"
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
    return LlamaForCausalLM(config)


def token_stream(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[int]]:
    """Encoded documents without end, each seen once."""
    stream = documents(seed, 10**9)
    while True:
        for encoding in tokenizer.backend_tokenizer.encode_batch(list(itertools.islice(stream, 500))):
            yield encoding.ids


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[torch.Tensor]:
    """TOKENS_PER_STEP tokens each, [tokens]; documents follow each other without gaps."""
    tokens: list[int] = []
    for ids in token_stream(tokenizer, seed):
        tokens += ids
        while len(tokens) >= TOKENS_PER_STEP:
            yield torch.tensor(tokens[:TOKENS_PER_STEP])
            tokens = tokens[TOKENS_PER_STEP:]


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


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    tokenizer = train_tokenizer()
    model = new_model(tokenizer)
    if arguments.resume:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(arguments.resume, dtype=torch.float32).state_dict())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters:,} parameters, vocabulary {len(tokenizer)}", flush=True)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=True,
    )
    compute = torch.compile(model, dynamic=False) if arguments.compile else model
    data = batches(tokenizer, arguments.text_seed)
    rows: list[tuple[int, int, float, float, float]] = []
    start = last_save = time.monotonic()
    step, average = 0, 0.0
    while True:
        elapsed = time.monotonic() - start
        share = step / arguments.steps if arguments.steps else elapsed / (60 * arguments.minutes)
        if share >= 1:
            break
        cosine = 0.5 + 0.5 * math.cos(math.pi * share)
        rate = arguments.learning_rate * min(1, (step + 1) / WARM_UP_STEPS) * (0.03 + 0.97 * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = LONG if share > LONG_FROM and step % 3 == 0 else SHORT
        ids = next(data).view(-1, length)
        with torch.autocast("cpu", torch.bfloat16):
            run = compute if length == SHORT else model  # too few long steps for another compilation
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    parser.add_argument("--minutes", type=float, default=25.0, help="time of the training itself")
    parser.add_argument("--steps", type=int, default=0, help=f"instead of --minutes: steps of {TOKENS_PER_STEP} tokens")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--resume", type=Path, help="checkpoint of an earlier run to go on from")
    parser.add_argument("--text_seed", type=int, default=TRAIN_SEED, help="another one for a run that goes on")
    parser.add_argument("--report", type=int, default=250, help="steps between rows of the table")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C++ compiler")
    train(parser.parse_args())

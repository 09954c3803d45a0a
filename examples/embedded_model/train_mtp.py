"""Train a head for the embedded model that predicts the token after the next one; the model itself stays as it is.

    nice python train_mtp.py --minutes 15 --output mtp.safetensors

The head is a multi-token-prediction module as DeepSeek-AI 2024 (DeepSeek-V3, section 2.2) describes it, with the names
of tensors that such checkpoints have. It guesses ahead on its own outputs (docs/speculation.md), so it is trained on
them, too: `DEPTH` guesses in a row, the first from the model's hidden states, each further one from the head's own,
with the attention that it will have then: on pairs of the text up to where the guesses begin, and on the guesses since.
What it shall say is the model's own distribution, not the text. Prints a table of how often guesses are right: how
often the head's likeliest token is the model's likeliest one, if the guesses before it were right.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from muon import Muon
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from train import Batches
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from swarmllm import embedded_model_path
from swarmllm.demo.local_swarm import embedded_heldout_texts

TEXT_SEED = 2001  # texts that the model itself was not trained on
DEPTH = 4
TOKENS_PER_STEP = 1024
WARM_UP_STEPS = 100


class Head(nn.Module):
    """Pairs of a hidden state and the token after it → hidden states from which the model's head tells the next."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        config = model.config
        size = config.hidden_size
        self.block = LlamaDecoderLayer(config, layer_idx=0)
        self.enorm, self.hnorm, self.norm = (LlamaRMSNorm(size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():  # begin near the model: its last block, its final norm, and the hidden state as it is
            self.block.load_state_dict(model.model.layers[-1].state_dict())
            self.norm.load_state_dict(model.model.norm.state_dict())
            self.eh_proj.weight.copy_(torch.cat([0.1 * torch.eye(size), torch.eye(size)], dim=1))
        self.embed, self.rotary, self.head = model.model.embed_tokens, model.model.rotary_emb, model.lm_head

    def guesses(self, hidden: Tensor, ids: Tensor) -> list[Tensor]:
        """Logits of `DEPTH` guesses in a row from each position; hidden states and ids `[batch, seq, …]`.

        Guess d (from 1 on) at position p is for the token at p + d + 1 - (d - 1) = p + 2, made d tokens before it.
        """
        seq = ids.shape[1] - 1
        embeds, state = self.embed(ids)[:, 1:], hidden[:, :-1]  # the pair p: hidden state p, token p + 1
        positions = torch.arange(seq)[None]
        rotation = self.rotary(state, positions)
        cache, found = DynamicCache(), []
        apart = torch.arange(seq)[:, None] - torch.arange(seq)[None]  # of a query and a key
        for depth in range(DEPTH):
            seen = [apart >= depth] + [apart == depth - earlier for earlier in range(1, depth + 1)]
            mask = torch.where(torch.cat(seen, dim=1), 0.0, -1e9)[None, None]
            joined = torch.cat([self.enorm(embeds), self.hnorm(state)], dim=-1)
            output = self.block(
                self.eh_proj(joined), attention_mask=mask, position_embeddings=rotation, past_key_values=cache
            )
            state = self.norm(output)
            found.append(self.head(state))
            state = functional.pad(state, (0, 0, 1, 0))[:, :-1]  # the next guess stands one position further
        return found

    def published(self, block_idx: int) -> dict[str, Tensor]:
        """The tensors under the names that they have in DeepSeek's checkpoints."""
        tensors = dict(self.block.state_dict())
        for name, part in (("enorm", self.enorm), ("hnorm", self.hnorm), ("shared_head.norm", self.norm)):
            tensors[f"{name}.weight"] = part.weight
        tensors["eh_proj.weight"] = self.eh_proj.weight
        return {
            f"model.layers.{block_idx}.{name}": tensor.detach().to(torch.bfloat16).contiguous()
            for name, tensor in tensors.items()
        }


def losses(guesses: list[Tensor], logits: Tensor) -> list[Tensor]:
    """Cross-entropy of each guess with what the model says; of position p with the model's word at p + 1."""
    wanted = torch.softmax(logits[:, 1:].float(), dim=-1)
    return [
        -(wanted[:, depth:] * torch.log_softmax(guess[:, depth:].float(), dim=-1)).sum(-1).mean()
        for depth, guess in enumerate(guesses)
    ]


@torch.no_grad()
def acceptance(model: LlamaForCausalLM, head: Head, texts: list[Tensor]) -> list[float]:
    """Share of guesses that are the model's likeliest token, where those before were."""
    right, asked = [0.0] * DEPTH, [0.0] * DEPTH
    for ids in texts:
        hidden = model.model(ids).last_hidden_state
        best = model.lm_head(hidden).argmax(-1)[:, 1:]
        same = [(guess.argmax(-1) == best)[0] for guess in head.guesses(hidden, ids)]
        seq = best.shape[1]
        alive = torch.ones(seq - DEPTH, dtype=torch.bool)
        for depth in range(DEPTH):  # a chain that begins at position p says its guess of `depth` at p + depth
            asked[depth] += float(alive.sum())
            alive &= same[depth][depth : depth + seq - DEPTH]
            right[depth] += float(alive.sum())
    return [r / max(a, 1.0) for r, a in zip(right, asked, strict=True)]


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    path = embedded_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.requires_grad_(False)
    head = Head(model)
    held_out = [torch.tensor([tokenizer(text).input_ids]) for text in embedded_heldout_texts()[:25]]
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    print(f"{sum(parameter.numel() for parameter in trained):,} parameters", flush=True)
    matrices, vectors = ([one for one in trained if (one.ndim > 1) is wanted] for wanted in (True, False))
    muon = Muon(matrices, lr=arguments.matrix_rate)
    adam = torch.optim.AdamW(vectors, lr=arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    groups = [(group, group["lr"]) for optimizer in (muon, adam) for group in optimizer.param_groups]
    data = Batches(tokenizer, TEXT_SEED, TOKENS_PER_STEP)
    print("| step | tokens | minutes | loss |", " | ".join(f"guess {d + 1}" for d in range(DEPTH)), "|")
    start, step, average = time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - start) / (60 * arguments.minutes)) < 1:
        for group, highest in groups:
            group["lr"] = highest * min(1, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * share))
        ids = data.next()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                hidden = model.model(ids, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden)
            of_depths = losses(head.guesses(hidden, ids), logits)
        loss = torch.stack(of_depths).mean()
        head.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        muon.step()
        adam.step()
        step += 1
        average = loss.item() if step == 1 else 0.98 * average + 0.02 * loss.item()
        if step % arguments.report == 0:
            _report(step, ids.numel(), start, average, acceptance(model, head, held_out))
            save_file(head.published(model.config.num_hidden_layers), arguments.output)
    _report(step, ids.numel(), start, average, acceptance(model, head, held_out))
    save_file(head.published(model.config.num_hidden_layers), arguments.output)


def _report(step: int, step_tokens: int, start: float, loss: float, shares: list[float]) -> None:
    minutes = (time.monotonic() - start) / 60
    columns = " | ".join(f"{share:.3f}" for share in shares)
    print(f"| {step} | {step * step_tokens / 1e6:.2f}M | {minutes:.1f} | {loss:.3f} | {columns} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file for the head's tensors")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="of norms")
    parser.add_argument("--matrix_rate", type=float, default=0.01, help="of the other weights; see muon.py")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", type=int, default=250, help="steps between rows of the table")
    train(parser.parse_args())

"""Noise on what leaves the client, and blocks that stay with it: what they cost, and what a server can still read.

    python benchmarks/noise.py [--documents 500]

The embedded model in fp32 in one process, on its held-out texts. Its first blocks count as the client's, and what
enters the others gets the noise of `ClientConfig.activation_noise`, once. Beside the perplexity that is left stands
what somebody reads who holds the next block and the checkpoint: the share of the held-out tokens that they name
rightly, from one position each time. "By look-up" takes the embedding nearest to the hidden states; "by a reader" is a
linear classifier that they have trained on texts of their own (--documents of the same kind) with the same noise.
Better readers exist: deeper ones, and ones that use the neighbours of a position. So the figures are a lower bound of
what can be read. Writes results/noise.json.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from common import save_results, table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmllm import embedded_model_path
from swarmllm.client.session.chain import ActivationNoise
from swarmllm.demo.local_swarm import embedded_heldout_texts
from swarmllm.models.boundary.block_inputs import BlockInputs

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "embedded_model"))
from corpus import documents

LOCAL_BLOCKS = (0, 1, 2, 4)
SCALES = (0.0, 0.1, 0.3, 1.0)
SEED_OF_READER = 4321
EPOCHS = 4


def noisy(hidden: Tensor, noise: ActivationNoise) -> Tensor:
    """Hidden states `[batch, seq, hidden]` as a server gets them."""
    return noise(BlockInputs(hidden_states=hidden, batch_size=hidden.shape[0], seq_len=hidden.shape[1])).hidden_states


@torch.no_grad()
def perplexity(model: Any, texts: list[Tensor], num_local: int, noise: ActivationNoise) -> float:
    """Add noise to the inputs of the block after the local ones."""
    block: nn.Module = model.get_decoder().layers[num_local]
    hook = block.register_forward_pre_hook(lambda _, args: (noisy(args[0], noise), *args[1:]))
    try:
        loss = sum(float(model(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in texts)
    finally:
        hook.remove()
    return math.exp(loss / sum(ids.shape[1] - 1 for ids in texts))


@torch.no_grad()
def states(model: Any, texts: list[Tensor]) -> dict[int, Tensor]:
    """Inputs of the block after so many local ones, `[tokens, hidden]`."""
    of_texts = [model(ids, output_hidden_states=True).hidden_states for ids in texts]
    return {idx: torch.cat([found[idx][0] for found in of_texts]) for idx in LOCAL_BLOCKS}


def fit_reader(hidden: Tensor, ids: Tensor, vocabulary: int) -> nn.Module:
    """A classifier of the tokens behind hidden states: a norm and a softmax over a linear map."""
    torch.manual_seed(0)
    size = hidden.shape[1]
    reader = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, vocabulary))
    optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - epoch / EPOCHS)
        for batch in torch.randperm(len(ids)).split(512):
            optimizer.zero_grad()
            nn.functional.cross_entropy(reader(hidden[batch]), ids[batch]).backward()
            optimizer.step()
    return reader


def share_right(named: Tensor, ids: Tensor) -> float:
    return float((named == ids).double().mean())


def read(hidden: Tensor, ids: Tensor, own: Tensor, ids_of_own: Tensor, embeddings: Tensor) -> tuple[float, float]:
    """Shares of tokens named right: by look-up, and by a classifier fitted to the server's own texts."""
    reader = fit_reader(own, ids_of_own, len(embeddings))
    by_look_up = share_right(torch.cdist(hidden, embeddings).argmin(-1), ids)
    with torch.no_grad():
        return by_look_up, share_right(reader(hidden).argmax(-1), ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())

    def ids_of(texts: list[str]) -> list[Tensor]:
        return [tokenizer(text, return_tensors="pt").input_ids for text in texts]

    heldout = ids_of(embedded_heldout_texts())
    own = ids_of(list(documents(SEED_OF_READER, args.documents)))
    ids, ids_of_own = (torch.cat([text[0] for text in texts]) for texts in (heldout, own))
    usual = share_right(ids_of_own.mode().values.expand(len(ids)), ids)
    print(f"{len(ids):,} held-out tokens, {usual:.3f} of them the commonest one; the reader saw {len(ids_of_own):,}")
    seen, of_own = states(model, heldout), states(model, own)
    embeddings = model.get_input_embeddings().weight.detach()
    rows = []
    for num_local in LOCAL_BLOCKS:
        for scale in SCALES:
            noise = ActivationNoise(scale)
            given, learnt = (noisy(one[num_local][None], noise)[0] for one in (seen, of_own))
            cost = perplexity(model, heldout, num_local, noise)
            rows.append([num_local, scale, cost, *read(given, ids, learnt, ids_of_own, embeddings)])
            print(rows[-1], flush=True)
    header = ["blocks at the client", "noise", "perplexity", "named by look-up", "by a reader"]
    print(table(header, rows))
    print(f"written to {save_results('noise', {'header': header, 'rows': rows})}")


if __name__ == "__main__":
    main()

"""Tasks of the harness lm_eval on the embedded model, by bits of a weight: the shape of the Petals paper's table 1.

    pip install --target /tmp/lm_eval lm_eval             # never a dependency
    PYTHONPATH=/tmp/lm_eval python benchmarks/lm_eval_tasks.py [--quant_types none int8 nf4]

The tasks are made of the embedded model's held-out texts, since nothing is downloaded here: how well it foretells them
(perplexity of a word, and bits of a byte), and whether it finds the end of a text among those of three others
(accuracy, by the sum of log probabilities and by that of a byte; 0.25 is chance). lm_eval is given the distributed
model as it would be given any other of transformers; the first row is that other, on this machine alone. Two servers
for each type. Writes results/lm_eval_tasks.json.
"""

import argparse
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from common import save_results, table
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmllm import AutoDistributedModel, LocalSwarm, embedded_model_path
from swarmllm.demo.local_swarm import embedded_heldout_texts

METRICS = {
    "word perplexity": ("texts", "word_perplexity,none"),
    "bits per byte": ("texts", "bits_per_byte,none"),
    "endings": ("endings", "acc,none"),
    "endings, by byte": ("endings", "acc_norm,none"),
}
CHOICES = 4


def endings(texts: list[str]) -> list[dict[str, Any]]:
    """Texts without their last two sentences, and four ends of which one is right."""
    chance, parts = random.Random(0), []
    for text in texts:
        sentences = re.split(r"(?<=[.!?\"]) (?=[A-Z\"])", " ".join(text.split()))
        parts.append((" ".join(sentences[:-2]), " ".join(sentences[-2:])))
    found = []
    for index, (beginning, end) in enumerate(parts):
        if beginning:
            others = [other for place, (_, other) in enumerate(parts) if place != index and other != end]
            choices = [*chance.sample(others, CHOICES - 1), end]
            chance.shuffle(choices)
            found.append({"beginning": beginning, "choices": choices, "label": choices.index(end)})
    return found


def save_tasks(directory: Path) -> TaskManager:
    """Both tasks, with their data beside them."""
    texts = embedded_heldout_texts()
    for name, rows in (("texts", [{"text": text} for text in texts]), ("endings", endings(texts))):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {"dataset_path": "json", "test_split": "test"}
    configs = {
        "texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "endings": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{beginning}}",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    }
    for name, config in configs.items():
        files = {"data_files": {"test": str(directory / f"{name}.jsonl")}}
        # JSON is YAML
        (directory / f"{name}.yaml").write_text(json.dumps({"task": name, "dataset_kwargs": files, **common, **config}))
    return TaskManager(include_path=str(directory), include_defaults=False)


def evaluate(model: Any, tasks: TaskManager) -> dict[str, float]:
    """The results of lm_eval."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16)
    found = lm_eval.simple_evaluate(wrapped, tasks=["texts", "endings"], task_manager=tasks, bootstrap_iters=0)
    return {name: found["results"][task][metric] for name, (task, metric) in METRICS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quant_types", nargs="+", default=["none", "int8", "nf4", "int4", "int3", "int2"])
    arguments = parser.parse_args()
    model_path, results = embedded_model_path(), {}
    with tempfile.TemporaryDirectory() as directory:
        tasks = save_tasks(Path(directory))
        results["transformers"] = evaluate(AutoModelForCausalLM.from_pretrained(model_path), tasks)
        for quant_type in arguments.quant_types:
            with (
                LocalSwarm(model_path, num_servers=2, quant_type=quant_type, num_threads=1) as swarm,
                AutoDistributedModel.from_pretrained(model_path, initial_peers=swarm.initial_peers) as model,
            ):
                results[quant_type] = evaluate(model, tasks)
    print(table(["weights", *METRICS], [[name, *found.values()] for name, found in results.items()]))
    print(f"\n{save_results('lm_eval_tasks', results)}")


if __name__ == "__main__":
    main()

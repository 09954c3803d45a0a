"""Score the embedded model, or another checkpoint trained on such texts: do its texts make sense?

    python score.py [--model DIRECTORY] [--quant_types none int8] [--number 100] [--json FILE]

All texts come from a seed that training never saw, and half of the names are made up. Answers are right if they equal
corpus.py's, word by word. The first column scores stories of corpus.py itself: the best that the measures of stories
can reach. Weights are quantized as on servers, by swarmllm's own packed weights, with float32 around them.
"""

import argparse
import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import episodes
import stories
import tales
import torch
import words
from corpus import END, documents, hero_named, list_request, story_request
from facts import Fact, draw_facts
from tales import Answered, told
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from swarmllm import embedded_model_path
from swarmllm.models.quantization import Quantization
from swarmllm.models.quantization.loading import LoadingConfig

SEED = 98  # neither of training nor of the held-out text
HELD_OUT_SEED, HELD_OUT_DOCUMENTS = 99, 100  # as in train.py
ROWS = 25
STORY_TOKENS, ANSWER_TOKENS = 400, 60
TEMPERATURE = 0.7


class Model(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def prompt(self, *turns: str) -> str:
        """The text of a conversation: the turns of user and assistant; the assistant is next."""
        said = [{"role": "assistant" if place % 2 else "user", "content": turn} for place, turn in enumerate(turns)]
        text: str = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        return text.removeprefix(self.tokenizer.bos_token)

    @torch.inference_mode()
    def continued(self, prompts: list[str], num_tokens: int, **options: Any) -> Iterator[str]:
        """The model's text after each prompt, with the end mark if it came to one."""
        self.tokenizer.padding_side = "left"
        for begin in range(0, len(prompts), ROWS):
            inputs = self.tokenizer(prompts[begin : begin + ROWS], return_tensors="pt", padding=True)
            output = self.model.generate(**inputs, max_new_tokens=num_tokens, **{"do_sample": False, **options})
            for ids in output[:, inputs.input_ids.shape[1] :]:
                text = self.tokenizer.decode(ids, skip_special_tokens=False)
                yield text.partition(END)[0] + (END if END in text else "")


def load(path: str, quant_type: str) -> Model:
    options: dict[str, Any] = {}
    if quant_type != "none":
        options["quantization_config"] = LoadingConfig(Quantization(quant_type), torch.device("cpu"))  # type: ignore[arg-type]
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    return Model(model, AutoTokenizer.from_pretrained(path))


# Stories


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain(*map(_strings, [*value.keys(), *value.values()]))
    elif isinstance(value, list | tuple):
        yield from itertools.chain(*map(_strings, value))


def _capitalized_words(*modules: ModuleType) -> set[str]:
    """All words that sentences begin with, and days: capitalized, but nobody's name."""
    tables = [value for module in modules for name, value in vars(module).items() if not name.startswith("__")]
    texts = [re.sub(r"\{.*?\}", "", text) for text in _strings(tables)]
    common = {word for text in texts for word in re.findall(r"\b[A-Z][a-z]*\b", text)}
    people = [*words.GIRLS, *words.BOYS, *itertools.chain(*words.PETS.values())]
    filled_in = [*words.NUMBERS, *itertools.chain(*words.PRONOUNS.values()), "the", "each"]
    return (common - set(people)) | {word.capitalize() for word in filled_in}


_NO_NAMES = _capitalized_words(episodes, stories, tales, words)


class Asked(NamedTuple):
    """A story about a given child, as a prompt and as it may be told."""

    prompt: str
    begun: str
    """The beginning of the story in the prompt."""
    name: str
    he: str
    told: str


def asked_stories(model: Model, number: int) -> list[Asked]:
    """Half of the stories are begun, half are requested."""
    rng, asked = random.Random(SEED), []
    for place in range(number):
        he = rng.choice(["he", "she"])
        name = words.child_name(rng, he)
        hero = hero_named(rng, name, he)
        begun = f"Once upon a time, there was {hero['a_hero']}" if place % 2 else ""
        prompt = begun or model.prompt(f"Tell me a story about a {hero['herokind']} named {name}.")
        asked.append(Asked(prompt, begun, name, he, told(rng, **hero)[0]))
    return asked


def judged(asked: Asked, text: str) -> dict[str, bool]:
    """`text` is the whole story."""
    names = set(re.findall(r"\b[A-Z][a-z]+\b", text)) - _NO_NAMES - {asked.name}
    sentences = [one for one in re.split(r"(?<=[.!?])\s+", text.removesuffix(END)) if one]
    pronoun = re.search(r"\b(he|him|his|she|her)\b", text, re.IGNORECASE)
    own = words.PRONOUNS[asked.he]
    named_again = re.search(rf"\b{asked.name}\b", text[len(text) // 2 :])
    return {
        "the hero is named in the second half": bool(named_again),
        "nobody comes but one friend": len(names) <= 1,
        "name kept: both": bool(named_again) and len(names) <= 1,
        "the first pronoun is the hero's": pronoun is not None and pronoun[0].lower() in own,
        "ends, and says nothing twice": text.endswith(END) and len(set(sentences)) >= len(sentences) - 1,
    }


def shares(found: Iterable[dict[str, bool]]) -> dict[str, float]:
    rows = list(found)
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}


def story_scores(model: Model, number: int) -> dict[str, float]:
    asked = asked_stories(model, number)
    scores: dict[str, float] = {}
    torch.manual_seed(SEED)
    for way, options in (("greedy", {}), ("sampled", {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0})):
        said = model.continued([one.prompt for one in asked], STORY_TOKENS, **options)
        found = shares(judged(one, one.begun + text) for one, text in zip(asked, said, strict=True))
        scores |= {f"{way} stories: {key}": share for key, share in found.items()}
    return scores


def ceiling(number: int, model: Model) -> dict[str, float]:
    found = shares(judged(one, one.told + END) for one in asked_stories(model, number))
    return {f"{way} stories: {key}": share for way in ("greedy", "sampled") for key, share in found.items()}


# Answers


def _right(asked: Fact | Answered) -> set[str]:
    return {asked.sentence, f"{asked.short}."}


def all_facts() -> dict[str, set[str]]:
    """Every question about the world, in one of its wordings: its right answers."""
    rng, wordings, right = random.Random(SEED), {}, {}
    for _ in range(1500):
        for fact in draw_facts(rng, 5):
            if not fact.question.startswith("Name "):
                wordings.setdefault(fact.sentence, fact.question)
                right.setdefault(fact.question, set()).update(_right(fact))
    return {question: right[question] for question in dict.fromkeys(wordings.values())}


def story_questions(model: Model, number: int) -> list[tuple[str, set[str]]]:
    """Questions about stories of corpus.py, one each."""
    rng, found = random.Random(SEED), []
    while len(found) < number:
        request, fixed = story_request(rng)
        text, questions = told(rng, **fixed)
        found.append((model.prompt(request, text, questions[0].question), _right(questions[0])))
    return found


def lists(model: Model, number: int) -> list[tuple[str, set[str]]]:
    """Lists to repeat, or with another item: everything must be copied."""
    rng, found = random.Random(SEED), []
    while len(found) < number:
        request, answer = list_request(rng)
        if request.startswith(("Repeat", "Say", "Write")):
            found.append((model.prompt(request), {answer}))
    return found


def answered(model: Model, asked: list[tuple[str, set[str]]]) -> float:
    said = model.continued([prompt for prompt, _ in asked], ANSWER_TOKENS)
    return sum(text.removesuffix(END).strip() in right for (_, right), text in zip(asked, said, strict=True)) / len(
        asked
    )


@torch.inference_mode()
def held_out(model: Model) -> tuple[float, float]:
    """(perplexity of a token, bits of a byte)."""
    loss, tokens, size = 0.0, 0, 0
    for text in documents(HELD_OUT_SEED, HELD_OUT_DOCUMENTS):
        ids = model.tokenizer(text, return_tensors="pt").input_ids
        loss += float(model.model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
        size += len(text.encode())
    return math.exp(loss / tokens), loss / math.log(2) / size


def score(model: Model, number: int) -> dict[str, float]:
    perplexity, bits = held_out(model)
    facts = [(model.prompt(question), right) for question, right in all_facts().items()]
    return {
        "held-out perplexity of a token": perplexity,
        "held-out bits of a byte": bits,
        **story_scores(model, number),
        f"answered facts, of {len(facts)}": answered(model, facts),
        f"answered questions about a story, of {2 * number}": answered(model, story_questions(model, 2 * number)),
        f"lists as they should be, of {number}": answered(model, lists(model, number)),
    }


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    columns: dict[str, dict[str, float]] = {}
    for quant_type in arguments.quant_types:
        model = load(arguments.model, quant_type)
        columns.setdefault("texts themselves", ceiling(arguments.number, model))
        columns[quant_type] = score(model, arguments.number)
    print(f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|", sep="\n")
    for row in columns[arguments.quant_types[0]]:
        form = "{:.3f}" if row.startswith("held-out") else "{:.1%}"
        print(f"| {row} |", " | ".join(form.format(it[row]) if row in it else "" for it in columns.values()), "|")
    if arguments.json:
        arguments.json.write_text(json.dumps(columns, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=embedded_model_path(), help="directory of the checkpoint")
    parser.add_argument("--quant_types", nargs="+", default=["none", "int8"])
    parser.add_argument(
        "--number", type=int, default=100, help="stories of each way, and lists; twice as many questions"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the figures")
    main(parser.parse_args())

"""Texts that the embedded model is trained on: short stories, conversations, facts and lists, all made here.

    python corpus.py --seed 7 --documents 5        # read some

The same seed gives the same documents everywhere. Training uses the seed of train.py, the held-out text another one.
"""

import argparse
import random
from collections.abc import Iterator

from facts import draw_facts
from tales import portrait, story
from words import (
    ADJECTIVES,
    ANIMALS,
    BOYS,
    COLOURS,
    FOODS,
    GIRLS,
    HOBBIES,
    NUMBERS,
    PLACES,
    PRONOUNS,
    THINGS,
    capitalized,
    made_up_name,
    plural,
    with_article,
)

END = "</s>"  # ends a story and each answer of the assistant


def fact_text(rng: random.Random) -> str:
    facts = draw_facts(rng, rng.randint(3, 8))
    if rng.random() < 0.5:
        return " ".join(fact.sentence for fact in facts)
    separator = rng.choice([" ", "\n"])
    return "\n".join(f"Question: {fact.question}{separator}Answer: {fact.short}." for fact in facts)


def list_text(rng: random.Random) -> str:
    """Lists that are counted, repeated, reversed or changed in one item: text that is largely a copy of itself."""
    source = rng.choice([FOODS, THINGS, ANIMALS, GIRLS, BOYS, COLOURS, list(PLACES)])
    items = rng.sample(source, rng.randint(3, 7))
    old = rng.choice(items)
    new = rng.choice([item for item in source if item not in items])
    changed = [new if item == old else item for item in items]
    if rng.random() < 0.25:
        lines = ["List:", *(f"{place}. {item}" for place, item in enumerate(items, 1))]
        lines += [f"The same list with {new} instead of {old}:"]
        return "\n".join(lines + [f"{place}. {item}" for place, item in enumerate(changed, 1)])
    joined, joined_changed = ", ".join(items), ", ".join(changed)
    start = rng.randint(1, 12)
    hero = rng.choice(GIRLS + BOYS)
    packed = f"{hero} packed a bag: {joined}. Then {hero} took out the {old} and put in the {new}."
    return rng.choice(
        [
            f"List: {joined}.\nThe same list again: {joined}.",
            f"List: {joined}.\nWith {new} instead of {old}: {joined_changed}.",
            f"Words: {joined}.\nBackwards: {', '.join(reversed(items))}.",
            f"{packed} Now in the bag: {joined_changed}.",
            f"Count: {', '.join(NUMBERS[start : start + rng.randint(4, 9)])}.",
            f"{hero} said: {joined}. Again {hero} said: {joined}. And once more: {joined}.",
        ]
    )


def _story_request(rng: random.Random) -> tuple[str, str]:
    ask = rng.choice(["Tell me a story", "Please tell me a story", "Can you tell me a story", "Write a short story"])
    kind = rng.randrange(4)
    if kind == 0:
        return ask + rng.choice([".", ".", " before I go to sleep."]), story(rng)
    if kind == 1:
        thing = rng.choice(THINGS)
        return f"{ask} about {with_article(thing)}.", story(rng, thing=thing)
    if kind == 2:
        name = rng.choice(GIRLS + BOYS + [made_up_name(rng)])
        he = "she" if name in GIRLS else "he"
        return f"{ask} about {name}.", story(rng, **_hero(rng, name, "girl" if he == "she" else "boy", he))
    animal = rng.choice(ANIMALS)
    cast = _hero(rng, "the " + animal, animal, rng.choice(["he", "she"]))
    return f"{ask} about {with_article(animal)}.", story(rng, **cast)


def _hero(rng: random.Random, name: str, kind: str, he: str) -> dict[str, str]:
    adjective = rng.choice(ADJECTIVES)
    called = name if not name.startswith("the ") else ""
    first = f"{with_article(adjective)} {kind}" + (f" named {called}" if called else "")
    _, him, his = PRONOUNS[he]
    known = {
        "hero": name,
        "a_hero": first,
        "the_hero": called or f"the {adjective} {kind}",
        "some_hero": called or first,
    }
    return known | {"kind": kind, "he": he, "him": him, "his": his}


def _small_talk(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(GIRLS + BOYS + [made_up_name(rng)])
    things = plural(rng.choice(FOODS))
    pick = rng.choice
    return pick(
        [
            (pick(["Hello!", "Hi!", "Hello.", "Hello there!", "Good morning!"]),
             pick(["Hello! How can I help you?", "Hello! It is nice to meet you.",
                   "Hello! What would you like to hear?"])),
            (pick(["Who are you?", "What are you?", "What is your name?"]),
             "I am a very small language model. I can tell stories and answer simple questions."),
            (pick(["What can you do?", "How can you help me?"]),
             "I can tell you a story, answer a simple question or repeat a list."),
            (pick(["How are you?", "How are you today?"]),
             pick(["I am very well, thank you. And how are you?", "I am fine, thank you."])),
            (pick(["Thank you!", "Thanks!", "Thank you very much."]),
             pick(["You are welcome.", "I am glad that I could help."])),
            (pick(["Goodbye!", "Bye!", "Good night!"]), pick(["Goodbye! See you soon.", "Goodbye! Sleep well."])),
            (pick([f"My name is {name}.", f"I am {name}."]), f"Hello, {name}! It is nice to meet you."),
            (f"I like {things}.", f"I am glad that you like {things}."),
            (f"Do you like {things}?", f"I cannot eat, but many people like {things}."),
            ("I am sad.", "I am sorry to hear that. Shall I tell you a story?"),
            ("I am happy today.", "That is wonderful! Why are you so happy?"),
            ("What shall I do today?", f"You could try {pick(HOBBIES)}. That is fun."),
        ]
    )  # fmt: skip


def _list_request(rng: random.Random) -> tuple[str, str]:
    source = rng.choice([FOODS, THINGS, ANIMALS, COLOURS])
    items = rng.sample(source, rng.randint(3, 6))
    joined = ", ".join(items)
    old, new = rng.choice(items), rng.choice([item for item in source if item not in items])
    return rng.choice(
        [
            (f"Repeat this list: {joined}.", f"{capitalized(joined)}."),
            (f"Say it again: {joined}.", f"{capitalized(joined)}."),
            (
                f"Write {new} instead of {old}: {joined}.",
                f"{capitalized(', '.join(new if i == old else i for i in items))}.",
            ),
            ("Count to ten.", "One, two, three, four, five, six, seven, eight, nine, ten."),
            ("Count from ten to one.", "Ten, nine, eight, seven, six, five, four, three, two, one."),
            (f"What is the first word in this list: {joined}?", f"The first word is {items[0]}."),
            (f"What is the last word in this list: {joined}?", f"The last word is {items[-1]}."),
        ]
    )


def chat(rng: random.Random) -> str:
    """A conversation, rendered as the tokenizer's chat template does; `END` after each answer."""
    turns = [_small_talk(rng)] if rng.random() < 0.35 else []
    facts = draw_facts(rng, rng.randint(0, 3))
    turns += [(fact.question, rng.choice([fact.sentence, f"{fact.short}."])) for fact in facts]
    if rng.random() < 0.4:
        turns.insert(rng.randint(0, len(turns)), _list_request(rng))
    if not turns or rng.random() < 0.4:
        turns.append(_story_request(rng))
    return "\n".join(f"User: {question}\nAssistant: {answer}{END}" for question, answer in turns)


def document(rng: random.Random) -> str:
    """One document, without the mark of its beginning but with `END`."""
    draw = rng.random()
    if draw < 0.64:
        return story(rng) + END
    if draw < 0.69:
        return portrait(rng) + END
    if draw < 0.82:
        return chat(rng)
    return (fact_text(rng) if draw < 0.91 else list_text(rng)) + END


def documents(seed: int, number: int) -> Iterator[str]:
    """`number` documents of `seed`: always the same ones."""
    rng = random.Random(seed)
    return (document(rng) for _ in range(number))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=10)
    arguments = parser.parse_args()
    for text in documents(arguments.seed, arguments.documents):
        print(text, end="\n\n")

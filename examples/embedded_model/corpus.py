"""The training texts of the embedded model: short stories, conversations, facts and lists, all made here.

    python corpus.py --seed 7 --documents 5        # read some

The same seed gives the same documents everywhere. Training uses train.py's seed, the held-out text another one.
"""

import argparse
import random
from collections.abc import Iterator

from facts import Fact, draw_facts
from tales import Answered, portrait, told
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
    THINGS,
    capitalized,
    child_name,
    describe,
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


def _items(rng: random.Random, most: int) -> tuple[list[str], str]:
    """A list of things of one kind, or of unknown names; and something that is not in it."""
    names = [made_up_name(rng, rng.choice(["he", "she"])) for _ in range(30)]
    source = rng.choice([FOODS, THINGS, ANIMALS, GIRLS, BOYS, COLOURS, list(PLACES), names, THINGS + FOODS + ANIMALS])
    items = rng.sample(source, rng.randint(3, most))
    return items, rng.choice([item for item in source if item not in items])


def list_text(rng: random.Random) -> str:
    """Lists that are counted, repeated, reversed or changed in one item: text that is largely a copy of itself."""
    items, new = _items(rng, 8)
    old = rng.choice(items)
    changed = [new if item == old else item for item in items]
    if rng.random() < 0.25:
        lines = ["List:", *(f"{place}. {item}" for place, item in enumerate(items, 1))]
        lines += [f"The same list with {new} instead of {old}:"]
        return "\n".join(lines + [f"{place}. {item}" for place, item in enumerate(changed, 1)])
    joined, joined_changed = ", ".join(items), ", ".join(changed)
    start = rng.randint(1, 12)
    hero = child_name(rng, rng.choice(["he", "she"]))
    packed = f"{hero} packed a bag: {joined}. Then {hero} took out the {old} and put in the {new}."
    return rng.choice(
        [
            f"List: {joined}.\nThe same list again: {joined}.",
            f"List: {joined}.\nThe same list again: {joined}.",
            f"List: {joined}.\nWith {new} instead of {old}: {joined_changed}.",
            f"Words: {joined}.\nBackwards: {', '.join(reversed(items))}.",
            f"{packed} Now in the bag: {joined_changed}.",
            f"Count: {', '.join(NUMBERS[start : start + rng.randint(4, 9)])}.",
            f"{hero} said: {joined}. Again {hero} said: {joined}. And once more: {joined}.",
        ]
    )


def hero_named(rng: random.Random, name: str, he: str) -> dict[str, str]:
    """Keys of the cast for a child that the user wants a story about."""
    return describe("hero", name, "boy" if he == "he" else "girl", he, rng.choice(["little", "brave", "shy", "kind"]))


def story_request(rng: random.Random) -> tuple[str, dict[str, str]]:
    """A user's request for a story, and the parts that it fixes."""
    ask = rng.choice(["Tell me a story", "Please tell me a story", "Can you tell me a story", "Write a short story"])
    end = "?" if ask.startswith("Can") else "."
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice([ask, ask, f"{ask} before I go to sleep"]) + end, {}
    if kind == 1:
        thing = rng.choice(THINGS)
        return f"{ask} about {with_article(thing)}{end}", {"thing": thing}
    he = rng.choice(["he", "she"])
    if kind == 2:
        animal = rng.choice(ANIMALS)
        return f"{ask} about {with_article(animal)}{end}", describe("hero", "", animal, he, rng.choice(ADJECTIVES))
    name = child_name(rng, he)
    child = rng.choice([name, name, f"a {'boy' if he == 'he' else 'girl'} named {name}"])
    return f"{ask} about {child}{end}", hero_named(rng, name, he)


def _story_turns(rng: random.Random) -> list[tuple[str, str]]:
    """A requested story, usually with some questions about it."""
    request, fixed = story_request(rng)
    text, questions = told(rng, **fixed)
    number = rng.choice([0, 1, 2, 3])
    return [(request, text), *((one.question, _answer(rng, one)) for one in questions[:number])]


def _answer(rng: random.Random, asked: Fact | Answered) -> str:
    return rng.choice([asked.sentence, f"{asked.short}."])


def questioned_story(rng: random.Random) -> str:
    """A story with questions about it."""
    text, questions = told(rng)
    separator = rng.choice([" ", "\n"])
    asked = (
        f"Question: {one.question}{separator}Answer: {_answer(rng, one)}" for one in questions[: rng.randint(2, 4)]
    )
    return "\n".join([text, *asked])


def _unknown(rng: random.Random) -> tuple[str, str]:
    """Replies of such a small model to all other topics."""
    name = made_up_name(rng, rng.choice(["he", "she"]))
    return rng.choice(
        [
            (f"What is the capital of {name}?", f"I do not know a country that is called {name}."),
            (f"Who is {name}?", f"I do not know {name}. Shall I tell you a story about {name}?"),
            (f"Where does {name} live?", f"I do not know where {name} lives."),
            (f"How old is {name}?", f"I do not know how old {name} is."),
            (f"What is a {name.lower()}?", f"I do not know what a {name.lower()} is."),
        ]
    )


def _small_talk(rng: random.Random) -> tuple[str, str]:
    name = child_name(rng, rng.choice(["he", "she"]))
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


def list_request(rng: random.Random) -> tuple[str, str]:
    items, new = _items(rng, 7)
    joined = ", ".join(items)
    old = rng.choice(items)
    return rng.choice(
        [
            (f"Repeat this list: {joined}.", f"{capitalized(joined)}."),
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
    turns = [_small_talk(rng)] if rng.random() < 0.3 else []
    turns += [(fact.question, _answer(rng, fact)) for fact in draw_facts(rng, rng.randint(0, 4))]
    for more, share in ((list_request, 0.4), (_unknown, 0.15)):
        if rng.random() < share:
            turns.insert(rng.randint(0, len(turns)), more(rng))
    if not turns or rng.random() < 0.35:
        turns += _story_turns(rng)
    return "\n".join(f"User: {question}\nAssistant: {answer}{END}" for question, answer in turns)


def document(rng: random.Random) -> str:
    """One document, without the mark of its beginning but with `END`."""
    draw = rng.random()
    if draw < 0.43:
        return told(rng)[0] + END
    if draw < 0.53:
        return questioned_story(rng) + END
    if draw < 0.57:
        return portrait(rng) + END
    if draw < 0.81:
        return chat(rng)
    return (fact_text(rng) if draw < 0.89 else list_text(rng)) + END


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

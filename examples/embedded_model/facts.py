"""Simple facts, each as a question in several wordings, a short answer and a sentence. Used by corpus.py."""

import random
from collections.abc import Callable
from typing import NamedTuple

from words import DAYS, NUMBERS, capitalized, plural, with_article, words


class Fact(NamedTuple):
    question: str
    short: str
    sentence: str


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split())


CAPITALS = _pairs(
    """
    France:Paris Italy:Rome Spain:Madrid Germany:Berlin Japan:Tokyo Egypt:Cairo Norway:Oslo Greece:Athens
    Poland:Warsaw Austria:Vienna Peru:Lima Kenya:Nairobi Cuba:Havana Portugal:Lisbon Ireland:Dublin Finland:Helsinki
    England:London Russia:Moscow China:Beijing Sweden:Stockholm Denmark:Copenhagen Canada:Ottawa Hungary:Budapest
    Turkey:Ankara
    """
)
SOUNDS = _pairs(
    """
    dog:barks cat:meows duck:quacks cow:moos sheep:bleats horse:neighs owl:hoots frog:croaks lion:roars
    snake:hisses bee:buzzes wolf:howls pig:grunts mouse:squeaks bird:sings
    """
)
HOMES = {
    "bird": "in a nest", "bee": "in a hive", "fox": "in a den", "rabbit": "in a burrow", "horse": "in a stable",
    "spider": "in a web", "bear": "in a cave", "cow": "in a barn", "dog": "in a kennel", "fish": "in the water",
    "hen": "on a farm", "lion": "in the grassland", "camel": "in the desert", "squirrel": "in a tree",
    "whale": "in the sea",
}  # fmt: skip
COLOURS = {
    "grass": "green", "snow": "white", "the sky": "blue", "coal": "black", "a lemon": "yellow", "blood": "red",
    "a carrot": "orange", "milk": "white", "a crow": "black", "a ripe tomato": "red", "the sun": "yellow",
    "chocolate": "brown", "an elephant": "grey", "a pig": "pink", "a ripe cherry": "red", "a leaf": "green",
}  # fmt: skip
LEGS = {
    "dog": "four", "bird": "two", "spider": "eight", "bee": "six", "horse": "four", "snake": "no", "hen": "two",
    "fish": "no", "cat": "four", "ant": "six", "table": "four", "cow": "four", "duck": "two", "fly": "six",
}  # fmt: skip
OPPOSITES = _pairs(
    """
    hot:cold big:small up:down day:night open:closed fast:slow wet:dry early:late happy:sad light:dark
    full:empty hard:soft young:old left:right good:bad long:short loud:quiet high:low strong:weak
    """
)
USES = {
    "key": "open a door", "pencil": "write", "spoon": "eat soup", "lamp": "make light", "clock": "see what time it is",
    "bed": "sleep", "umbrella": "stay dry in the rain", "boat": "cross the water", "hammer": "build things",
    "map": "find the way", "knife": "cut bread", "pot": "cook soup", "coat": "stay warm", "book": "read stories",
}  # fmt: skip
KINDS = {
    "fruit": ["apple", "pear", "plum", "cherry", "peach"], "animal": ["fox", "owl", "horse", "mouse", "bear"],
    "colour": ["red", "blue", "green", "yellow", "brown"], "bird": ["owl", "crow", "duck", "goose", "hen"],
    "season": ["spring", "summer", "autumn", "winter"], "city": ["Paris", "Rome", "Oslo", "Cairo", "London"],
}  # fmt: skip
MONTHS = words("January February March April May June July August September October November December")
SEASONS = {
    "spring": "the flowers begin to grow", "summer": "it is hot and the days are long",
    "autumn": "the leaves fall from the trees", "winter": "it is cold and it often snows",
}  # fmt: skip


def _capital(rng: random.Random) -> Fact:
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.3:
        return Fact(f"Which country has the capital {city}?", country, f"{city} is the capital of {country}.")
    question = rng.choice(
        ["What is the capital of {}?"] * 3
        + ["Which city is the capital of {}?", "Tell me the capital of {}.", "Do you know the capital of {}?"]
    )
    return Fact(question.format(country), city, f"The capital of {country} is {city}.")


def _sound(rng: random.Random) -> Fact:
    animal, sound = rng.choice(list(SOUNDS.items()))
    question = rng.choice(["What sound does {} make?", "What sound does {} make?", "What does {} do?"])
    return Fact(question.format(with_article(animal)), f"It {sound}", f"{capitalized(with_article(animal))} {sound}.")


def _home(rng: random.Random) -> Fact:
    animal, home = rng.choice(list(HOMES.items()))
    one = with_article(animal)
    question = rng.choice([f"Where does {one} live?", f"Where does {one} live?", f"Where do you find {one}?"])
    return Fact(question, capitalized(home), f"{capitalized(one)} lives {home}.")


def _colour(rng: random.Random) -> Fact:
    thing, colour = rng.choice(list(COLOURS.items()))
    word = rng.choice(["colour", "color"])
    question = rng.choice([f"What {word} is {thing}?", f"What {word} is {thing}?", f"Which {word} has {thing}?"])
    return Fact(question, capitalized(colour), f"{capitalized(thing)} is {colour}.")


def _legs(rng: random.Random) -> Fact:
    thing, number = rng.choice(list(LEGS.items()))
    one = with_article(thing)
    legs = f"{number} legs"
    question = rng.choice([f"How many legs does {one} have?", f"How many legs has {one}?"])
    return Fact(question, capitalized(legs), f"{capitalized(one)} has {legs}.")


def _opposite(rng: random.Random) -> Fact:
    pair = list(rng.choice(list(OPPOSITES.items())))
    rng.shuffle(pair)
    question = rng.choice(
        [f"What is the opposite of {pair[0]}?"] * 2
        + [f"Tell me the opposite of {pair[0]}.", f"Which word is the opposite of {pair[0]}?"]
    )
    return Fact(question, capitalized(pair[1]), f"The opposite of {pair[0]} is {pair[1]}.")


def _use(rng: random.Random) -> Fact:
    thing, use = rng.choice(list(USES.items()))
    one = with_article(thing)
    question = rng.choice([f"What is {one} for?", f"What is {one} for?", f"What can you do with {one}?"])
    return Fact(question, f"To {use}", f"You can use {one} to {use}.")


def _kind(rng: random.Random) -> Fact:
    kind, members = rng.choice(list(KINDS.items()))
    if rng.random() < 0.5:
        chosen = ", ".join(rng.sample(members, 3))
        return Fact(f"Name three {plural(kind)}.", capitalized(chosen), f"Three {plural(kind)} are {chosen}.")
    member = rng.choice(members)
    one = with_article(member) if kind in ("fruit", "animal", "bird") else member
    return Fact(f"What is {one}?", capitalized(with_article(kind)), f"{capitalized(one)} is {with_article(kind)}.")


def _next(rng: random.Random) -> Fact:
    names, word = (DAYS, "day") if rng.random() < 0.6 else (MONTHS, "month")
    place = rng.randrange(len(names))
    before = rng.random() < 0.3
    one, other = names[place], names[(place + (-1 if before else 1)) % len(names)]
    relation = "before" if before else "after"
    question = rng.choice([f"Which {word} comes {relation} {one}?", f"What {word} is {relation} {one}?"])
    return Fact(question, other, f"The {word} {relation} {one} is {other}.")


def _sum(rng: random.Random) -> Fact:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.25 and a >= b:
        return Fact(
            f"What is {NUMBERS[a]} minus {NUMBERS[b]}?",
            capitalized(NUMBERS[a - b]),
            f"{capitalized(NUMBERS[a])} minus {NUMBERS[b]} is {NUMBERS[a - b]}.",
        )
    question = rng.choice(["What is {} plus {}?", "What is {} plus {}?", "How much is {} plus {}?"])
    return Fact(
        question.format(NUMBERS[a], NUMBERS[b]),
        capitalized(NUMBERS[a + b]),
        f"{capitalized(NUMBERS[a])} plus {NUMBERS[b]} is {NUMBERS[a + b]}.",
    )


def _season(rng: random.Random) -> Fact:
    season, what = rng.choice(list(SEASONS.items()))
    return Fact(
        rng.choice([f"What is {season} like?", f"What happens in {season}?"]),
        f"In {season}, {what}",
        f"In {season}, {what}.",
    )


_KINDS_OF_FACTS: list[Callable[[random.Random], Fact]] = [
    _capital, _capital, _sound, _home, _colour, _legs, _opposite, _use, _kind, _next, _sum, _sum, _season,
]  # fmt: skip


def draw_facts(rng: random.Random, number: int) -> list[Fact]:
    """`number` facts without a repeated one, and never two of one kind in a row: greedy text must not learn to loop."""
    facts: list[Fact] = []
    last = None
    while len(facts) < number:
        kind = rng.choice(_KINDS_OF_FACTS)
        fact = kind(rng)
        if kind is not last and all(fact.sentence != other.sentence for other in facts):
            facts.append(fact)
            last = kind
    return facts

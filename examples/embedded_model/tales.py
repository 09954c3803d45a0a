"""How a story is told: a teller goes through the tables of stories.py and episodes.py with one cast of words.py.

Called by corpus.py. Two episodes that need more than a table, `asking` and `helpers`, are told in code.
"""

import itertools
import random
import re
from typing import NamedTuple

from episodes import ANSWERS, EPISODES, MORALS, WORKS, Step
from questions import OF_ALL, OF_EPISODES, OF_FRIENDS, OF_NAMED, OF_THINGS
from stories import ENDINGS, MORNINGS, NEXT_TIME, OPENINGS, PORTRAITS, REMARKS, SAME_DAY, TRAITS
from words import ANIMALS, TIMES, capitalized, draw_cast, with_article

_ABOUT_THINGS = ("lost", "trade", "water")  # episodes about the thing that the hero owns
_SEARCHES: Step = (
    "{hero} wanted to know what the most beautiful thing in the world is.",
    '{hero} asked, "What is the most beautiful thing in the world?"',
)
_REASONS = ("I am too tired", "I have no time", "It is too hot", "I want to sleep", "I want to play")
_HELPERS = (  # three forms of one question: a refrain would teach greedy decoding to go round in circles
    '{hero} wanted to make {what}. "Who will help me to {works[0]}?" asked {hero}. '
    '"Not today," said the {animals[0]}. "{reasons[0]}." So {hero} did it alone. '
    'Then {hero} asked, "Can you help me to {works[1]}?" The {animals[1]} looked away. "{reasons[1]}," it said. '
    'At last, {hero} wanted to {works[2]}, but the {animals[0]} said, "{reasons[2]}." '
    "When everything was ready, the {animals[0]} and the {animals[1]} came and wanted to {share}."
)


_NAMED_AGAIN = 0.25  # share of sentences that name the hero where "he" or "she" would do


class Answered(NamedTuple):
    """A question about a story, and its answer in two lengths."""

    question: str
    short: str
    sentence: str


class Teller:
    """Says steps with one cast; introduces the friend where the step itself does not."""

    def __init__(self, rng: random.Random, cast: dict[str, str]) -> None:
        self.rng = rng
        self.cast = cast
        self.friend_known = False
        self.thing_known = False

    def say(self, step: Step) -> str:
        return self.fill(self.rng.choice(step))

    def fill(self, sentence: str) -> str:
        self.friend_known |= "{both}" in sentence.lower()
        for key in ("{a_friend}", "{A_friend}"):
            if self.friend_known:  # nobody is introduced twice
                sentence = sentence.replace(key, key.replace("a_", "").replace("A_f", "F"))
            self.friend_known |= key in sentence
        if not self.friend_known and "{friend}" in sentence.lower():
            name, introduced = "{friend}", "{his} friend {friend}"
            if "{Friend}" in sentence:
                name, introduced = "{Friend}", "{His} friend {friend}"
            sentence = sentence.replace(name, introduced, 1)
            self.friend_known = True
        if self.thing_known:
            sentence = sentence.replace("{a_thing}", "{his} {col_thing}")
        self.thing_known |= "thing}" in sentence
        if sentence.startswith("{He} ") and self.rng.random() < _NAMED_AGAIN:
            sentence = "{Hero} " + sentence.removeprefix("{He} ")
        return sentence.format_map(self.cast)

    def episode(self, name: str, time: str) -> list[str]:
        """`time` ("One day,") leads in, or nothing does."""
        self.cast["moral"] = MORALS[name]
        if name in ("asking", "helpers"):
            start, *sentences = self._asking() if name == "asking" else self._helpers()
            return [f"{time} {start}" if time else capitalized(start), *sentences]
        version = self.rng.randrange(2)
        steps = [(step[version],) if isinstance(step, list) else step for step in EPISODES[name]]
        start, *sentences = map(self.say, steps)
        return [f"{time} {start}" if time else capitalized(start), *filter(None, sentences)]

    def _asking(self) -> list[str]:
        """The hero asks three animals the same question."""
        hero = self.cast["hero"]
        sentences = [self.say(_SEARCHES)]
        animals = self.rng.sample([animal for animal in ANSWERS if animal not in hero], 3)
        for animal, verb in zip(animals, ["First, {he} asked", "Then {he} asked", "At last, {he} asked"], strict=True):
            sentences.append(verb.format_map(self.cast) + f' the {animal}. "{ANSWERS[animal]}," said the {animal}.')
        sentences.append(self.say(("{Hero} thought about it for a long time.", "Each of them had another answer.")))
        sentences.append(
            self.say(('"For me, it is my home," said {hero}.', '"For me, it is a good friend," said {hero}.'))
        )
        return sentences

    def _helpers(self) -> list[str]:
        """Two animals do not want to help with the work."""
        hero, rng = self.cast["hero"], self.rng
        what, *works = rng.choice(WORKS)
        animals = rng.sample([animal for animal in ANIMALS if animal not in hero], 2)
        reasons = rng.sample(_REASONS, 3)
        told = _HELPERS.format(
            hero=hero,
            what=what,
            works=works,
            animals=animals,
            reasons=reasons,
            share="sit there" if what in ("a fire", "a garden") else "have some of it",
        )
        ends = (
            '"Next time, help me first," said {hero}, but {he} was not angry.',
            '"You did not help me," said {hero}. "But you can stay if you help me tomorrow."',
        )
        return [told, self.say(ends)]


def story(rng: random.Random, **fixed: str) -> str:
    """One or two episodes with one hero; `fixed` are keys of the cast that are given."""
    return told(rng, **fixed)[0]


def told(rng: random.Random, **fixed: str) -> tuple[str, list[Answered]]:
    """A story, and questions about it in random order."""
    teller = Teller(rng, draw_cast(rng, **fixed))
    if rng.random() < 0.4:
        template = rng.choice(MORNINGS)
        opening, time = [teller.fill(template)], teller.say(SAME_DAY)
    else:
        template = rng.choice(OPENINGS)
        opening, time = [teller.fill(template)], teller.cast["time"] + ","
        if "{Both}" not in template:  # of two, it would not be clear who is meant
            traits = TRAITS if not teller.thing_known else tuple(one for one in TRAITS if "thing}" not in one)
            opening += [teller.say(traits), teller.say(REMARKS) if rng.random() < 0.3 else ""]
    names = list(_ABOUT_THINGS if "thing}" in template or "thing" in fixed else MORALS)
    rng.shuffle(names)
    names = names[: 2 if rng.random() < 0.25 else 1]
    sentences = opening + teller.episode(names[0], time)
    for name in names[1:]:
        teller.cast["Time"] = rng.choice([time for time in TIMES if time != teller.cast["Time"]])
        sentences += teller.episode(name, teller.say(NEXT_TIME))
    sentences.append(teller.say(tuple(end for end in ENDINGS if teller.friend_known or "{friend}" not in end)))
    text = " ".join(sentence for sentence in sentences if sentence)
    return text, _questions(teller, names, text)


def _questions(teller: Teller, names: list[str], text: str) -> list[Answered]:
    """Questions about the told `text`, each answer once."""
    cast = teller.cast | {"a_herokind": with_article(teller.cast["herokind"])}
    cast["A_herokind"] = capitalized(cast["a_herokind"])
    of_things = (asked for thing, asked in OF_THINGS.items() if thing.format_map(cast) in text)
    possible = [*OF_ALL, *itertools.chain(*of_things, *(OF_EPISODES[name] for name in names))]
    if len(names) > 1:  # in two episodes, it may be two things
        possible = [question for question in possible if "thing2" not in question[1]]
    possible += OF_FRIENDS if teller.friend_known else ()
    known = cast["herokind"] in ("boy", "girl") or cast["herokind"] in text
    possible += OF_NAMED if known and not cast["hero"].startswith("the ") else ()
    teller.rng.shuffle(possible)
    answered: dict[str, Answered] = {}
    for question, short, sentence in possible:
        answer = short.format_map(cast)
        is_told = re.search(rf"\b{re.escape(answer)}\b", text, re.IGNORECASE)
        if answer not in answered and (is_told or short == "{a_herokind}"):
            answered[answer] = Answered(question.format_map(cast), capitalized(answer), sentence.format_map(cast))
    return list(answered.values())


def portrait(rng: random.Random) -> str:
    """Somebody or some place described in the present tense."""
    teller = Teller(rng, draw_cast(rng))
    teller.friend_known = True
    return " ".join(sentence for sentence in map(teller.say, rng.choice(PORTRAITS)) if sentence)

"""Words of the embedded model's little world, and the cast that a story draws from them.

Used by tales.py, facts.py and corpus.py. Everything random comes from the `random.Random` that the caller passes in.
"""

import random


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    return [phrase.strip() for phrase in text.split("|")]


GIRLS = words(
    """
    Anna Lily Mia Rosa Nora Tess Ivy Clara Ruth Wren Dora Hazel Emma Zoe Ella Maya Sofia Lucy Alice Greta Mary Jane
    Sara Lena Eva Kate Julia Olivia Laura Marta Nina Grace Helen Amy
    """
)
BOYS = words(
    """
    Tom Ben Sam Otto Finn Leo Max Hugo Carl Jack Emil Noah Oscar Theo Adam Peter David Paul Felix Henry John Tim Bob
    Jim Liam Lucas Simon Martin Robert Erik Karl Daniel Mark Alex
    """
)
PETS = {
    "he": words("Rusty Pip Bruno Milo Shadow Oliver Biscuit"),
    "she": words("Bella Coco Daisy Luna Poppy Ruby Pepper"),
}
SYLLABLES = words(
    """
    ba be bi da de do fa fe fi ga go ha jo ka ke ko la le li lo lu ma me mi mo na ne ni no pa pe ra re ri ro sa se si ta
    te ti to va ve vi wa ya za zo
    """
)
LAST_SYLLABLES = {  # made-up names tell who is a boy and who is a girl
    "he": words("ro lo no to ko bo mo ren lan tus nik dor man us"),
    "she": words("na la ra ri sa ta lia ma nia ne dia lina tta ya"),
}
ANIMALS = words(
    """
    fox owl hen cat dog bear mouse frog rabbit horse goat duck crow turtle hedgehog otter squirrel pony sheep wolf
    deer badger goose mole
    """
)
PEOPLE = {  # and beings of tales; None: he or she
    "king": "he", "queen": "she", "prince": "he", "princess": "she", "baker": None, "farmer": None, "teacher": None,
    "doctor": None, "sailor": None, "fisherman": "he", "shepherd": None, "painter": None, "wizard": "he",
    "witch": "she", "giant": "he", "dragon": None, "robot": None, "old man": "he", "old woman": "she",
    "gardener": None, "pirate": None,
}  # fmt: skip
JOBS = words("baker farmer teacher doctor sailor painter gardener pilot cook singer")
ADJECTIVES = words(
    """
    little small big old young brave shy clever kind hungry sleepy happy quiet funny curious lonely proud gentle
    tired busy friendly careful cheerful
    """
)
COLOURS = words("red blue green yellow white black brown orange purple golden silver grey pink")
THINGS = words(
    """
    ball boat hat lamp book drum bell key basket box cup ring map whistle blanket clock bucket shell button flute
    doll mirror lantern necklace bag spoon puzzle coin scarf umbrella pencil candle pillow
    """
)
FLYING = phrases("kite|hat|scarf|balloon|ball|paper plane")
BIG_THINGS = phrases("boat|wagon|table|chair|bridge|tree house|tent|little house|fence|sled")
FOODS = words(
    """
    apple pear cake plum carrot pie nut berry cookie pancake sandwich peach egg potato orange tomato cherry bun
    """
)
DISHES = phrases("apple pie|vegetable soup|fresh bread|berry cake|pancakes|cookies|plum jam|pumpkin soup|a big salad")
PLANTS = phrases("sunflower|rose|apple tree|tulip|bean|pumpkin|cherry tree|daisy")
PLACES = {  # noun phrase: preposition
    "forest": "in", "river": "at", "hill": "on", "garden": "in", "village": "in", "market": "at", "farm": "on",
    "lake": "at", "school": "at", "barn": "in", "bridge": "on", "beach": "on", "meadow": "in", "mountain": "on",
    "park": "in", "old mill": "at", "tower": "in", "cave": "in", "library": "in", "station": "at", "field": "in",
    "harbour": "at", "castle": "in", "pond": "at",
}  # fmt: skip
HOMES = phrases(
    """
    in a small house near the {place2}|at the edge of the forest|in a village by the sea|on a farm|in a little town|
    near the {place2}|in a big house with a green door|at the foot of a mountain|in a house with a red roof|
    on a quiet street|not far from the {place2}
    """
)
HOBBIES = phrases(
    """
    to sing|to paint|to climb trees|to read books|to look at the stars|to swim in the lake|to tell jokes|
    to help others|to collect stones|to cook|to dance|to run in the wind|to play in the rain|to listen to stories|
    to make new friends|to draw pictures
    """
)
WEATHER = words("sunny rainy windy cold warm snowy foggy cloudy hot bright")
TIMES = phrases(
    """
    One morning|One evening|One day|One afternoon|Late one night|Early one morning|On a long summer day|
    In the middle of winter|On the first day of spring|One day after school|Before breakfast|On Monday|On Saturday|
    On Sunday|One Friday
    """
)
FEELINGS = words("happy sad angry afraid surprised proud tired glad worried calm excited")
SKILLS = phrases(
    "to swim|to ride a bike|to play the flute|to read|to dance|to paint|to climb|to whistle|to play the drum"
)
ELDERS = {"mother": "she", "father": "he", "grandmother": "she", "grandfather": "he", "aunt": "she", "uncle": "he"}
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NUMBERS = words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty
    """
)

PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh", "o")) else "s")


def capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def made_up_name(rng: random.Random, he: str) -> str:
    """A name that no list has, so that the model learns to copy the name it was given; for him or her."""
    begin = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 1, 1, 2))))
    return capitalized(begin + rng.choice(LAST_SYLLABLES[he]))


def child_name(rng: random.Random, he: str, *, taken: str = "") -> str:
    if rng.random() < 0.5:
        return made_up_name(rng, he)
    return rng.choice([name for name in (BOYS if he == "he" else GIRLS) if name not in taken])


def describe(prefix: str, name: str, kind: str, he: str, adjective: str, named: str = "named") -> dict[str, str]:
    """One character as keys of the cast; `name` is empty for "the fox".

    For the prefix "hero": `hero` ("Mia", "the fox"), `a_hero` ("a shy girl named Mia", "a shy fox"), `the_hero` ("Mia",
    "the shy fox"), `some_hero` ("Mia", "a shy fox"), `herokind`, `he`, `him`, `his`. For "friend" likewise, but
    `fhe`, `fhim`, `fhis`.
    """
    first = f"{with_article(adjective)} {kind}" + (f" {named} {name}" if name else "")
    own = {
        prefix: name or f"the {kind}",
        "a_" + prefix: first,
        "the_" + prefix: name or f"the {adjective} {kind}",
        "some_" + prefix: name or first,
        prefix + "kind": kind,
    }
    short = "" if prefix == "hero" else prefix[0]
    subject, object_, possessive = PRONOUNS[he]
    return own | {short + "he": subject, short + "him": object_, short + "his": possessive}


def _character(rng: random.Random, prefix: str, *, taken: str = "", not_he: str = "") -> dict[str, str]:
    """A child or an animal or somebody of tales."""
    he = rng.choice(["he", "she"]) if not not_he or rng.random() < 0.2 else {"he": "she", "she": "he"}[not_he]
    adjective, named = rng.choice(ADJECTIVES), rng.choice(["named", "called", "named"])
    if rng.random() < (0.55 if prefix == "hero" else 0.45):  # a child
        adjective = rng.choice([word for word in ADJECTIVES if word not in ("old", "big")])
        kind = "boy" if he == "he" else "girl"
        return describe(prefix, child_name(rng, he, taken=taken), kind, he, adjective, named)
    draw = rng.random()
    if draw < 0.15:
        kind = rng.choice([one for one, its in PEOPLE.items() if its in (he, None) and one not in taken])
        adjective = rng.choice(["kind", "lonely", "friendly", "happy", "clever", "funny", "quiet"])
        return describe(prefix, "", kind, he, adjective)
    kind = rng.choice([animal for animal in ANIMALS if animal not in taken])
    if draw < 0.4:
        pets = [pet for pet in PETS[he] if pet not in taken]
        name = made_up_name(rng, he) if rng.random() < 0.5 else rng.choice(pets)
        return describe(prefix, name, kind, he, adjective, named)
    return describe(prefix, "", kind, he, adjective)


def draw_cast(rng: random.Random, **fixed: str) -> dict[str, str]:
    """Everything that the sentences of stories.py may name, drawn once per story so that it stays the same in it.

    `fixed` replaces what was drawn: what somebody asked a story about. Every key also exists with a capital letter.
    """
    hero = _character(rng, "hero") | {key: text for key, text in fixed.items() if key != "thing"}
    friend = _character(rng, "friend", taken=hero["hero"] + " " + hero["herokind"], not_he=hero["he"])
    thing, thing2 = rng.sample(THINGS, 2)
    place, place2, place3 = rng.sample(list(PLACES), 3)
    food, food2 = rng.sample(FOODS, 2)
    colour, colour2 = rng.sample(COLOURS, 2)
    elder, elder2 = rng.sample(list(ELDERS), 2)
    number = rng.randint(3, 10)
    fly, plant = rng.choice(FLYING), rng.choice(PLANTS)
    cast = friend | hero
    cast |= {"thing": thing, "thing2": thing2, "big": rng.choice(BIG_THINGS), "dish": rng.choice(DISHES)} | fixed
    thing = cast["thing"]
    name_he = rng.choice(["he", "she"])
    cast |= {
        "name": child_name(rng, name_he), "child": child_name(rng, rng.choice(["he", "she"])),
        "bird": rng.choice(["owl", "crow", "duck"]), "both": f"{cast['hero']} and {cast['friend']}",
        "a_thing": with_article(f"{colour} {thing}"), "col_thing": f"{colour} {thing}", "thing_colour": colour,
        "a_plain_thing": with_article(thing), "things": plural(thing),
        "a_thing2": with_article(f"{colour2} {thing2}"), "col_thing2": f"{colour2} {thing2}", "thing2_colour": colour2,
        "fly": fly, "a_fly": with_article(f"{colour} {fly}"), "col_fly": f"{colour} {fly}",
        "place": place, "in_place": f"{PLACES[place]} the {place}", "place2": place2, "place3": place3,
        "food": food, "a_food": with_article(food), "foods": plural(food), "foods2": plural(food2),
        "plant": plant, "a_plant": with_article(plant), "skill": rng.choice(SKILLS),
        "elder": elder, "ehe": ELDERS[elder], "ehim": PRONOUNS[ELDERS[elder]][1], "elder2": elder2,
        "home": rng.choice(HOMES).format(place2=place2), "hobby": rng.choice(HOBBIES), "weather": rng.choice(WEATHER),
        "time": rng.choice(TIMES), "n": NUMBERS[number], "n_less": NUMBERS[number - 1], "n_more": NUMBERS[number + 1],
        "job": rng.choice(JOBS), "colour": colour2, "feeling": rng.choice(FEELINGS), "day": rng.choice(DAYS),
        "animal": rng.choice([animal for animal in ANIMALS if animal not in (hero["herokind"], friend["friendkind"])]),
    }  # fmt: skip
    cast["a_bird"] = with_article(f"{colour2} {cast['bird']}")
    cast["an_animal"] = with_article(cast["animal"])
    cast["a_job"] = with_article(cast["job"])
    return cast | {capitalized(key): capitalized(text) for key, text in cast.items()}

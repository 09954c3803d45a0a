"""Questions about a story that was just told, whose answers are in it. Used by tales.py.

Per episode and for all: a question, its short answer and its long one, in keys of `words.draw_cast`. A question may be
asked if the short answer was told, word by word.
"""

Question = tuple[str, str, str]

OF_ALL: tuple[Question, ...] = (
    ("Who is the story about?", "{hero}", "The story is about {hero}."),
    ("Who is this story about?", "{hero}", "It is about {hero}."),
    ("Where did {hero} live?", "{home}", "{Hero} lived {home}."),
    ("What did {hero} love?", "{hobby}", "{Hero} loved {hobby}."),
    ("What did {hero} learn?", "that {moral}", "{Hero} learned that {moral}."),
)
OF_FRIENDS: tuple[Question, ...] = (  # once there is one
    ("Who was the friend of {hero}?", "{friend}", "The friend of {hero} was {friend}."),
    ("Who else is in the story?", "{friend}", "{Friend} is in the story, too."),
    ("Whose friend was {friend}?", "{hero}", "{Friend} was the friend of {hero}."),
)
OF_NAMED: tuple[Question, ...] = (  # heroes with a name
    ("What is the name of the {herokind}?", "{hero}", "The name of the {herokind} is {hero}."),
    ("What was the {herokind} called?", "{hero}", "The {herokind} was called {hero}."),
    ("Who was {hero}?", "{a_herokind}", "{Hero} was {a_herokind}."),
)
OF_THINGS: dict[str, tuple[Question, ...]] = {  # once their colours were told
    "{col_thing}": (
        ("What colour was the {thing}?", "{thing_colour}", "The {thing} was {thing_colour}."),
        ("What was {thing_colour}?", "the {thing}", "The {thing} was {thing_colour}."),
    ),
    "{col_thing2}": (("What colour was the {thing2}?", "{thing2_colour}", "The {thing2} was {thing2_colour}."),),
    "{col_fly}": (("What colour was the {fly}?", "{thing_colour}", "The {fly} was {thing_colour}."),),
}
OF_EPISODES: dict[str, tuple[Question, ...]] = {
    "lost": (
        ("What did {hero} lose?", "{his} {thing}", "{Hero} lost {his} {thing}."),
        ("Who helped {hero}?", "{friend}", "{Friend} helped {hero}."),
        ("Where did they look for the {thing}?", "the {place2}", "They went to the {place2}."),
    ),
    "hungry": (
        ("Who was hungry?", "{friend}", "{Friend} was hungry."),
        ("Who gave {friend} something to eat?", "{hero}", "{Hero} gave {fhim} something to eat."),
        ("How many {foods} did {hero} have?", "{n} {foods}", "{Hero} had {n} {foods}."),
    ),
    "trade": (
        ("What did {hero} get from {friend}?", "the {thing2}", "{Hero} got the {thing2}."),
        ("What did {friend} get from {hero}?", "the {thing}", "{Friend} got the {thing}."),
    ),
    "storm": (
        ("Who was in the rain and the wind?", "{hero}", "{Hero} was out in the storm."),
        ("Whom did {hero} meet in the storm?", "{friend}", "{Hero} met {friend}."),
        ("Where did {hero} go?", "the {place}", "{Hero} went to the {place}."),
    ),
    "baking": (
        ("What did {hero} want to make?", "{dish}", "{Hero} wanted to make {dish}."),
        ("Who came to eat?", "{friend}", "{Friend} came to eat with them."),
    ),
    "water": (
        ("What fell into the water?", "the {thing}", "The {thing} of {hero} fell into the water."),
        ("Who got the {thing} out of the water?", "{friend}", "{Friend} got it out of the water."),
    ),
    "tree": (
        ("What was up in the tree?", "the {fly}", "The {fly} was in the tree."),
        ("Who helped {hero}?", "{friend}", "{Friend} helped {hero}."),
    ),
    "noise": (
        ("Who made the noise?", "{friend}", "It was {friend}."),
        ("Who heard a noise?", "{hero}", "{Hero} heard a noise."),
    ),
    "race": (
        ("Where did they run to?", "the {place2}", "They ran to the {place2}."),
        ("Who ran with {hero}?", "{friend}", "{Friend} ran with {hero}."),
    ),
    "build": (
        ("What did {hero} want to build?", "a {big}", "{Hero} wanted to build a {big}."),
        ("Who helped {hero}?", "{friend}", "{Friend} helped {hero}."),
    ),
    "seed": (
        ("What grew in the garden?", "{a_plant}", "{A_plant} grew in the garden."),
        ("What was it in summer?", "a beautiful {plant}", "In summer, it was a beautiful {plant}."),
    ),
    "birthday": (
        ("Whose birthday was it?", "{hero}", "It was the birthday of {hero}."),
        ("What did {hero} get?", "{a_thing2}", "{Hero} got {a_thing2}."),
    ),
    "truth": (
        ("Who broke something?", "{hero}", "{Hero} broke something."),
        ("Whom did {hero} tell the truth?", "{his} {elder}", "{Hero} told {his} {elder} the truth."),
    ),
    "way": (
        ("Who lost the way?", "{hero}", "{Hero} lost the way."),
        ("Who showed {hero} the way?", "{friend}", "{Friend} showed {hero} the way."),
    ),
    "learn": (("What did {hero} want to learn?", "{skill}", "{Hero} wanted to learn {skill}."),),
    "sick": (
        ("Who was sick?", "{friend}", "{Friend} was sick."),
        ("Who came to visit {friend}?", "{hero}", "{Hero} came to visit {fhim}."),
    ),
    "snow": (("Who played with {hero} in the snow?", "{friend}", "{Friend} played with {hero}."),),
    "shop": (
        ("What did {hero} want to have?", "{a_thing2}", "{Hero} wanted to have {a_thing2}."),
        ("How many coins did {hero} have?", "{n} coins", "{Hero} had {n} coins."),
    ),
    "quarrel": (
        ("What did they find?", "{a_thing2}", "They found {a_thing2}."),
        ("Who was angry with {hero}?", "{friend}", "{Friend} was angry with {hero}."),
    ),
    "box": (("What was in the box?", "{a_thing2}", "There was {a_thing2} in the box."),),
    "bird": (("Who helped the bird?", "{hero}", "{Hero} helped the bird."),),
    "visit": (
        ("Whom did {hero} visit?", "{his} {elder2}", "{Hero} visited {his} {elder2}."),
        ("How long did {hero} stay?", "{n} days", "{Hero} stayed for {n} days."),
        ("What was the surprise?", "{a_thing2}", "The surprise was {a_thing2}."),
    ),
    "music": (("Who played the drum?", "{hero}", "{Hero} played the drum."),),
    "greedy": (
        ("Who ate all the {foods}?", "{hero}", "{Hero} ate them all."),
        ("How many {foods} were there?", "{n} {foods}", "There were {n} {foods}."),
    ),
    "picture": (
        ("Who got the picture?", "{his} {elder}", "{His} {elder} got the picture."),
        ("Who painted a picture?", "{hero}", "{Hero} painted a picture."),
    ),
    "moon": (("Who had a dream?", "{hero}", "{Hero} had a dream."),),
    "bridge": (("Who crossed the river?", "{hero}", "{Hero} crossed the river."),),
    "map": (
        ("What was the treasure?", "{a_thing2}", "The treasure was {a_thing2}."),
        ("Who found the treasure with {hero}?", "{friend}", "{Friend} found it with {hero}."),
    ),
    "asking": (("Who asked the animals?", "{hero}", "{Hero} asked them."),),
    "helpers": (("Who did all the work?", "{hero}", "{Hero} did all the work."),),
}

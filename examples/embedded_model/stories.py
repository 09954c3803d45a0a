"""Sentences around the episodes: how stories open and end, remarks between, and portraits in the present tense.

Every table holds variants of which one is told; an empty variant says nothing. Names in braces are the keys of
`words.draw_cast`.
"""

from episodes import Step

OPENINGS: Step = (
    "Once upon a time, there was {a_hero}.",
    "Once upon a time, there was {a_hero} who lived {home}.",
    "Once upon a time, there was {a_hero} who loved {hobby}.",
    "Once upon a time, {a_hero} lived {home} with {his} {elder}.",
    "Once upon a time, {a_hero} lived {home}.",
    "Long ago, {a_hero} lived {home}.",
    "There was once {a_hero} who lived {home}.",
    "There was once {a_hero} who loved {hobby}.",
    "{A_hero} lived {home}.",
    "{The_hero} lived {home} with {his} {elder}.",
    "{The_hero} loved {hobby}.",
    "{The_hero} had {a_thing} and loved it very much.",
    "Once there was {a_hero}. Everyone {in_place} knew {him}.",
    "In a house near the {place2}, there lived {a_hero}.",
    "This is the story of {a_hero} and {a_thing}.",
    "This is a story about {a_hero} who loved {hobby}.",
    "{Hero} lived {home} with {his} {elder}.",
    "{Hero} was the best friend of {a_friend}.",
    "{Both} were best friends.",
    "{Some_hero} sat {in_place} and ate {a_food}.",
    "{Both} lived {home}.",
    "{Both} met every day {in_place}.",
)

MORNINGS: Step = (  # openings that start at once
    "{Time}, {some_hero} woke up early. It was {weather} outside.",
    "{Time}, {some_hero} was playing {in_place}.",
    "{Time}, {some_hero} looked out of the window. It was {weather}.",
    "{Time}, {some_hero} went for a walk to the {place}.",
    "{Time}, {some_hero} had nothing to do.",
    "It was a {weather} day, and {some_hero} wanted to go outside.",
    "It was a {weather} morning. {Some_hero} sat {in_place} and looked around.",
    '"What a {weather} day!" said {hero}.',
    "{The_hero} was sitting {in_place}.",
    "One day, {hero} and {his} {elder} went to the {place}.",
    "One day, {both} went to the {place}.",
    "One day, {some_hero} met {a_friend} {in_place}.",
    "{Hero} looked at the sky. It was a {weather} day.",
    "{The_hero} woke up and looked outside. It was {weather}.",
)

TRAITS: Step = (
    "{He} loved {hobby}.",
    "Every day, {he} went to the {place} to play.",
    "{His} {elder} often told {him} stories in the evening.",
    "{He} always carried {a_thing}.",
    "For {his} birthday, {his} {elder} gave {him} {a_thing}.",
    "{Hero} wanted to see the whole world.",
    "{Hero} had many questions about everything.",
    "Sometimes {he} felt a little lonely.",
    "What {hero} liked most of all was {a_food}.",
    "",
    "",
)

REMARKS: Step = (  # said between the opening and the episode
    "{Hero} liked {foods}, but {he} did not like {foods2}.",
    "When it was {weather}, {he} liked to sit {in_place}.",
    "{His} best friend was {a_friend}.",
    "{Hero} wanted to be {a_job} one day.",
    "Every {day}, {hero} and {his} {elder} ate {dish}.",
    "{Hero} was afraid of the dark.",
    "{He} often thought about the sea and the mountains.",
    "{He} did not have much money, but {he} was happy.",
    "Before breakfast, {he} always fed {his} {animal}.",
)

PORTRAITS: tuple[tuple[Step, ...], ...] = (
    (
        ("My name is {name}.", "Hello, my name is {name}.", "I am {name}."),
        ("I am {n} years old.", "I am {n} years old and I live {home}."),
        (
            "I live with my {elder} and my {animal}.",
            "My {elder} is {a_job}.",
            "I have {an_animal} and {n_more} {things}.",
        ),
        ("My best friend is {friend}.", "My best friend is called {child}.", "I have {n} friends."),
        ("I like {foods}, but I do not like {foods2}.", "I love {hobby}.", "My favourite colour is {colour}."),
        (
            "On {day}, I go to the {place} with my {elder}.",
            "Every {day}, we eat {dish}.",
            "In summer, I play {in_place}.",
        ),
        ("When it is {weather}, I stay at home and read.", "When it is {weather}, I am {feeling}.", ""),
        ("When I grow up, I want to be {a_job}.", "One day, I want to see the whole world.", "I am happy here."),
    ),
    (
        ("This is {name}.", "Look, this is {name}.", "Do you know {name}?"),
        ("{name} is {n} years old and lives {home}.", "{name} lives {home}."),
        ("{name} has {a_thing} and {an_animal}.", "{name} has {an_animal}. It is {colour}."),
        ("The {animal} likes {foods}.", "The {animal} sleeps under the table.", "The {animal} is always hungry."),
        ("On {day}, they go to the {place}.", "In the morning, they walk to the {place2}."),
        (
            "There they meet {friend}.",
            "There they look at the {things} and the flowers.",
            "There they play until evening.",
        ),
        ("In the evening, {name} is tired and goes to bed.", "They are very good friends."),
    ),
    (
        ("The {place} is a beautiful place.", "The {place} is near the {place2}.", "Come with me to the {place}."),
        ("There you can see {n} trees and {an_animal}.", "There is a {big} and an old house."),
        ("In the old house lives {a_friend}.", "Next to it, there is {a_plant}.", "Behind it, you can find {foods}."),
        ("When it is {weather}, everyone comes here.", "On {day}, there is music.", "In winter, it is very quiet."),
        (
            "Children play there with their {things}.",
            "People sit there and eat {foods}.",
            "{A_bird} sits in a tree and sings.",
        ),
        ("I like to be there.", "It is never boring.", "Nobody wants to go home."),
    ),
)

NEXT_TIME: Step = (
    "The next day,", "A few days later,", "One week later,", "{Time},", "{Time},", "{Time},", "{Time},",
    "On a {weather} day,",
)  # fmt: skip

SAME_DAY: Step = (
    "A little later,", "After breakfast,", "At noon,", "Then", "After a while,", "That day,", "An hour later,", "", "",
)  # fmt: skip

ENDINGS: Step = (
    "In the evening, {hero} went home and slept well.",
    "From that day on, {hero} and {friend} were good friends.",
    "And so {hero} learned that {moral}.",
    "And so {hero} learned that {moral}.",
    "After that day, {hero} always knew that {moral}.",
    "{Hero} never forgot that day.",
    "At home, {hero} told {his} {elder} all about it.",
    "It was a good day for {hero}.",
    "{Hero} fell asleep with a smile.",
    "{Hero} and {friend} lived happily ever after.",
    "{Hero} and {friend} often talked about it later.",
    "{Hero} was happy. The end.",
)

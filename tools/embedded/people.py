"""Invented people, what is said about them, and the questions that this answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

from .almanac import bucket
from .wording import words

STARTS = words("starts")
MIDDLES = words("middles")
ENDS = words("ends")
JOBS = words("jobs")
PETS = words("pets")
COLORS = words("colors")
FOODS = words("foods")


@dataclass(frozen=True, slots=True)
class Fact:
    """A kind of statement about a person: ``{p}`` is the person, ``{v}`` the value."""

    label: str
    title: str
    statement: str
    questions: tuple[str, ...]
    values: tuple[str, ...] = ()
    hop: str = ""


FACTS = (
    Fact(
        "City",
        "Home",
        "{p} lives in {v}.",
        (
            "Where does {p} live?",
            "In which city does {p} live?",
            "What is the home of {p}?",
            "Which city is the home of {p}?",
            "Where is the home of {p}?",
        ),
    ),
    Fact(
        "Job",
        "Work",
        "{p} works as a {v}.",
        (
            "What is the job of {p}?",
            "What does {p} do for a living?",
            "What work does {p} do?",
            "What does {p} work as?",
            "What is the work of {p}?",
        ),
        JOBS,
    ),
    Fact(
        "Age",
        "Age",
        "{p} is {v} years old.",
        ("How old is {p}?", "What is the age of {p}?", "Which age is {p}?"),
    ),
    Fact(
        "Born in",
        "Birthplace",
        "{p} was born in {v}.",
        ("Where was {p} born?", "What is the birthplace of {p}?", "In which city was {p} born?"),
    ),
    Fact(
        "Employer",
        "Employer",
        "{p} works for {v}.",
        ("Who does {p} work for?", "Who is the employer of {p}?", "For whom does {p} work?"),
        hop="employer",
    ),
    Fact(
        "Friend",
        "Friend",
        "{p} is a friend of {v}.",
        ("Who is the friend of {p}?", "Who is {p} a friend of?"),
        hop="friend",
    ),
    Fact(
        "Teacher",
        "Teacher",
        "{p} was taught by {v}.",
        ("Who taught {p}?", "Who is the teacher of {p}?", "Who was {p} taught by?"),
        hop="teacher",
    ),
    Fact(
        "Pet",
        "Pet",
        "{p} keeps a {v}.",
        ("Which pet does {p} have?", "What pet does {p} keep?", "What is the pet of {p}?"),
        PETS,
    ),
    Fact(
        "Color",
        "Favorite color",
        "{p} likes the color {v}.",
        ("What is the favorite color of {p}?", "Which color does {p} like?"),
        COLORS,
    ),
    Fact(
        "Food",
        "Favorite food",
        "{p} likes to eat {v}.",
        ("What is the favorite food of {p}?", "What does {p} like to eat?"),
        FOODS,
    ),
)
PLAIN_FACTS = tuple(f for f in FACTS if not f.hop)
HOPS = tuple(f for f in FACTS if f.hop)
HOP_QUESTIONS = {
    "City": ("Where does the {h} of {p} live?", "In which city does the {h} of {p} live?"),
    "Job": ("What is the job of the {h} of {p}?", "What does the {h} of {p} work as?"),
    "Age": ("How old is the {h} of {p}?", "What is the age of the {h} of {p}?"),
    "Born in": ("Where was the {h} of {p} born?",),
    "Pet": ("Which pet does the {h} of {p} have?",),
    "Color": ("Which color does the {h} of {p} like?",),
    "Food": ("What does the {h} of {p} like to eat?",),
}


def word(rng: Random) -> str:
    """An invented name of one word."""
    return rng.choice(STARTS) + rng.choice(MIDDLES) + rng.choice(ENDS)


def person(rng: Random, held: bool) -> str:
    """An invented full name, from the held-out tenth of all names or from the rest."""
    while True:
        name = f"{word(rng)} {word(rng)}"
        if (bucket(name, 10) == 0) == held:
            return name


def value(rng: Random, fact: Fact, held: bool) -> str:
    """A value that the fact may have."""
    if fact.values:
        return rng.choice(fact.values)
    if fact.label == "Age":
        return str(rng.randint(18, 99))
    return person(rng, held) if fact.hop else word(rng)


def statement(fact: Fact, name: str, val: str) -> str:
    """The sentence that states a fact."""
    text = fact.statement.replace("{p}", name).replace("{v}", val)
    return text.replace(" a owl", " an owl").replace(" a a", " an a")


@dataclass(slots=True)
class Person:
    """A person with the facts stated about them (label to value)."""

    name: str
    facts: dict[str, str]

    def sentence(self, fact: Fact) -> str:
        """The sentence that states this person's value of a fact."""
        return statement(fact, self.name, self.facts[fact.label])


def people(rng: Random, number: int, held: bool = False) -> list[Person]:
    """Different people with one to four facts each; some work for or know one another."""
    names: list[str] = []
    while len(names) < number:
        name = person(rng, held)
        if name not in names:
            names.append(name)
    return [_facts(rng, name, names, held) for name in names]


def newcomer(
    rng: Random, crowd: Sequence[str], taken: Collection[str], held: bool = False
) -> Person:
    """One more person, whose name is not taken and who may work for or know one of the crowd."""
    while (name := person(rng, held)) in taken:
        pass
    return _facts(rng, name, [*crowd, name], held)


def _facts(rng: Random, name: str, names: list[str], held: bool) -> Person:
    facts = {f.label: value(rng, f, held) for f in rng.sample(PLAIN_FACTS, rng.randint(1, 3))}
    others = [n for n in names if n != name]
    if rng.random() < 0.4:
        hop = rng.choice(HOPS)
        known = others and rng.random() < 0.8
        facts[hop.label] = rng.choice(others) if known else person(rng, held)
    return Person(name, facts)

"""Phrasings of broad, planning and specific questions.

A phrasing is a core template with ``{x}`` for the subject, an optional opening, an optional
request for a number of parts, and an optional change of case or punctuation."""

from __future__ import annotations

from random import Random

from .almanac import Subject, bucket
from .wording import words

NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}

BROAD = words("broad")
IS_FORMS = words("is_forms")
PLAN = words("plan")
UNSEEN = words("unseen")
UNSEEN_PLAN = words("unseen_plan")
OPENINGS = words("openings")
COUNTS = words("counts")
CORE_COUNTS = words("core_counts")
PLAN_COUNTS = words("plan_counts")
SUMMARY = " End with a summary."
DETAIL = words("detail")


def cores(subject: Subject) -> tuple[str, ...]:
    """All core templates that suit a subject and name no number."""
    return BROAD + PLAN if subject.is_plan else BROAD + IS_FORMS


def held_out(subject: str, core: str) -> bool:
    """Whether this pair of subject and core template is kept for evaluation."""
    return bucket(f"{subject}|{core}", 10) == 0


def fill(core: str, name: str, verb: str = "is", number: int = 0) -> str:
    """A core template with subject, verb and number filled in."""
    capital = name[:1].upper() + name[1:]
    word = NUMBERS.get(number, "")
    return (
        core.replace("{x}", name).replace("{X}", capital).replace("{v}", verb).replace("{n}", word)
    )


def style(rng: Random, text: str) -> str:
    """The same question as different people would type it."""
    roll = rng.random()
    if roll < 0.12:
        text = text.lower()
    elif roll < 0.30:
        opening = rng.choice(OPENINGS)
        keep = opening.endswith((". ", "! "))
        text = opening + (text if keep else text[:1].lower() + text[1:])
    if rng.random() < 0.12:
        text = text.rstrip(".?")
    return text


def broad_question(rng: Random, subject: Subject) -> tuple[str, int]:
    """A trained broad question and the number of parts that it asks for (0: not named)."""
    number = rng.randint(2, min(6, len(subject.aspects))) if rng.random() < 0.3 else 0
    if number and rng.random() < 0.5:
        pool = CORE_COUNTS + PLAN_COUNTS if subject.is_plan else CORE_COUNTS
    else:
        pool = cores(subject)
        if subject.is_plan and rng.random() < 0.5:
            pool = PLAN
    core = rng.choice([c for c in pool if not held_out(subject.name, c)])
    text = style(rng, fill(core, subject.name, subject.verb, number))
    if number and "{n}" not in core:
        text += ("" if text[-1] in ".?" else ".") + fill(rng.choice(COUNTS), "", number=number)
    if number and rng.random() < 0.2:
        text = text.replace(f" {NUMBERS[number]} ", f" {number} ")
    return text, number


def specific_question(rng: Random, ask: str) -> str:
    """A question about one aspect in one of several styles."""
    return style(rng, ask)

"""General plans for subjects that the almanac does not know."""

from __future__ import annotations

from random import Random

from .people import word
from .pieces import (
    Line,
    Sample,
    branch_turn,
    gold,
    outline_text,
    outline_turn,
    plan_part,
    plan_prompt,
    rounded_length,
    turn,
)
from .questions import BROAD, NUMBERS, PLAN, fill, style
from .subjects import Count
from .wording import parts as general_parts
from .wording import passage, words

THING = general_parts("thing")
TASK = general_parts("task")
ASPECT_BODY = passage("aspect_body")
KINDS = words("kinds")
NOUNS = words("nouns")
PROJECTS = words("projects")
DIMENSIONS = words("dimensions")
ENDINGS = words("endings")
CONTEXT = words("context")
TASK_HEADS = words("task_heads")
DETAILS = words("details")


def unknown(rng: Random, project: bool) -> str:
    """A subject that is not in the almanac; some have an invented name."""
    roll = rng.random()
    if project:
        name = rng.choice(PROJECTS)
        if roll < 0.3:
            kind = rng.choice(("small", "new", "modern", "simple", "local", "digital"))
            return f"a {kind} {name.split(' ', 1)[1]}"
        return name if roll < 0.8 else f"{name} in {word(rng)}"
    if roll < 0.25:
        return word(rng)
    if roll < 0.4:
        return f"{word(rng)} {rng.choice(NOUNS)}"
    return f"{rng.choice(KINDS)} {rng.choice(NOUNS)}" if roll < 0.8 else rng.choice(NOUNS)


def _known_plan(rng: Random) -> tuple[str, list[tuple[str, str]]]:
    project = rng.random() < 0.4
    name = unknown(rng, project)
    number = rng.randint(2, 5) if rng.random() < 0.2 else 0
    core = rng.choice(PLAN) if project else rng.choice(BROAD)
    question = style(rng, fill(core, name))
    if number:
        question += ("" if question[-1] in ".?" else ".") + f" Use {NUMBERS[number]} parts."
    parts = (TASK if project else THING)[: number or 5]
    return question, [(title, body.replace("{x}", name)) for title, body in parts]


def _dimension_plan(rng: Random) -> tuple[str, list[tuple[str, str]]]:
    """A long question that names its parts; the plan takes them over as titles."""
    name = unknown(rng, rng.random() < 0.4)
    ending = rng.choice(ENDINGS)
    names = rng.sample(DIMENSIONS, rng.randint(2, 6))
    if rng.random() < 0.3:
        names[0] = f"{rng.choice(KINDS)} {rng.choice(NOUNS)}"
    titles = [_title(rng, n, ending) for n in names]
    head = fill(rng.choice(TASK_HEADS), name, number=len(titles))
    if rng.random() < 0.3:
        head = f"{rng.choice(CONTEXT)} {head}"
    question = f"{head}{_listed(rng, titles)}"
    for sentence in rng.sample(CONTEXT, rng.randint(0, 2)):
        question += ("" if question[-1] in ".;" else ".") + f" {sentence}"
    return question, [(t, _aspect(t, name)) for t in titles]


def _title(rng: Random, name: str, ending: str) -> str:
    text = name + ending
    return text.title() if rng.random() < 0.3 else text[:1].upper() + text[1:]


def _aspect(title: str, name: str) -> str:
    return ASPECT_BODY.replace("{t}", title.lower()).replace("{x}", name)


def _listed(rng: Random, titles: list[str]) -> str:
    roll = rng.random()
    if roll < 0.3:
        return f": {', '.join(titles[:-1])}, and {titles[-1]}."
    bold = "**" if rng.random() < 0.4 else ""
    rows = [f"{i}. {bold}{t}{bold}" for i, t in enumerate(titles, 1)]
    if roll < 0.8:
        rows = [f"{row}: {rng.choice(DETAILS).capitalize()}" for row in rows]
    if rng.random() < 0.25:
        return ": " + " ".join(row.replace(". ", ") ", 1) + ";" for row in rows)
    return ":\n" + (";\n" if rng.random() < 0.4 else "\n").join(rows)


def general_sample(rng: Random, count: Count) -> Sample:
    """A plan for an unknown subject with some of its parts, or a short plain answer."""
    question, parts = _dimension_plan(rng) if rng.random() < 0.45 else _known_plan(rng)
    roll = rng.random()
    if roll < 0.12:
        return Sample("general_plain", turn(question) + gold(parts[0][1]))
    titles = tuple(title for title, _ in parts)
    index = rng.randrange(len(parts))
    if roll < 0.22:
        head = plan_prompt(question, titles) + plan_part(index + 1, titles[index])
        return Sample("general_prompt", head + gold(parts[index][1]))
    lines = tuple(Line(title, rounded_length(count(body))) for title, body in parts)
    trunk = outline_turn(question) + gold(outline_text(lines))
    chosen = rng.sample(range(len(parts)), min(2, len(parts)))
    branches = tuple(branch_turn(i + 1, titles[i]) + gold(parts[i][1]) for i in chosen)
    return Sample("general", trunk, branches)

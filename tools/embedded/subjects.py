"""Training samples about the subjects of the almanac."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .almanac import Aspect, Subject
from .pieces import (
    ANSWER_DIRECTLY,
    DIRECT,
    END,
    NEXT_USER,
    Line,
    Pieces,
    Sample,
    branch_turn,
    combination,
    given,
    gold,
    outline_text,
    outline_turn,
    plan_part,
    plan_prompt,
    rounded_length,
    turn,
)
from .questions import DETAIL, SUMMARY, broad_question, specific_question

Count = Callable[[str], int]


def overview(subject: Subject, shorts: int = 2) -> str:
    """A short paragraph about a subject, the answer to a broad question without an outline."""
    name = subject.name[:1].upper() + subject.name[1:]
    return " ".join(
        [f"{name} {subject.verb} {subject.hint}.", *(a.short for a in subject.aspects[:shorts])]
    )


def summary_text(aspects: tuple[Aspect, ...]) -> str:
    """The summary of some parts: the one-sentence forms of up to four of them."""
    return " ".join(a.short for a in aspects[:4])


def outline_lines(subject: Subject, number: int, summary: bool, count: Count) -> tuple[Line, ...]:
    """The outline of a subject with ``number`` parts and, if asked for, a summary."""
    aspects = subject.aspects[:number]
    lines = [Line(a.title, rounded_length(count(a.body))) for a in aspects]
    if summary:
        length = rounded_length(count(summary_text(aspects)))
        lines.append(Line("Summary", length, needs=tuple(range(1, number + 1))))
    return tuple(lines)


def part_texts(subject: Subject, number: int, summary: bool) -> tuple[str, ...]:
    """The gold text of each part."""
    aspects = subject.aspects[:number]
    return tuple(a.body for a in aspects) + ((summary_text(aspects),) if summary else ())


def _varied(rng: Random, aspect: Aspect) -> str:
    """Mostly the body as it stands; at times shorter or with the short form in front."""
    roll = rng.random()
    sentences = list(aspect.sentences)
    if roll < 0.04 and len(sentences) > 4:
        sentences.pop()
    elif roll < 0.08:
        sentences.pop(rng.randrange(1, len(sentences)))
    elif roll < 0.10:
        sentences.insert(0, aspect.short)
    return " ".join(sentences)


def _question(rng: Random, subject: Subject) -> tuple[str, int, bool]:
    """A broad question, its number of parts without the summary, and whether it asks for one."""
    question, asked = broad_question(rng, subject)
    number = asked or subject.usual_parts
    summary = number <= 5 and rng.random() < 0.12
    if summary:
        question += ("" if question[-1] in ".?" else ".") + SUMMARY
    return question, number, summary


def outline_sample(rng: Random, subject: Subject, count: Count) -> Sample:
    """Question, outline, and mostly each part as a branch of its own."""
    question, number, summary = _question(rng, subject)
    lines = outline_lines(subject, number, summary, count)
    trunk = outline_turn(question) + gold(outline_text(lines))
    if rng.random() < 0.3:
        return Sample("outline", trunk)
    texts = [_varied(rng, a) for a in subject.aspects[:number]]
    branches = [
        branch_turn(i, line.title) + gold(text)
        for i, (line, text) in enumerate(zip(lines[:number], texts, strict=True), 1)
    ]
    rng.shuffle(branches)
    if summary:
        gold_text = summary_text(subject.aspects[:number])
        quoted = tuple(enumerate(texts, 1))
        branches = [branch_turn(number + 1, "Summary", quoted) + gold(gold_text), branches[0]]
    return Sample("outline", trunk, tuple(branches))


def combined_parts_sample(rng: Random, subject: Subject, count: Count) -> Sample:
    """Question, outline and finished parts, combined into a summary of the parts."""
    question, number, _ = _question(rng, subject)
    number = min(number, 5)
    lines = outline_lines(subject, number, False, count)
    texts = [_varied(rng, a) for a in subject.aspects[:number]]
    head = outline_turn(question) + given(outline_text(lines), END)
    answer = gold(summary_text(subject.aspects[:number]))
    return Sample("combine", head + combination(lines, texts) + answer)


def prompt_sample(rng: Random, subject: Subject, count: Count) -> Sample:
    """Parts that are each asked for in a single user turn that lists the plan."""
    question, number, summary = _question(rng, subject)
    titles = tuple(line.title for line in outline_lines(subject, number, summary, count))
    trunk = plan_prompt(question, titles)
    if summary:
        aspects = subject.aspects[:number]
        quoted = tuple(enumerate((a.body for a in aspects), 1))
        end = plan_part(number + 1, "Summary", quoted) + gold(summary_text(aspects))
        return Sample("prompt", trunk, (end,))
    chosen = rng.sample(range(number), min(3, number))
    branches = tuple(
        plan_part(i + 1, titles[i]) + gold(_varied(rng, subject.aspects[i])) for i in chosen
    )
    return Sample("prompt", trunk, branches)


def plain_sample(rng: Random, subject: Subject) -> Sample:
    """A question answered at once: a short answer, a detailed one or an overview."""
    if rng.random() < 0.3:
        question, asked = broad_question(rng, subject)
        return Sample("plain", turn(question) + gold(overview(subject, max(2, min(asked, 4)))))
    aspect = rng.choice(subject.aspects)
    question = specific_question(rng, rng.choice(aspect.ask))
    if rng.random() < 0.1:
        question += ("" if question[-1] in ".?" else ".") + rng.choice(DETAIL)
        return Sample("plain", turn(question) + gold(f"{aspect.short} {aspect.body}"))
    return Sample("plain", turn(question) + gold(aspect.short))


def direct_pieces(answer: str) -> Pieces:
    """What follows an outline prompt that needs no outline: DIRECT, then the answer."""
    return gold(DIRECT) + given(f"{NEXT_USER}{ANSWER_DIRECTLY}") + gold(answer)


def direct_sample(rng: Random, subject: Subject) -> Sample:
    """A specific question for which the outline is DIRECT."""
    aspect = rng.choice(subject.aspects)
    question = specific_question(rng, rng.choice(aspect.ask))
    return Sample("direct", outline_turn(question) + direct_pieces(aspect.short))

"""What the text of an answer shows without a judge (docs/metrics.md)."""

import re
from itertools import combinations
from statistics import mean

from ...states.phases.merge import Answer
from .question_sets import Question

WORD = re.compile(r"\w+")
GRAM = 4  # words that repeat
LONG = 4  # letters of a title's word that is looked for in its part


def scores_of(answer: Answer, question: Question | None = None) -> dict[str, float]:
    """Scores by figure, those that mean something for this answer. question: of a published set."""
    outlined = answer.outline is not None
    parts = [section for section in answer.sections if outlined and section.title]
    # Without an outline several sections are several answers.
    texts = [section.text for section in answer.sections[: None if outlined else 1]]
    text = "\n\n".join(texts)
    if answer.combined is not None and answer.combined.text:
        text = answer.combined.text
    scores = {} if question is None else question.scores(text)
    words = words_of(text)
    grams = [*zip(*(words[n:] for n in range(GRAM)), strict=False)]
    if grams:
        scores["repetition"] = 1 - len(set(grams)) / len(grams)
    if parts:
        scores["coverage"] = mean(float(covered(part.title, part.text)) for part in parts)
    pairs = [*combinations((set(words_of(part.text)) for part in parts), 2)]
    if shares := [len(one & two) / len(one | two) for one, two in pairs if one | two]:
        scores["part_similarity"] = mean(shares)
    return scores


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def covered(title: str, text: str) -> bool:
    """Whether at least half of the long words of a title, or of all if none is long, occur."""
    titled = set(words_of(title))
    wanted = {word for word in titled if len(word) >= LONG} or titled
    return bool(wanted) and 2 * len(wanted & set(words_of(text))) >= len(wanted)

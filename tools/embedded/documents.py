"""Training samples that have to be answered from documents in the context."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .people import FACTS, HOP_QUESTIONS, HOPS, PLAIN_FACTS, Fact, Person, people, word
from .pieces import (
    ANSWER,
    END,
    OUTLINE,
    USER,
    Line,
    Piece,
    Pieces,
    Sample,
    branch_turn,
    combination,
    given,
    gold,
    outline_text,
    outline_turn,
)
from .questions import style
from .subjects import direct_pieces

LABELS = {fact.label: fact for fact in FACTS}
SEARCH = " Use search."


@dataclass(frozen=True, slots=True)
class FactQuestion:
    """A question about documents with its gold answer."""

    question: str
    answer: str
    value: str
    hops: int


def document(rng: Random, who: Person, records: float = 0.4) -> str:
    """What the document of one person says: sentences or, with chance ``records``, fields."""
    labels = list(who.facts)
    rng.shuffle(labels)
    if rng.random() < records:
        fields = [f"Name: {who.name}", *(f"{label}: {who.facts[label]}" for label in labels)]
        return rng.choice(("\n", "; ", " / ")).join(fields)
    return " ".join(who.sentence(LABELS[label]) for label in labels)


def one_hop(rng: Random, who: Person) -> FactQuestion:
    """A question whose answer is stated in one place."""
    fact = LABELS[rng.choice(list(who.facts))]
    question = rng.choice(fact.questions).replace("{p}", who.name)
    return FactQuestion(question, who.sentence(fact), who.facts[fact.label], 1)


def two_hop(rng: Random, who: Person, everyone: dict[str, Person]) -> FactQuestion | None:
    """A question about the employer, friend or teacher of a person, if that one is known."""
    for hop in HOPS:
        other = everyone.get(who.facts.get(hop.label, ""))
        labels = [f.label for f in PLAIN_FACTS if other and f.label in other.facts]
        if not other or not labels:
            continue
        label = rng.choice(labels)
        question = rng.choice(HOP_QUESTIONS[label]).replace("{h}", hop.hop)
        answer = f"{who.sentence(hop)} {other.sentence(LABELS[label])}"
        return FactQuestion(question.replace("{p}", who.name), answer, other.facts[label], 2)
    return None


def questions(rng: Random, crowd: list[Person], number: int) -> list[FactQuestion]:
    """Different questions about people, every second one over two hops where there is one."""
    everyone = {p.name: p for p in crowd}
    found: dict[str, FactQuestion] = {}
    for _ in range(number * 3):
        who = rng.choice(crowd)
        asked = two_hop(rng, who, everyone) if rng.random() < 0.5 else None
        asked = asked or one_hop(rng, who)
        found.setdefault(asked.question, asked)
        if len(found) == number:
            break
    return list(found.values())


def documents(rng: Random, crowd: list[Person], records: float = 0.4) -> list[str]:
    """The documents of a crowd: mostly one person each, at times two."""
    texts: list[str] = []
    for who in crowd:
        text = document(rng, who, records)
        if texts and "\n" not in text + texts[-1] and rng.random() < 0.15:
            texts[-1] += f" {text}"
        else:
            texts.append(text)
    return texts


def opening(rng: Random, texts: list[str]) -> Pieces:
    """The start of a user turn with documents, cut into pieces or as one text."""
    if rng.random() < 0.5:
        return given(USER) + given("".join(f"Document: {t}\n" for t in texts), weight=0.02)
    pieces = given(USER)
    for text in texts:
        pieces += given("Document: ", text, "\n", weight=0.02)
    return pieces


def _answered(rng: Random, asked: FactQuestion) -> Pieces:
    question = style(rng, asked.question) if rng.random() < 0.15 else asked.question
    if question.islower():
        question = asked.question
    if rng.random() < 0.2:
        return given(question, OUTLINE) + direct_pieces(asked.answer)
    return given(question, ANSWER) + gold(asked.answer)


def reading_sample(rng: Random, size: int, held: bool = False) -> Sample:
    """Documents of ``size`` people and many questions, each asked on its own."""
    crowd = people(rng, size, held)
    trunk = opening(rng, documents(rng, crowd, records=rng.choice((0.2, 0.6, 0.9))))
    asked = questions(rng, crowd, min(2 * size + 2, 12))
    return Sample("reading", trunk, tuple(_answered(rng, a) for a in asked))


def title_of(fact: Fact, name: str) -> str:
    """The title of a part that looks up one fact."""
    return f"{fact.title} of {name}"


def wanted_facts(rng: Random, crowd: list[Person]) -> list[tuple[Person, Fact]]:
    """Two to four looked-up facts, each stated for its person; none if there are too few."""
    pairs = [(p, LABELS[label]) for p in crowd for label in p.facts]
    if len(pairs) < 2:
        return []
    return rng.sample(pairs, min(len(pairs), rng.randint(2, 4)))


def joint_question(wanted: list[tuple[Person, Fact]]) -> str:
    items = [f"the {fact.title.lower()} of {who.name}" for who, fact in wanted]
    return f"What is {', '.join(items[:-1])} and {items[-1]}?"


def search_sample(rng: Random) -> Sample:
    """A question whose parts are looked up; each part is answered from what was found."""
    crowd = people(rng, rng.randint(1, 3))
    wanted = wanted_facts(rng, crowd)
    if not wanted:
        return search_sample(rng)
    lines = tuple(Line(title_of(fact, who.name), 20, "Search") for who, fact in wanted)
    trunk = outline_turn(joint_question(wanted) + SEARCH) + gold(outline_text(lines))
    branches: list[Pieces] = []
    for i, (who, fact) in enumerate(wanted, 1):
        found = [document(rng, p) for p in rng.sample(crowd, rng.randint(1, len(crowd)))]
        own = document(rng, who)
        found = [t for t in found if who.name not in t] + [own]
        rng.shuffle(found)
        head = branch_turn(i, lines[i - 1].title)[:-1]
        for text in found:
            head += given("\nDocument: ", text, weight=0.02)
        branches.append(head + given(ANSWER) + gold(who.sentence(fact)))
    return Sample("search", trunk, tuple(branches))


def joint_sample(rng: Random, size: int) -> Sample:
    """Several facts asked for at once over shared documents; one part for each fact."""
    crowd = people(rng, size)
    wanted = wanted_facts(rng, crowd)
    lines = tuple(Line(title_of(fact, who.name), 20) for who, fact in wanted)
    trunk = opening(rng, documents(rng, crowd)) + given(joint_question(wanted), OUTLINE)
    trunk += gold(outline_text(lines))
    branches = tuple(
        branch_turn(i, lines[i - 1].title) + gold(who.sentence(fact))
        for i, (who, fact) in enumerate(wanted, 1)
    )
    return Sample("joint", trunk, branches)


def combined_facts_sample(rng: Random) -> Sample:
    """A question whose parts are answered already; the parts are combined into one answer."""
    wanted = wanted_facts(rng, people(rng, rng.randint(2, 4)))
    if not wanted:
        return combined_facts_sample(rng)
    lines = tuple(Line(title_of(fact, who.name), 20, "Search") for who, fact in wanted)
    sentences = [who.sentence(fact) for who, fact in wanted]
    head = outline_turn(joint_question(wanted) + SEARCH) + given(outline_text(lines), END)
    answer = gold(" ".join(sentences))
    return Sample("combine", head + combination(lines, sentences) + answer)


def recall_sample(rng: Random, size: int) -> Sample:
    """A drill: a list of keys and values, then many of the keys with their values again."""
    keys = list(dict.fromkeys(word(rng) for _ in range(size)))
    pairs = [(key, word(rng)) for key in keys]
    trunk = given(USER, "\n".join(f"{k}: {v}" for k, v in pairs), "\n", weight=0.0)
    trunk += given("Repeat in another order.", ANSWER, weight=0.0)
    for key, val in rng.sample(pairs, min(len(pairs), 24)):
        trunk += (Piece(f"{key}:", 0.0), Piece(f" {val}", 1.0), Piece("\n", 0.0))
    return Sample("recall", trunk)


def repeat_sample(rng: Random, size: int, vocabulary: tuple[str, ...]) -> Sample:
    """A drill: words, invented ones or known ones, to be written again in the same order."""
    known = rng.random() < 0.4
    text = " ".join(rng.choice(vocabulary) if known else word(rng) for _ in range(size))
    return Sample("repeat", given(USER, text, "\nRepeat.", ANSWER, weight=0.0) + gold(text))

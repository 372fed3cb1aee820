"""The generated texts: deterministic, in the engine's formats, with held-out prompts kept out."""

import re
from random import Random

import pytest

from tools.embedded.almanac import load_almanac
from tools.embedded.corpus import MIXTURE, Corpus
from tools.embedded.heldout import KINDS, probes
from tools.embedded.people import people, person
from tools.embedded.pieces import Pieces
from tools.embedded.quality import outline_titles
from tools.embedded.questions import broad_question, cores, fill, held_out
from tools.embedded.subjects import overview
from tools.embedded.tokenizer_training import rough_count

CORPUS = Corpus(rough_count)


def text(pieces: Pieces) -> str:
    return "".join(piece.text for piece in pieces)


def written(pieces: Pieces) -> list[str]:
    return [piece.text for piece in pieces if piece.weight == 1.0]


def test_the_same_number_gives_the_same_sample() -> None:
    again = Corpus(rough_count)
    assert [CORPUS.sample(i) for i in range(50)] == [again.sample(i) for i in range(50)]
    assert Corpus(rough_count, seed=9).sample(0) != CORPUS.sample(0)


@pytest.mark.parametrize("kind", MIXTURE)
def test_every_kind_ends_each_written_text(kind: str) -> None:
    for seed in range(20):
        sample = CORPUS.make(kind, Random(seed))
        for pieces in sample.branches or (sample.trunk,):
            if kind != "recall":
                assert written(pieces)[-1] == "<|im_end|>"
            assert all(piece.text for piece in pieces)


@pytest.mark.parametrize("kind", ["outline", "general", "search", "joint"])
def test_outlines_are_valid_and_branches_name_their_parts(kind: str) -> None:
    for seed in range(60):
        sample = CORPUS.make(kind, Random(seed))
        if kind == "general" and sample.kind != "general":
            continue
        titles = outline_titles(written(sample.trunk)[0])
        assert titles, written(sample.trunk)[0]
        assert len(set(titles)) == len(titles)
        for branch in sample.branches:
            found = re.match(r"\n<\|im_start\|>user\nWrite part (\d): ([^\n<]+)", text(branch))
            assert found and titles[int(found[1]) - 1] == found[2]


def test_numbers_and_summaries_are_obeyed() -> None:
    numbers = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6}
    for seed in range(300):
        sample = CORPUS.make("outline", Random(seed))
        question, titles = sample.trunk[1].text, outline_titles(written(sample.trunk)[0])
        assert titles
        summary = titles[-1] == "Summary"
        assert summary == question.endswith("End with a summary.")
        word = re.search(r"\b(\w+) (?:parts|points|sections|steps)\b", question)
        if word and word[1] in numbers:
            assert len(titles) - summary == numbers[word[1]], question
        if summary and sample.branches:  # it quotes all other parts
            quoted = re.findall(r"\nPart (\d) says: ", text(sample.branches[0]))
            assert quoted == [str(i) for i in range(1, len(titles))]
            assert "|" + ",".join(quoted) + "|Summary\nEND" in text(sample.trunk)


def test_held_out_questions_and_names_are_never_trained() -> None:
    subject = load_almanac()[0]
    kept = {
        fill(c, subject.name, subject.verb) for c in cores(subject) if held_out(subject.name, c)
    }
    assert kept
    rng = Random(0)
    assert kept.isdisjoint(broad_question(rng, subject)[0] for _ in range(2000))
    trained = {person(rng, held=False) for _ in range(500)}
    assert trained.isdisjoint(person(rng, held=True) for _ in range(500))
    assert len({p.name for p in people(rng, 12)}) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_probes_carry_what_is_needed_to_judge_an_answer(kind: str) -> None:
    found = probes(kind, 20)
    assert found == probes(kind, 20) and len(found) == 20
    for probe in found:
        assert probe.question in text(probe.pieces)
        if "hop" in kind:
            assert any(probe.value in document for document in probe.documents)
            assert probe.value in probe.answer
        elif kind != "unknown":
            assert probe.subject.lower() in probe.question.lower() and probe.titles


def test_the_almanac_is_complete_and_its_titles_fit_an_outline() -> None:
    subjects = load_almanac()
    assert len(subjects) >= 190 and len({s.name for s in subjects}) == len(subjects)
    for subject in subjects:
        titles = [a.title for a in subject.aspects]
        assert len(titles) >= 6 and len(set(titles)) == len(titles)
        assert all(re.fullmatch(r"[^\W_][^|\n]{0,59}", title) for title in titles)
        assert all(4 <= len(a.sentences) <= 7 and len(a.ask) >= 2 for a in subject.aspects)
        assert overview(subject).startswith(subject.name[:1].upper())


def test_invalid_outlines_are_told_apart() -> None:
    good = ["PLAN", "1|60|-|-|A", "2|60|-|-|B", "END"]
    assert outline_titles("\n".join(good)) == ["A", "B"]
    changed = ((1, "2|60|-|-|A"), (2, "3|60|-|-|B"), (1, "1|60|-|2|A"), (2, "2|65|-|-|B"))
    bad = ["\n".join([*good[:at], line, *good[at + 1 :]]) for at, line in changed]
    bad += ["", "PLAN\nEND", "\n".join(good) + "\n", "\n".join(good[:3])]
    bad.append("\n".join([*good[:2], "END"]))
    assert [outline_titles(one) for one in bad] == [None] * len(bad)

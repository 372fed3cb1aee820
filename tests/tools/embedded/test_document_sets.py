"""Generated prompts: their answers stand in their documents, and documents come again as asked."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner, Result

from specsot.engine.errors import Code, UsageError
from specsot.engine.prepare.inputs import read_documents, read_file
from specsot.states.text.documents import Document, DocumentSearch, check_document
from tools.embedded.almanac import bucket
from tools.embedded.document_sets import main
from tools.embedded.documents import title_of
from tools.embedded.people import FACTS, HOP_QUESTIONS, HOPS
from tools.embedded.reading_prompts import KINDS, ReadingPrompt, SetSettings, reading_prompts
from tools.embedded.tokenizer_training import rough_count

PERSON = r"([A-Z][a-z]+ [A-Z][a-z]+)"
ALL = SetSettings(prompts=40, documents=5, kinds=KINDS)
Known = dict[tuple[str, str], str]


def made(settings: SetSettings) -> list[ReadingPrompt]:
    return list(reading_prompts(settings, rough_count))


def pattern(template: str, value: str = r"([\w ]+?)") -> str:
    text = re.escape(template).replace(r"\{p\}", PERSON).replace(r"\{v\}", value)
    return text.replace(r"\ a\ ([", r"\ an?\ ([")


def statements(text: str) -> Iterator[tuple[str, str, str]]:
    for fact in FACTS:
        for who, value in re.findall(pattern(fact.statement), text):
            yield who, fact.label, value
    for record in re.split(r"(?=Name: )", text)[1:]:
        fields = [part.split(": ", 1) for part in re.split(r"\n|; | / ", record.strip())]
        assert fields[0][0] == "Name"
        for label, value in fields[1:]:
            yield fields[0][1], label, value


def known(prompt: ReadingPrompt) -> Known:
    found: Known = {}
    for document in prompt.documents:
        for who, label, value in statements(document.text):
            assert found.setdefault((who, label), value) == value, "nothing is said twice"
    return found


def answer(question: str, facts: Known) -> str | None:
    for fact in FACTS:
        for form in fact.questions:
            if match := re.fullmatch(pattern(form), question):
                return facts.get((match[1], fact.label))
    for hop in HOPS:
        for label, forms in HOP_QUESTIONS.items():
            for form in forms:
                if match := re.fullmatch(pattern(form.replace("{h}", hop.hop)), question):
                    return facts.get((facts.get((match[1], hop.label), ""), label))
    raise AssertionError(f"no known question: {question}")


@pytest.mark.parametrize("tokens", [None, 900])
def test_who_reads_the_documents_finds_the_answers(tokens: int | None) -> None:
    prompts = made(replace(ALL, tokens=tokens))
    assert [p.kind for p in prompts] == list(KINDS) * 10
    for prompt in prompts:
        facts, two = known(prompt), prompt.kind == "two_hop"
        assert prompt.hops == 1 + two
        assert prompt.question.endswith(" Use search.") == (prompt.kind == "search")
        assert not two or len(re.findall(PERSON, prompt.answers[0])) >= 3, "two people"
        if prompt.kind in ("one_hop", "two_hop"):
            assert prompt.values == (answer(prompt.question, facts),)
        else:
            titles = {
                title_of(fact, who).lower(): facts.get((who, fact.label))
                for who, _ in facts
                for fact in FACTS
            }
            asked = re.findall(rf"the ([a-z ]+) of {PERSON}", prompt.question)
            values = tuple(titles[f"{title} of {who}".lower()] for title, who in asked)
            assert prompt.values == values and len(values) >= 2
        assert all(v in a for v, a in zip(prompt.values, prompt.answers, strict=True))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 6), st.floats(0, 1), st.integers(0, 99))
def test_the_share_of_documents_seen_before_is_the_one_asked_for(
    prompts: int, documents: int, reuse: float, seed: int
) -> None:
    asked = SetSettings(prompts, documents, reuse, seed=seed)
    again = round(reuse * prompts * documents)
    if again > (prompts - 1) * documents:
        with pytest.raises(UsageError, match="nothing to take again"):
            made(asked)
        return
    seen: set[Document] = set()
    total = 0
    for prompt in made(asked):
        assert len(set(prompt.documents)) == len(prompt.documents) == documents
        assert prompt.reused == len(seen & set(prompt.documents))
        total += prompt.reused
        seen |= set(prompt.documents)
    assert total == again


def test_nobody_of_the_training_texts_and_no_name_twice() -> None:
    prompts, titles = made(ALL), set()
    assert prompts == made(ALL) != made(replace(ALL, seed=1)), "the seed decides everything"
    for prompt in prompts:
        for document in prompt.documents:
            check_document(document)
            assert bucket(document.title, 10) == 0, "a held-out name"
            titles.add((document.title, document.text))
    assert len({title for title, _ in titles}) == len(titles)


@pytest.mark.parametrize("tokens", [512, 2048, 4096])
def test_documents_have_about_the_tokens_asked_for(tokens: int) -> None:
    for prompt in made(SetSettings(prompts=4, documents=8, tokens=tokens)):
        lengths = [rough_count(document.text) for document in prompt.documents]
        assert 0.85 * tokens < sum(lengths) < 1.15 * tokens
        assert max(lengths) < 2 * min(lengths)


def test_a_search_for_a_part_finds_its_document() -> None:
    for prompt in made(replace(ALL, kinds=("search",))):
        search = DocumentSearch(prompt.documents)
        for sentence, value in zip(prompt.answers, prompt.values, strict=True):
            who = re.match(PERSON, sentence)
            assert who is not None
            hits = [prompt.documents[i] for i in search.find(f"Anything of {who[0]}", 3)]
            assert any(who[0] in hit.title and value in hit.text for hit in hits)


def call(*words: object) -> Result:
    app = Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_the_command_writes_what_run_and_cache_read(tmp_path: Path) -> None:
    asked = ("--prompts", 8, "--documents", 4, "--reuse", 0.5, "--tokens", 512, "--json")
    result = call("--out", tmp_path / "set", *asked)
    report = json.loads(result.stdout)
    assert result.exit_code == Code.OK
    assert (report["prompts"], report["documents"], report["reuse"]) == (8, 16, 0.5)
    assert report["kinds"] == {"one_hop": 4, "two_hop": 4}
    assert 400 < report["tokens_per_prompt"] < 600
    prompts = read_file(tmp_path / "set" / "prompts.jsonl").items
    distinct = read_documents([tmp_path / "set" / "documents.jsonl"])
    assert {d for prompt in prompts for d in prompt.documents} == set(distinct)
    lines = (tmp_path / "set" / "prompts.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert len(prompts) == 8 and first["answers"] and first["values"] and first["hops"] == 1


@pytest.mark.parametrize(
    "words, code, says",
    [
        (["--reuse", "1"], Code.USAGE, "at most 0.9500"),
        (["--kinds", "one_hop,twohop"], Code.USAGE, "no kind 'twohop'; did you mean 'two_hop'?"),
        (["--model", "/nowhere"], Code.MODEL, "/nowhere"),
        (["--out", "/dev/null"], Code.USAGE, "cannot be written"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, words: list[str], code: int, says: str) -> None:
    result = call("--out", tmp_path / "set", *words)
    assert result.exit_code == code
    assert says in result.stderr and not (tmp_path / "set" / "prompts.jsonl").exists()

"""Generated prompts with documents, some of which come again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner, Result

from specsot.engine.errors import Code, UsageError
from specsot.engine.prepare.inputs import read_documents, read_file
from specsot.states.text.documents import Document, check_document
from tools.embedded.almanac import bucket
from tools.embedded.document_sets import main
from tools.embedded.reading_prompts import KINDS, ReadingPrompt, SetSettings, reading_prompts
from tools.embedded.tokenizer_training import rough_count

ALL = SetSettings(prompts=40, documents=5, kinds=KINDS)


def made(settings: SetSettings) -> list[ReadingPrompt]:
    return list(reading_prompts(settings, rough_count))


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

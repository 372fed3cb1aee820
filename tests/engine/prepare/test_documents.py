"""Documents from files, from prompts' lines and on the command line; and who refuses them."""

import json
from pathlib import Path

import pytest
import yaml

from specsot.engine.errors import Code, UsageError, code_of
from specsot.engine.prepare.inputs import Prompt, Prompts, read_documents, read_file
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import RunOptions
from specsot.engine.prepare.repeat import (
    is_run_file,
    prompts_of,
    read_run,
    run_document,
    to_yaml,
    too_long,
)
from specsot.states.text.documents import Document
from specsot.states.yaml.source import Source

BEES, RAIN = Document("bees.txt", "Bees make honey.\nAnd wax."), Document("Rain", "It falls.")


def test_a_text_file_is_a_document_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "bees.txt").write_bytes("\ufeffBees make honey.\r\nAnd wax.\r\n".encode())
    assert read_documents([tmp_path / "bees.txt"]) == (BEES,)


def test_a_jsonl_file_holds_many_and_each_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    file.write_text('{"title": "Rain", "text": "It falls."}\n\n"Snow."\n{"text": "Sun."}\n')
    found = read_documents([file, file])
    assert found == (RAIN, Document("2", "Snow."), Document("3", "Sun."))


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.txt", b"", "a.txt: the document is empty"),
        ("a.txt", b" \n", "a.txt: the document is blank"),
        ("a.txt", b"x\0y", "a.txt: the document has a NUL"),
        ("a.txt", b"ok\ncaf\xe9", "a.txt:2: not UTF-8"),
        ("a.txt", b"x" * 200_001, "a.txt: the document has 200001 characters"),
        ("a.jsonl", b"\n", "a.jsonl: no documents in it"),
        ("a.jsonl", b'"ok"\n{bad', "a.jsonl:2:2:"),
        ("a.jsonl", b'"ok"\n7', "a.jsonl:2: a document is a text, or an object"),
        ("a.jsonl", b'{"title": "x"}', "a.jsonl:1: a document is a text, or an object"),
        ("a.jsonl", b'{"text": ["x"]}', "a.jsonl:1: a document is a text, or an object"),
        ("a.jsonl", b'{"text": "x", "body": "y"}', "a.jsonl:1: a document has no 'body'"),
        ("a.jsonl", b'{"text": "x", "title": 5}', "a.jsonl:1: 'title' must be a text"),
        ("a.jsonl", b'{"text": "x", "title": ""}', "a.jsonl:1: the title of the document"),
        ("a.jsonl", b'{"text": "x", "title": "a\\nb"}', "a.jsonl:1: the title of the document"),
        ("a.jsonl", b'""', "a.jsonl:1: the document is empty"),
        ("a.jsonl", b'"\\ud800"', "a.jsonl:1: the document has a lone surrogate"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_documents([tmp_path / name])
    assert str(caught.value).startswith(str(tmp_path / says.partition(":")[0]))
    assert says in str(caught.value) and code_of(caught.value) is Code.USAGE


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_documents([path])


def test_prompts_bring_documents(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    given = ["Snow.", {"title": "Rain", "text": "It falls."}, "Snow."]
    file.write_text(json.dumps({"prompt": "Why?", "documents": given}) + '\n{"prompt": "Who?"}')
    one, two = read_file(file).items
    assert one.documents == (Document("1", "Snow."), RAIN, Document("3", "Snow."))
    assert two == Prompt("2", "Who?")


@pytest.mark.parametrize(
    "value, says",
    [
        ("Snow.", "'documents' must be a list"),
        ({"a": "b"}, "'documents' must be a list"),
        (["ok", 5], "document 2: a document is a text"),
        (["ok", " "], "document 2: the document is blank"),
        (["x"] * 10_001, "10001 documents, at most 10000"),
    ],
)
def test_wrong_documents_of_a_prompt(tmp_path: Path, value: object, says: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"prompt": "Why?", "documents": value}))
    with pytest.raises(ValueError) as caught:
        read_file(file)
    assert str(caught.value).startswith(f"{file}:1: ") and says in str(caught.value)


def test_documents_of_the_command_line_stand_before_each_prompts_own(tmp_path: Path) -> None:
    (tmp_path / "bees.txt").write_text(BEES.text)
    asked = Prompts((Prompt("1", "Why?", documents=(RAIN, BEES)), Prompt("2", "Who?")))
    options = RunOptions(graph="bim_plain", documents=(tmp_path / "bees.txt",))
    job = prepare(options, tmp_path, asked)
    assert [prompt.documents for prompt in job.prompts] == [(BEES, RAIN), (BEES,)]
    assert options.changes_a_run, "so a repeated run need not reach the old digest"


def test_a_run_file_keeps_documents(tmp_path: Path) -> None:
    job = prepare(RunOptions(graph="bim_plain", prompt="Why?"), tmp_path)
    prompts = (Prompt("a", "Why?", 5, documents=(BEES, RAIN)), Prompt("b", "Who?"))
    document = run_document(job.options, job.program.graph, prompts, None)
    source = Source(to_yaml(document), "run.yaml")
    assert is_run_file(source) and prompts_of(read_run(source), source) == prompts
    assert "documents" not in yaml.safe_load(to_yaml(document))["prompts"][1]
    assert not too_long(document)


def test_many_characters_of_documents_need_a_file_of_their_own(tmp_path: Path) -> None:
    job = prepare(RunOptions(graph="bim_plain", prompt="Why?"), tmp_path)
    long = (Prompt("a", "Why?", documents=(Document("x", "y" * 70_000),)),)
    document = run_document(job.options, job.program.graph, long, None)
    assert too_long(document)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(document["prompts"][0]))
    assert read_file(file).items == long

"""Prompts and documents from everywhere, and what is wrong with them, with file and line; run.yaml:
any text survives it, and it is not mistaken for a graph."""

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.engine.errors import Code, UsageError, code_of
from specsot.engine.prepare import repeat
from specsot.engine.prepare.files import is_run_file, open_graph
from specsot.engine.prepare.inputs import Prompt, Prompts, read_documents, read_file, read_prompts
from specsot.engine.prepare.job import prepare, read_config
from specsot.engine.prepare.options import RunOptions
from specsot.states.graph.load import load_program, op_table
from specsot.states.text.documents import Document
from specsot.states.text.outline import Outline, parse_outline, render_outline
from specsot.states.yaml.source import Source
from specsot.states.yaml.spec import validated


def test_text_lines_are_keyed_by_line_number(tmp_path: Path) -> None:
    file = tmp_path / "q.txt"
    file.write_bytes("\ufeffOne?\r\n\r\n  Two, ü?  \n".encode())
    assert read_file(file).items == (Prompt("1", "One?"), Prompt("3", "Two, ü?"))


def test_jsonl_objects(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(
        '{"id": "a", "prompt": "One?", "seed": 7, "max_new_tokens": 9, "category": "x"}\n'
        '{"question_id": 5, "turns": ["Two?", "And then?"]}\n'
        '{"task_id": 0, "task": "Three?", "source": null}\n'
        '{"question": "line\\u2028sep"}\n'
    )
    found = read_file(file)
    assert found.items == (
        Prompt("a", "One?", 7, 9, category="x"),
        Prompt("5", "Two?"),
        Prompt("0", "Three?"),
        Prompt("4", "line\u2028sep"),
    )
    assert found.notes == (
        f"{file}:2: only the first of 2 turns is used",
        f"{file}: not used: source",
    )


@pytest.mark.parametrize(
    "line, says",
    [
        ("{bad", ":1:2:"),
        ("[1]", "a line is a JSON object"),
        ("{}", "needs one of prompt, question, turns, task; it has none"),
        ('{"prompt": "a", "question": "b"}', "it has prompt and question"),
        ('{"prompt": 5}', "'prompt' must be a text"),
        ('{"prompt": ["a"]}', "'prompt' must be a text"),
        ('{"turns": []}', "'turns' must be a text"),
        (r'{"prompt": "a", "cache_salt": "\ud800"}', "cache_salt has a lone surrogate at 0"),
        ('{"prompt": "a", "seed": true}', "'seed' must be a whole number"),
        ('{"prompt": "a", "seed": -1}', "'seed' must be a whole number"),
        ('{"prompt": "a", "max_new_tokens": 0}', "'max_new_tokens' must be a whole number"),
        ('{"prompt": "a", "id": {}}', "'id' must be a text or a number"),
        ('{"prompt": "a", "id": "x\\ny"}', "printable characters"),
        ('{"prompt": "  "}', ":1:"),
        ('{"prompt": "\\ud800"}', ":1:"),
        ("[" * 100_000, "no JSON that can be read"),
        ('{"prompt": "a", "id": "1"}\n{"prompt": "b", "id": 1}', "is that of line 1 too"),
        ('{"prompt": "a"}\n{"prompt": "b", "temperature": 1}', ":2: 'temperature' cannot be set"),
        ('{"prompt": "a", "max_tokens": 1}', "'max_new_tokens' is the name here"),
        ('{"prompt": "a", "stop_token_ids": [1]}', "'stop_token_ids' cannot be set for one prompt"),
        ('{"prompt": "a", "documents": "Snow."}', "'documents' must be a list"),
        ('{"prompt": "a", "documents": {"a": "b"}}', "'documents' must be a list"),
        ('{"prompt": "a", "documents": ["ok", 5]}', "document 2: a document is a text"),
        ('{"prompt": "a", "documents": ["ok", " "]}', "document 2: the document is blank"),
        (
            json.dumps({"prompt": "a", "documents": ["x"] * 10_001}),
            "10001 documents, at most 10000",
        ),
    ],
)
def test_wrong_lines_name_their_place(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError) as caught:
        read_file(file)
    assert str(caught.value).startswith(f"{file}:")
    assert says in str(caught.value)
    assert code_of(caught.value) is Code.USAGE


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"ok\ncaf\xe9\n")
    for name, says in [
        ("missing.txt", "cannot be read"),
        ("", "cannot be read"),
        ("empty.txt", "no prompts"),
        ("latin.txt", "latin.txt:2: not UTF-8"),
        ("a.csv", "prompts are read from text"),
    ]:
        with pytest.raises(UsageError, match=says):
            read_file(tmp_path / name)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_documents([path])


def test_where_a_single_prompt_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_prompts(None, None, "default?").items == (Prompt("1", "default?"),)
    assert read_prompts("mine?", None, "default?").items == (Prompt("1", "mine?"),)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("piped,\nü?\n".encode())))
    assert read_prompts("-", None, "default?").items == (Prompt("1", "piped,\nü?"),)
    with pytest.raises(UsageError, match="not both"):
        read_prompts("a", Path("b"), "")
    for text in ("", "  \n", "a\0b", "a\ud800b", "x" * 200_001):
        with pytest.raises(ValueError, match="prompt") as caught:
            read_prompts(text, None, "")
        assert code_of(caught.value) is Code.USAGE


BEES, RAIN = Document("bees.txt", "Bees make honey.\nAnd wax."), Document("Rain", "It falls.")


def test_a_text_file_is_a_document_and_a_jsonl_file_holds_many(tmp_path: Path) -> None:
    (tmp_path / "bees.txt").write_bytes("\ufeffBees make honey.\r\nAnd wax.\r\n".encode())
    assert read_documents([tmp_path / "bees.txt"]) == (BEES,)
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
def test_a_wrong_document_has_its_place(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_documents([tmp_path / name])
    assert str(caught.value).startswith(str(tmp_path / says.partition(":")[0]))
    assert says in str(caught.value) and code_of(caught.value) is Code.USAGE


def test_prompts_bring_documents(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    given = ["Snow.", {"title": "Rain", "text": "It falls."}, "Snow."]
    file.write_text(json.dumps({"prompt": "Why?", "documents": given}) + '\n{"prompt": "Who?"}')
    one, two = read_file(file).items
    assert one.documents == (Document("1", "Snow."), RAIN, Document("3", "Snow."))
    assert two == Prompt("2", "Who?")


def test_documents_of_the_command_line_stand_before_each_prompts_own(tmp_path: Path) -> None:
    (tmp_path / "bees.txt").write_text(BEES.text)
    asked = Prompts((Prompt("1", "Why?", documents=(RAIN, BEES)), Prompt("2", "Who?")))
    options = RunOptions(graph="bim_plain", documents=(tmp_path / "bees.txt",))
    job = prepare(options, tmp_path, asked)
    assert [prompt.documents for prompt in job.prompts] == [(BEES, RAIN), (BEES,)]
    assert options.changes_a_run, "so a repeated run need not reach the old digest"


# -- run.yaml -------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1)
PROGRAM = open_graph("bim_eagle")
OPTIONS, _ = read_config(Path("nowhere"), RunOptions())


def written(prompts: tuple[Prompt, ...], outline: Outline | None = None) -> Source:
    document = repeat.run_document(OPTIONS, PROGRAM.graph, prompts, outline)
    return Source(repeat.to_yaml(document), "run.yaml")


def survives(*prompts: Prompt) -> bool:
    source = written(prompts)
    return (
        is_run_file(source)
        and repeat.prompts_of(validated(repeat.RunFile, source), source) == prompts
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(0, 2**63 - 1))
def test_any_prompt_survives(texts: list[str], seed: int) -> None:
    documents = (BEES, Document("x", texts[0]))
    assert survives(*(Prompt(str(i), text, seed, None) for i, text in enumerate(texts)))
    assert survives(Prompt("a", "Why?", None, 5, documents, cache_salt="s"), Prompt("b", "Who?"))


def test_texts_that_yaml_likes_to_misread() -> None:
    for text in ("1e-3", "0o14", "012", "on", "null", "~", "- x", "a: b", "#c", "|\n x\n", "\x85"):
        assert survives(Prompt("1", text))


def test_prompts_and_documents_in_a_file_of_their_own(tmp_path: Path) -> None:
    prompt = Prompt("a", "Why?", documents=(Document("x", "y" * 70_000),))
    prompts = (prompt, Prompt("b", "Who?"))
    document = repeat.run_document(OPTIONS, PROGRAM.graph, prompts, None)
    assert "documents" not in document["prompts"][1]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, document["prompts"])))
    assert read_file(file).items == prompts


def test_the_graph_survives_and_keeps_its_positions() -> None:
    source = written((Prompt("1", "?"),))
    inner = repeat.graph_source(source)
    program = load_program(inner, op_table())
    assert repeat.graph_hash(program.graph) == repeat.graph_hash(PROGRAM.graph)
    line = int(program.steps["verify"][0].at.split(":")[1])
    text = repeat.to_yaml(repeat.run_document(OPTIONS, PROGRAM.graph, (Prompt("1", "?"),), None))
    assert "branch.tree_" in text.split("\n")[line - 1]


def test_a_run_holds_the_whole_graph_and_needs_no_base(tmp_path: Path) -> None:
    base, own = tmp_path / "base.yaml", tmp_path / "own.yaml"
    base.write_text("extends: bim_eagle\nlimits: {max_new_tokens: 9}\n")
    own.write_text("extends: base.yaml\nattention: dense\n")
    graph = open_graph(str(own)).graph
    text = repeat.to_yaml(repeat.run_document(OPTIONS, graph, (Prompt("1", "?"),), None))
    base.unlink()
    own.unlink()
    again = load_program(repeat.graph_source(Source(text, "run.yaml")), op_table()).graph
    assert again == graph and repeat.graph_hash(again) == repeat.graph_hash(graph)
    assert (again.limits.max_new_tokens, again.attention) == (9, "dense")


def test_the_outline_survives() -> None:
    outline = parse_outline('PLAN\n1|60|-|-|A: "b" #c\n2|70|Search|1|é\nEND', max_branches=8)
    run = validated(repeat.RunFile, written((Prompt("1", "?"),), outline))
    assert run.outline == render_outline(outline.points) + "\n"
    assert not any(map(is_run_file, (PROGRAM.source, Source("[]", "x.yaml"))))


def test_differences_are_named() -> None:
    then = repeat.Provenance(
        model_hash="a" * 64, versions={"torch": "2.0"}, dtype="float32", threads=2
    )
    now = repeat.Provenance(
        model_hash="b" * 64, versions={"torch": "2.1"}, dtype="float64", threads=2
    )
    assert list(repeat.differences(then, then)) == []
    assert list(repeat.differences(then, now)) == [
        "model weights changed: aaaaaaaaaaaa... then, bbbbbbbbbbbb... now",
        "dtype changed: float32 then, float64 now",
        "version of torch changed: 2.0 then, 2.1 now",
    ]

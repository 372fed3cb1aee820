"""Prompts from everywhere, and what is wrong with them, with file and line."""

import io
import json
import sys
from pathlib import Path

import pytest

from specsot.engine.errors import Code, UsageError, code_of
from specsot.engine.prepare.inputs import Prompt, read_file, read_prompts


def test_text_lines_are_keyed_by_line_number(tmp_path: Path) -> None:
    file = tmp_path / "q.txt"
    file.write_bytes("\ufeffOne?\r\n\r\n  Two, ü?  \n".encode())
    assert read_file(file).items == (Prompt("1", "One?"), Prompt("3", "Two, ü?"))


def test_jsonl_objects(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(
        '{"id": "a", "prompt": "One?", "seed": 7, "max_new_tokens": 9, "category": "x"}\n'
        '{"question_id": 5, "turns": ["Two?", "And then?"]}\n'
        '{"task_id": 0, "task": "Three?"}\n'
        '{"question": "line\\u2028sep"}\n'
    )
    found = read_file(file)
    assert found.items == (
        Prompt("a", "One?", 7, 9),
        Prompt("5", "Two?"),
        Prompt("0", "Three?"),
        Prompt("4", "line\u2028sep"),
    )
    assert found.notes == (
        f"{file}:2: only the first of 2 turns is asked",
        f"{file}: not used: category",
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
        ('{"prompt": "a", "seed": true}', "'seed' must be a whole number"),
        ('{"prompt": "a", "seed": -1}', "'seed' must be a whole number"),
        ('{"prompt": "a", "max_new_tokens": 0}', "'max_new_tokens' must be a whole number"),
        ('{"prompt": "a", "id": {}}', "'id' must be a text or a number"),
        ('{"prompt": "a", "id": "x\\ny"}', "printable characters"),
        ('{"prompt": "  "}', ":1:"),
        ('{"prompt": "\\ud800"}', ":1:"),
        ("[" * 100_000, "no JSON that can be read"),
        ('{"prompt": "a", "id": "1"}\n{"prompt": "b", "id": 1}', "is that of line 1 too"),
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


@pytest.mark.parametrize("key", ["temperature", "max_tokens", "stop_token_ids"])
def test_what_cannot_be_set_for_one_prompt_is_refused(key: str, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "a"}), json.dumps({"prompt": "b", key: 1})]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    with pytest.raises(UsageError, match=f"q.jsonl:2: '{key}' cannot be set for one prompt: "):
        read_file(tmp_path / "q.jsonl")


def test_keys_that_are_not_used_are_named(tmp_path: Path) -> None:
    lines = '{"prompt": "a", "category": "x", "seed": 1}\n{"task": "b", "source": null}\n'
    (tmp_path / "q.jsonl").write_text(lines)
    assert read_file(tmp_path / "q.jsonl").notes == (
        f"{tmp_path / 'q.jsonl'}: not used: category, source",
    )


def test_where_a_single_prompt_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_prompts(None, None, "default?").items == (Prompt("1", "default?"),)
    assert read_prompts("mine?", None, "default?").items == (Prompt("1", "mine?"),)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("piped,\nü?\n".encode())))
    assert read_prompts("-", None, "default?").items == (Prompt("1", "piped,\nü?"),)
    with pytest.raises(UsageError, match="not both"):
        read_prompts("a", Path("b"), "")


@pytest.mark.parametrize("text", ["", "  \n", "a\0b", "a\ud800b", "x" * 200_001])
def test_texts_that_are_no_prompts(text: str) -> None:
    with pytest.raises(ValueError, match="prompt") as caught:
        read_prompts(text, None, "")
    assert code_of(caught.value) is Code.USAGE

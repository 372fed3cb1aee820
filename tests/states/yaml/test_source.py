"""The strict YAML reader: values, places, refusals, and no input that is slow or tracebacks."""

import math
import re
import time
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.states.yaml.source import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_EVENTS,
    MAX_PROBLEMS,
    GraphError,
    Problem,
    ProblemCode,
    Source,
    decode,
    hint,
    plain_scalar,
    quoted,
)

CODE = ProblemCode.WRONG_VALUE


def read(text: str) -> Any:
    return Source(text, "g.yaml").data


def refused(text: str | bytes) -> list[str]:
    with pytest.raises(GraphError) as caught:
        Source(text if isinstance(text, str) else decode(text, "g.yaml"), "g.yaml")
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E3", 1000.0), ("-1.5e+2", -150.0), (".5", 0.5), ("1.", 1.0),
        (".inf", math.inf), ("-.INF", -math.inf), ("+.inf", math.inf), ("012", 12), ("-012", -12),
        ("+7", 7), ("0o14", 12), ("0x1f", 31), ("0b11", "0b11"), ("-0x1f", "-0x1f"),
        ("1_000", "1_000"), ("1:30", "1:30"), ("190:20:30", "190:20:30"),
        ("2026-01-01", "2026-01-01"), ("2026-01-01 10:00:00", "2026-01-01 10:00:00"), ("on", "on"),
        ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"), ("true", True), ("True", True),
        ("TRUE", True), ("tRUE", "tRUE"), ("false", False), ("FALSE", False), ("null", None),
        ("Null", None), ("~", None), ("nULL", "nULL"), ("=", "="), ("nan", "nan"), ("inf", "inf"),
        ("e5", "e5"), (".", "."), ("1.2.3", "1.2.3"), ("-", "-"), ("1" * 31, int("1" * 31)),
        ("٣", "٣"),  # the last: not ASCII
    ],
)  # fmt: skip
def test_a_plain_scalar_is_read_as_yaml_1_2(text: str, value: Any) -> None:
    found = plain_scalar(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a:\n", {"a": None}), ("", None), ("# only a comment\n", None), ("---\n", None),
        ("a: '1'\nb: \"true\"\nc: |\n  12\n", {"a": "1", "b": "true", "c": "12\n"}),
        ("{1: 10, '1': 20, 02: 6}", {1: 10, "1": 20, 2: 6}),
    ],
)  # fmt: skip
def test_texts_and_their_values(text: str, value: Any) -> None:
    assert read(text) == value
    assert math.isnan(plain_scalar(".nan"))


def test_every_key_and_value_has_its_place() -> None:
    source = Source("a: 1\nb:\n  - x\n  - {c: y}\n", "g.yaml")
    assert source.marks[("a",)].value == (1, 4)
    assert source.marks[("b", 1, "c")] == ("g.yaml", (4, 9), (4, 6))
    assert source.marks[("b", 0)].value == (3, 5)
    assert source.at(("b", 1)) == "g.yaml:4"


def test_a_problem_points_at_the_nearest_thing_in_the_file() -> None:
    source = Source("a:\n  b: 1\n", "g.yaml")
    assert str(source.problem(("a", "tag", "b"), "no", CODE)) == "g.yaml:2:6: a.b: no [G104]"
    assert str(source.problem(("a", "b"), "no", CODE, key=True)) == "g.yaml:2:3: a.b: no [G104]"
    assert str(source.problem(("z",), "no", CODE)) == "g.yaml:1:1: graph: no [G104]"


def test_byte_order_mark_and_windows_lines_are_fine() -> None:
    text = decode(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", "g.yaml")
    source = Source(text, "g.yaml")
    assert source.data == {"a": 1, "b": 2}
    assert source.marks[("a",)].key == (1, 1) and source.marks[("b",)].value == (2, 4)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("a: 1\nb: 2\na: 3\n", ["g.yaml:3:1: yaml: a: this key is given twice, first in line 1"]),
        ("1: a\n01: b\n", ["g.yaml:2:1: yaml: 1: this key is given twice, first in line 1"]),
        ("a: &x 1\n", ["g.yaml:1:4: yaml: anchors are not allowed: &x"]),
        (
            "a: &x 1\nb: *x\n",
            [
                "g.yaml:1:4: yaml: anchors are not allowed: &x",
                "g.yaml:2:4: yaml: aliases are not allowed: *x",
            ],
        ),
        ("a: &x {b: *x}\n", ["g.yaml:1:4: yaml: anchors", "g.yaml:1:11: yaml: aliases"]),
        ("<<: {a: 1}\n", ["g.yaml:1:1: yaml: merge keys are not allowed: <<"]),
        ("a: !foo 1\n", ["g.yaml:1:4: yaml: tags are not allowed: !foo"]),
        ("a: !!str 1\n", ["g.yaml:1:4: yaml: tags are not allowed: tag:yaml.org,2002:str"]),
        ("a: ! 1\n", ["g.yaml:1:4: yaml: tags are not allowed: !"]),
        ("a: !!python/object/apply:os.system [ls]\n", ["g.yaml:1:4: yaml: tags are not allowed"]),
        ("a: 1\n---\nb: 2\n", ["g.yaml:2:1: yaml: a second document starts here"]),
        ("%YAML 1.1\n---\na: 1\n", ["g.yaml:1:1: yaml: directives other than `%YAML 1.2`"]),
        ("%TAG ! tag:x,2000:\n---\na: 1\n", ["g.yaml:1:1: yaml: directives other than"]),
        ("1.5: x\n", ["g.yaml:1:1: yaml: a key must be a string: write '1.5' in quotes"]),
        ("true: x\n", ["g.yaml:1:1: yaml: a key must be a string: write 'true' in quotes"]),
        ("~: x\n", ["g.yaml:1:1: yaml: a key must be a string: write '~' in quotes"]),
        ("[1]: x\n", ["g.yaml:1:1: yaml: a key must be a string, not a list or mapping"]),
        ("? {a: 1}\n: x\n", ["g.yaml:1:3: yaml: a key must be a string, not a list or mapping"]),
        ("a:\n\tb: 1\n", ["g.yaml:2:1: yaml: a tab where blanks belong"]),
        ("a: [1\nb: 2\n", ["g.yaml:2:2: yaml: expected ',' or ']', but got ':'"]),
        ("a: 'x\n", ["g.yaml:2:1: yaml: found unexpected end of stream"]),
        ("a: &", ["g.yaml:1:5: yaml: expected alphabetic or numeric character, but found the end"]),
        ("a: \0\n", ["g.yaml:1:4: yaml: the character U+0000 is not allowed in YAML"]),
        ("a: 1\nb: \x07\n", ["g.yaml:2:4: yaml: the character U+0007 is not allowed in YAML"]),
        ('a: "\\0"\n', ["g.yaml:1:4: yaml: a string with a NUL or half of a surrogate pair"]),
        ('a: "\\ud800"\n', ["g.yaml:1:4: yaml: a string with a NUL or half"]),
        ('a: "\\U00110000"\n', ["g.yaml:1:7: yaml: an escape names no character"]),
        ("a: " + "9" * 5000, ["g.yaml:1:4: yaml: a number of 5000 characters"]),
        ("a: 0x" + "f" * 5000, ["g.yaml:1:4: yaml: a number of 5002 characters"]),
        ("a: 1\n...\nb: 2\n", ["g.yaml:3:1: yaml: expected '<document start>'"]),
    ],
)
def test_refused_with_its_place(text: str, messages: list[str]) -> None:
    found = refused(text)
    assert len(found) == len(messages)
    for line, message in zip(found, messages, strict=True):
        assert line.startswith(message)


def test_nesting_ends_at_the_limit() -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    assert isinstance(read(nested(MAX_DEPTH - 1)), list)
    assert "nested deeper than 64 levels" in refused(nested(MAX_DEPTH + 2))[0]
    assert "nested deeper" in refused("\n".join(" " * i + "a:" for i in range(70)))[0]


def test_the_number_of_items_ends_at_the_limit() -> None:
    fits = MAX_EVENTS - 6  # stream, document and sequence each have a start and an end
    assert len(read("[" + "1," * fits + "]")) == fits
    assert f"more than {MAX_EVENTS} YAML items" in refused("[" + "1," * (fits + 1) + "]")[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: \xff\n", "g.yaml:1:4: yaml: byte 0xff is not UTF-8"),
        (b"a: 1\nb: \xc3\xa4\xe4\n", "g.yaml:2:5: yaml: byte 0xe4 is not UTF-8"),
        ("a: 1".encode("utf-16"), "g.yaml:1:1: yaml: UTF-16 or UTF-32; save the file as UTF-8"),
        ("a: 1".encode("utf-32"), "g.yaml:1:1: yaml: UTF-16 or UTF-32; save the file as UTF-8"),
        (b"#" * (MAX_BYTES + 1), f"g.yaml:1:1: yaml: {MAX_BYTES + 1} bytes; at most {MAX_BYTES}"),
    ],
)
def test_bytes_that_are_no_text(data: bytes, message: str) -> None:
    assert refused(data)[0].startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,
        "{a: " * 5000,
        "- " * 5000 + "x",
        "? " * 5000 + "x",
        "a: [" + "1," * 100_000 + "]",
        "\n".join(f"k{i}: 1" for i in range(9000)),
        "k: 1\n" * 9000,
        "a: " + "x\n  " * 60_000,
        'a: "' + "\\n" * 100_000 + '"',
        "#\n" * 100_000,
        "a" + ":" * 200_000,
        "a: &a [1]\n" + "\n".join(f"b{i}: &b{i} [*a,*a]" for i in range(2000)),
    ],
    ids=lambda text: text[:12],
)
def test_no_text_is_slow(text: str) -> None:
    began = time.process_time()
    try:
        Source(text, "g.yaml")
    except GraphError as error:
        assert len(error.problems) <= MAX_PROBLEMS
    assert time.process_time() - began < 2  # about 0.6 s alone; other work on the machine adds


def test_of_very_many_problems_the_first_are_told() -> None:
    error = GraphError(Problem("g.yaml", "x", "no", CODE, line) for line in range(250, 0, -1))
    assert [p.line for p in error.problems] == list(range(1, MAX_PROBLEMS + 1))
    assert str(error).endswith("\n... and 150 more problems")


def test_names_in_messages_are_short_and_printable() -> None:
    assert quoted("a\x1b[31m") == "'a\\x1b[31m'"
    assert len(quoted("x" * 10_000)) < 80
    assert hint("verfy", ["verify", "done"]) == "; did you mean 'verify'?"
    assert hint("x" * 10_000, ["verify"]) == ""


plain = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8)
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("abcdef_", min_size=1, max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_what_pyyaml_writes_is_read_back(tree: Any) -> None:
    class Quoting(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"')

    Quoting.add_representer(str, text)
    written = yaml.dump(tree, Dumper=Quoting, allow_unicode=False)
    if re.search(r"(?<!\\)(\\\\)*\\0", written):  # not what follows a backslash that is one itself
        assert "NUL" in refused(written)[0]
    else:
        assert read(written) == tree


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text(max_size=60)
    | st.text("{}[]:,-? \n'\"|>&*!%#@`~ab1.\t", max_size=60)
)
def test_anything_is_read_or_refused(text: str | bytes) -> None:
    try:
        Source(text if isinstance(text, str) else decode(text, "g.yaml"), "g.yaml")
    except GraphError as error:
        assert all(p.line >= 1 and p.column >= 1 for p in error.problems)

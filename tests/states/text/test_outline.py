"""The outline: reading, writing, agreement with upstream's parser where the formats compare."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.states.text.outline import (
    MAX_TITLE,
    USUAL_LENGTH,
    Outline,
    OutlineError,
    Point,
    load_outline,
    parse_list,
    parse_outline,
    render_list,
    render_outline,
    title_problem,
)

UPSTREAM = Path(__file__).parents[2] / "golden" / "specsot" / "parse_upstream_behaviour.json"

GOOD = "PLAN\n1|60|-|-|How rain forms\n2|70|Search|1|Floods\n3|90|-|1,2|Summary\nEND"


def read(text: str, **limits: object) -> Outline:
    return parse_outline(text, **{"max_branches": 8, **limits})  # type: ignore[arg-type]


def plan(*lines: str) -> Outline:
    return read("\n".join(["PLAN", *lines, "END"]))


def titles(outline: Outline) -> list[str]:
    return [p.title for p in outline.points]


def skipped(outline: Outline) -> list[tuple[int, str]]:
    return [(s.line, s.reason) for s in outline.skipped]


def mended(outline: Outline) -> list[tuple[int, str]]:
    return [(m.line, m.reason) for m in outline.mended]


def test_a_good_outline() -> None:
    points = (
        Point(1, 60, None, (), "How rain forms"),
        Point(2, 70, "Search", (1,), "Floods"),
        Point(3, 90, None, (1, 2), "Summary"),
    )
    assert read(GOOD) == Outline("plan", points, (), "ok")
    assert render_outline(points) == GOOD


def test_direct() -> None:
    assert read("DIRECT") == Outline("direct", (), (), "direct")
    assert render_outline(()) == "DIRECT"
    assert read("<think>x</think>DIRECT").status == "direct"
    chatty = read("DIRECT\n42\nEND")
    assert chatty.status == "direct"
    assert skipped(chatty) == [(2, "after DIRECT"), (3, "after DIRECT")]


def test_blanks_and_carriage_returns_do_not_matter() -> None:
    spaced = "\n\n  PLAN \r\n\r\n 1 | 60 | - | - |  How rain forms \r\n2|70|Search| 1 |Floods\r\n"
    outline = read(spaced + "3|90||1, 2|Summary\r\n END \r\n\r\n")
    assert outline == read(GOOD)


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("", "direct", "the text is empty"),
        (" \n\t\n", "direct", "the text is empty"),
        ("hello there", "direct", "the first line is neither PLAN nor DIRECT"),
        ("END\nPLAN\n1|60|-|-|A\nEND", "direct", "the first line is neither PLAN nor DIRECT"),
        ("plan\n1|60|-|-|A\nEND", "direct", "the first line is neither PLAN nor DIRECT"),
        ("DIRECTLY", "direct", "the first line is neither PLAN nor DIRECT"),
        ("<think>hm\nPLAN\n1|60|-|-|A\nEND", "direct", "the first line is neither PLAN nor DIRECT"),
        ("PLAN\n1. A\nEND", "plan", "1 fields between `|`, not 5"),
    ],
)
def test_unparsable(text: str, mode: str, reason: str) -> None:
    outline = read(text)
    assert (outline.mode, outline.points, outline.status) == (mode, (), "unparsable")
    assert outline.skipped[0].reason == reason
    for empty in ("PLAN\nEND", "PLAN"):
        assert read(empty) == Outline("plan", (), (), "unparsable")


def test_without_its_terminator_an_outline_is_partial() -> None:
    assert read("PLAN\n1|60|-|-|A\n").status == "partial"
    cut = read("PLAN\n1|60|-|-|A\n2|60|-|-|The wat")
    assert (cut.status, titles(cut)) == ("partial", ["A", "The wat"])
    assert mended(cut) == [(3, "the text ends inside this line")]
    half = read("PLAN\n1|60|-|-|A\n2|60")
    assert (half.status, titles(half), mended(half)) == ("partial", ["A"], [])
    assert skipped(half) == [(3, "2 fields between `|`, not 5")]


@pytest.mark.parametrize(
    "last", ["EN", "END.", "[END]", "end", "THE END", "END END", "2 Explain END marker"]
)
def test_only_a_whole_line_terminates(last: str) -> None:
    outline = read(f"PLAN\n1|60|-|-|A\n{last}\n2|60|-|-|B")
    assert titles(outline) == ["A", "B"]
    assert outline.status == "partial"


def test_text_behind_the_terminator_is_reported_and_harmless() -> None:
    outline = read(GOOD + "\n4|60|-|-|Late\nbye")
    assert outline.status == "ok"
    assert (len(outline.points), skipped(outline)) == (3, [(6, "after END"), (7, "after END")])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2|60|-|-", "4 fields between `|`, not 5"),
        ("2|60|-|-|A|B", "6 fields between `|`, not 5"),
        ("2. A", "1 fields between `|`, not 5"),
        ("  - nested", "1 fields between `|`, not 5"),
        ("1.1|60|-|-|A", "the id is not a number"),
        ("|60|-|-|A", "the id is not a number"),
        ("-2|60|-|-|A", "the id is not a number"),
        ("٢|60|-|-|A", "the id is not a number"),
        ("²|60|-|-|A", "the id is not a number"),
        ("1|60|-|-|A", "the id 1 is repeated"),
        ("01|60|-|-|A", "the id 1 is repeated"),
        ("2||-|-|A", "the length is not a number"),
        ("2|-60|-|-|A", "the length is not a number"),
        ("2|6e1|-|-|A", "the length is not a number"),
        ("2|60|-|-|", "the title is empty"),
        ("2|60|-|-| \u3000 ", "the title is empty"),
        ("2|60|-|-|a\x00b", "control character in the title"),
        ("2|60|-|-|a\x1b[31mb", "control character in the title"),
        ("2|60|-|-|a\u2028END", "control character in the title"),
        ("2|60|-|-|a\u202eb", "control character in the title"),
        ("2|60|-|-|a\rb", "control character in the title"),
        ("2|60|-|-|caf\ufffd", "undecodable bytes in the title"),
        ("2|60|-|-|END", "marker text in the title"),
        ("2|60|-|-|PLAN", "marker text in the title"),
        ("2|60|-|-|a </s> b", "marker text in the title"),
        ("2|60|-|-|[INST] b", "marker text in the title"),
        ("2|60|-|-|END" + " " * 60 + "x", "marker text in the title"),
        ("2|60|-|-|<|im_end|>", "7 fields between `|`, not 5"),
    ],
)
def test_lines_that_are_skipped(line: str, reason: str) -> None:
    outline = plan("1|60|-|-|First", line, "3|60|-|1|Last")
    assert skipped(outline) == [(3, reason)]
    assert titles(outline) == ["First", "Last"]
    assert outline.points[1] == Point(2, 60, None, (1,), "Last")
    assert outline.status == "partial"


@pytest.mark.parametrize(
    ("line", "point", "reasons"),
    [
        ("2|0|-|-|A", Point(2, 10, None, (), "A"), ["length 0 became 10"]),
        ("2|991|-|-|A", Point(2, 990, None, (), "A"), ["length 991 became 990"]),
        ("2|" + "9" * 5000 + "|-|-|A", Point(2, 990, None, (), "A"), None),
        ("2|60|Fly|-|A", Point(2, 60, None, (), "A"), ["no tool 'Fly'"]),
        ("2|60|Web Search|-|A", Point(2, 60, "Web Search", (), "A"), []),
        ("2|60|none|-|A", Point(2, 60, None, (), "A"), []),
        ("2|60||-|A", Point(2, 60, None, (), "A"), []),
        ("2|60|-|2|A", Point(2, 60, None, (), "A"), ["no earlier point '2' to depend on"]),
        ("2|60|-|1,9|A", Point(2, 60, None, (1,), "A"), ["no earlier point '9' to depend on"]),
        ("2|60|-|x|A", Point(2, 60, None, (), "A"), ["no earlier point 'x' to depend on"]),
        ("2|60|-|1,1|A", Point(2, 60, None, (1,), "A"), []),
        ("2|60|-|-|" + "x" * 61, Point(2, 60, None, (), "x" * 60), None),
        ("7|60|-|1|A", Point(2, 60, None, (1,), "A"), ["id 7 became 2"]),
        ("0|60|-|1|A", Point(2, 60, None, (1,), "A"), ["id 0 became 2"]),
    ],
)
def test_lines_that_are_mended(line: str, point: Point, reasons: list[str] | None) -> None:
    outline = read(f"PLAN\n1|60|-|-|First\n{line}\nEND", tools=["Search", "Web Search"])
    assert outline.points[1] == point
    assert outline.status == "ok"
    assert outline.mended if reasons is None else mended(outline) == [(3, r) for r in reasons]


def test_ids_are_renumbered_and_dependencies_follow() -> None:
    outline = plan("5|60|-|-|A", "3|60|-|5|B", "9|60|-|3,5|C", "4|60|-|9,2|D")
    assert [(p.id, p.deps) for p in outline.points] == [(1, ()), (2, (1,)), (3, (1, 2)), (4, (3,))]
    assert (5, "no earlier point '2' to depend on") in mended(outline)
    outline = plan("1|60|-|-|A", "2|many|-|-|B", "3|60|-|1,2|C")  # a skipped line takes its id
    assert outline.points[1] == Point(2, 60, None, (1,), "C")
    assert mended(outline) == [(4, "id 3 became 2"), (4, "no earlier point '2' to depend on")]


def test_more_points_than_branches() -> None:
    text = "\n".join(["PLAN", *(f"{i}|60|-|-|Point {i}" for i in range(1, 101)), "END"])
    outline = read(text, max_branches=3)
    assert titles(outline) == ["Point 1", "Point 2", "Point 3"]
    assert len(outline.skipped) == 97
    assert len(read("PLAN\n" + "x" * 10_000).skipped[0].text) == 80
    assert {s.reason for s in outline.skipped} == {"more than 3 points"}
    assert outline.status == "partial"


def test_a_reasoning_block_is_dropped_and_lines_keep_their_numbers() -> None:
    outline = read("<think>\nPLAN\n1|60|-|-|No\n</think>\n\nPLAN\n1|60|-|-|A\nx\nEND")
    assert titles(outline) == ["A"]
    assert mended(outline) == [(1, "reasoning block dropped")]
    assert skipped(outline) == [(8, "1 fields between `|`, not 5")]


# Properties ------------------------------------------------------------------------------------

TITLES = (
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=60)
    .map(str.strip)
    .filter(lambda t: title_problem(t) is None)
)


@st.composite
def outlines(draw: st.DrawFn) -> tuple[Point, ...]:
    points = []
    for i in range(1, draw(st.integers(1, 8)) + 1):
        deps = draw(st.sets(st.integers(1, i - 1)) if i > 1 else st.just(set()))
        length = draw(st.integers(10, 990))
        tool = draw(st.sampled_from([None, "Search", "Web Search"]))
        points.append(Point(i, length, tool, tuple(sorted(deps)), draw(TITLES)))
    return tuple(points)


@settings(max_examples=200, deadline=None)
@given(outlines())
def test_what_is_written_is_read_back(points: tuple[Point, ...]) -> None:
    assert read(render_outline(points)) == Outline("plan", points, (), "ok")


PIECES = st.sampled_from(
    [
        *("PLAN", "END", "DIRECT", "\n", "\r\n", "|", "-", ",", "1", "2", "17", "60", "Search"),
        *(" ", "<think>", "</think>", "\x00", "\u2028", "é", "\ufffd", "x" * 70, "1|60|-|-|A\n"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES | st.text(max_size=4), max_size=40).map("".join), st.booleans())
def test_whatever_is_written_has_an_outcome(text: str, as_plan: bool) -> None:
    outline = read("PLAN\n" + text if as_plan else text, max_branches=3, tools=["Search"])
    assert [p.id for p in outline.points] == list(range(1, len(outline.points) + 1))
    assert len(outline.points) <= 3
    for p in outline.points:
        assert 10 <= p.length <= 990
        assert p.tool in (None, "Search")
        assert list(p.deps) == sorted({d for d in p.deps if 0 < d < p.id})
        assert title_problem(p.title) is None
        assert 1 <= len(p.title) <= MAX_TITLE and p.title == p.title.strip()
    assert bool(outline.points) == (outline.status in ("ok", "partial"))
    if outline.points:
        again = read(render_outline(outline.points))
        assert (again.points, again.status) == (outline.points, "ok")


# Upstream --------------------------------------------------------------------------------------

# The cases that upstream reads as a plan or an answer and whose meaning can be said in our format.
WELL_FORMED = {
    "basic plan": "PLAN\n1|200|Search|-|Do A\n2|150|None|-|Do B\nEND",
    "no END": "PLAN\n1|200|None|-|A",
    "leading think + plan": "<think>x</think>PLAN\n1|20|None|-|A\nEND",
    "spaces2": "PLAN\n1 | 20 | None | - | A\nEND",
    "fullwidth": "PLAN\n1|20|None|-|标题\nEND",
    "deps": "PLAN\n1|10|None|-|A\n2|10|None|1|B\n3|10|None|1,2|C\nEND",
    "title with brackets": "PLAN\n1|10|None|-|A [x] <y> 1. z\nEND",
    "tool lower none": "PLAN\n1|10|none|-|A\nEND",
    "crlf": "PLAN\r\n1|10|None|-|A\r\nEND",
}
# This case's length lies below our smallest one and is raised for the comparison.
RAISED = {"leading think + plan": 20}


@pytest.mark.parametrize("name", sorted(WELL_FORMED))
def test_agreement_with_upstream_on_well_formed_outlines(name: str) -> None:
    cases = json.loads(UPSTREAM.read_text(encoding="utf-8"))
    (content,) = (case["content"] for case in cases if case["name"] == name)
    expected = [
        (c["id"], RAISED.get(name, c["length"]), c["tool"], c["deps"], c["title"]) for c in content
    ]
    outline = read(WELL_FORMED[name])
    ours = [
        (p.id, p.length, p.tool, ",".join(map(str, p.deps)) or "-", p.title) for p in outline.points
    ]
    assert ours == expected
    assert outline.status == ("partial" if name == "no END" else "ok")


# The rest: the analogous text in our format, our status, our titles, and why.
# Lists -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "titles", "status"),
    [
        (render_list(read(GOOD).points), ["How rain forms", "Floods", "Summary"], "ok"),
        ("1. Rain\n\n 2)  Sun \n", ["Rain", "Sun"], "ok"),
        ("<think>1. Hm</think>\n1. Rain\n2. Sun", ["Rain", "Sun"], "ok"),
        ("3. Rain\n7. Sun", ["Rain", "Sun"], "ok"),
        ('1. **Rain**: it falls\n2. "Sun"', ["Rain", "Sun"], "ok"),
        ("1. Rain\n2. rain!\n3. Sun", ["Rain", "Sun"], "partial"),
        ("Here it is:\n1. Rain\n2. Sun", ["Rain", "Sun"], "partial"),
        ("1. a\n2. b\n3. c\n4. d\n5. e", ["a", "b", "c", "d"], "partial"),
        ("1. Rain\n2. a|b\n3. </s>\n4.", ["Rain"], "partial"),
        ("1. " + "x" * 61, ["x" * 60], "ok"),
        ("It depends.", [], "unparsable"),
        ("", [], "unparsable"),
    ],
)
def test_what_models_write(text: str, titles: list[str], status: str) -> None:
    outline = parse_list(text, max_branches=4)
    assert [p.title for p in outline.points] == titles
    points = [Point(i, USUAL_LENGTH, None, (), title) for i, title in enumerate(titles, 1)]
    assert outline.points == tuple(points)
    assert outline.status == status
    assert bool(outline.skipped) == (status != "ok")


# Files -----------------------------------------------------------------------------------------


def load(tmp_path: Path, name: str, text: str | bytes) -> Outline:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_outline(path, max_branches=3, tools=["Search"])


YAML = """
- {title: How rain forms, deps: ~, tool: ~}
- {title: Floods, length: 70, tool: Search, deps: [1]}
- {title: Summary, length: 90, deps: [1, 2]}
"""


def test_an_outline_is_read_from_its_format_or_a_list(tmp_path: Path) -> None:
    assert load(tmp_path, "o.txt", "\ufeff" + GOOD + "\n") == read(GOOD)
    assert load(tmp_path, "o.txt", "DIRECT\n").status == "direct"
    assert load(tmp_path, "o.yaml", YAML) == read(GOOD)
    assert load(tmp_path, "o.json", json.dumps(yaml.safe_load(YAML))) == read(GOOD)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("o.txt", "PLAN\n1|60|-|-|A\n1|60|-|-|B\nEND", "o.txt:3: the id 1 is repeated"),
        ("o.txt", "\nPLAN\n1|5|-|-|A\nEND", "o.txt:3: length 5 became 10"),
        ("o.txt", "PLAN\n1|60|-|-|A\n", "o.txt: no END line"),
        ("o.txt", "PLAN\nEND\n", "o.txt: no points"),
        ("o.txt", "DIRECT\nmore\n", "o.txt:2: after DIRECT"),
        ("o.txt", "1|60|-|-|A\n", "o.txt:1: neither PLAN, nor DIRECT, nor a list of points"),
        ("o.txt", "", "o.txt:1: neither PLAN, nor DIRECT, nor a list of points"),
        ("o.txt", b"PLAN\n1|60|-|-|\xff\nEND", "o.txt:2:10: yaml: byte 0xff is not UTF-8"),
        ("o.txt", b"x" * 262_145, "o.txt:1:1: yaml: 262145 bytes; at most 262144"),
        ("o.json", "[]", "o.json:1: neither PLAN, nor DIRECT, nor a list of points"),
        ("o.json", '[{"title": "A"},\n 3]', "o.json: 1: must be a mapping, not the number 3"),
        ("o.json", '[{"title": "A",}]', "o.json:1:1"),
        ("o.json", "[" * 100_000, "o.json: nested too deeply"),
        ("o.json", '[{"titel": "A"}]', "0.titel: unknown key 'titel'; did you mean 'title'?"),
        ("o.json", '[{"titel": "A"}]', "o.json: 0: the key 'title' is missing"),
        ("o.json", '[{"title": 3}]', "o.json: 0.title: must be a string, not the number 3"),
        ("o.json", '[{"title": "A\\nEND"}]', "0.title: control character in the title"),
        ("o.json", '[{"title": "A|B"}]', "0.title: marker text in the title"),
        ("o.json", f'[{{"title": "{"x" * 61}"}}]', "0.title: string should have at most 60"),
        ("o.json", '[{"title": "A", "length": true}]', "0.length: must be an integer, not true"),
        ("o.json", '[{"title": "A", "length": 9999}]', "0.length: must be at most 990, not 9999"),
        ("o.json", '[{"title": "A", "tool": "a|b"}]', "0.tool: 'a|b' must match"),
        ("o.json", '[{"title": "A", "tool": 7}]', "0.tool: must be a string, not the number 7"),
        ("o.json", '[{"title": "A", "tool": "Fly"}]', "o.json: 0: no tool 'Fly' [G104]"),
        ("o.json", '[{"title": "A", "deps": "1"}]', "0.deps: must be a list, not the string '1'"),
        ("o.json", '[{"title": "A", "deps": [1]}]', "o.json: 0: no earlier point '1' to depend on"),
        ("o.json", json.dumps([{"title": "A"}] * 4), "o.json: 3: more than 3 points"),
        ("o.yaml", "- title: A\n- titel: B\n", "o.yaml:2:3: 1.titel: unknown key 'titel'"),
        ("o.yaml", "- title: A\n- title: B\n  deps: [4]\n", "o.yaml:2:3: 1: no earlier"),
        ("o.yaml", "- title: [A\n", "o.yaml:"),
        ("o.yaml", "- title: A\x00\n", "o.yaml"),
        ("o.yaml", "title: A\n", "o.yaml:1: neither PLAN, nor DIRECT, nor a list of points"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    with pytest.raises(OutlineError) as error:
        load(tmp_path, name, text)
    assert message in str(error.value)
    assert str(error.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize(("name", "reason"), [("none.txt", "No such file"), (".", "directory")])
def test_a_missing_file(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(OutlineError, match=reason):
        load_outline(tmp_path / name, max_branches=3, tools=())


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(OutlineError) as error:
        load(tmp_path, "o.txt", "PLAN\n1|5|-|-|A\nx\n3|60|Fly|-|B\nEND")
    assert len(str(error.value).splitlines()) == 4

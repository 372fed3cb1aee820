"""The outline that a model writes before its answer (docs/outlines.md): its formats `fields` and
`list`, readers that never raise, writers, and the strict reader of a user's outline file."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..yaml.source import Source, hint

OutlineFormat = Literal["fields", "list"]
Mode = Literal["plan", "direct"]
Status = Literal["ok", "partial", "direct", "unparsable"]

MIN_LENGTH = 10
MAX_LENGTH = 990
USUAL_LENGTH = 60  # expected tokens of a part whose outline gives no length
MAX_TITLE = 60
MAX_SHOWN = 80  # characters of a line in a note
MAX_BYTES = 1_000_000
KEYS = ("title", "length", "tool", "deps")
WORDS = ("PLAN", "DIRECT", "END")
# Texts that chat formats use as control tokens; a title may contain none of them.
MARKERS = (
    *("<s>", "</s>", "<bos>", "<eos>", "<pad>", "<unk>", "<think>", "</think>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
)
BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
TOOL_NAME = re.compile(r"\w(?:[\w .-]{0,62}[\w.-])?")
_NUMBER = re.compile(r"[0-9]+")
_LINE = re.compile(r"\s*([0-9]{1,9})[.)]\s+(.*)")
_WRAPPED = re.compile(r"""(\*\*|\*|__|"|“)(.+?)(\*\*|\*|__|"|”):?""")


@dataclass(frozen=True, slots=True)
class Point:
    """One part of the answer, a branch: `id` is 1..N in the outline's order, `length` the expected
    length in tokens (a hint), `deps` the increasing ids of earlier points whose text this one
    needs, `title` 1..60 characters without control characters, `|` and marker text."""

    id: int
    length: int
    tool: str | None
    deps: Annotated[tuple[int, ...], Field(alias="depends_on")]
    title: str


@dataclass(frozen=True, slots=True)
class LineNote:
    """A line, counted from 1, that was skipped or mended; its text is cut to MAX_SHOWN."""

    line: int
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outline:
    """An outline as it was read. status: `ok`: every line became a point (of `fields` up to END);
    `partial`: END is missing, or a line was skipped; `direct`; `unparsable`: no usable point."""

    mode: Mode
    points: tuple[Point, ...]
    skipped: tuple[LineNote, ...]
    status: Status
    mended: tuple[LineNote, ...] = ()


class Unusable(Exception):
    """Why a line cannot become a point."""


@dataclass(slots=True)
class _Reader:
    """The points and notes of the lines read so far; numbers: id in the text -> id of the point."""

    max_branches: int
    tools: Sequence[str] | None = ()
    points: list[Point] = field(default_factory=list)
    numbers: dict[int | None, int] = field(default_factory=dict)
    skipped: list[LineNote] = field(default_factory=list)
    mended: list[LineNote] = field(default_factory=list)

    def skip(self, line: int, text: str, reason: str) -> None:
        self.skipped.append(LineNote(line, text[:MAX_SHOWN], reason))

    def mend(self, line: int, text: str, *reasons: str) -> None:
        self.mended += [LineNote(line, text[:MAX_SHOWN], reason) for reason in reasons]

    def outline(self, mode: Mode, status: Status) -> Outline:
        return Outline(
            mode, tuple(self.points), tuple(self.skipped), status, mended=tuple(self.mended)
        )

    def lines_of(self, text: str) -> list[tuple[int, str]]:
        """The lines that are not blank, with their numbers, after a reasoning block if any."""
        lines = text.split("\n")  # splitlines() would let Unicode's line ends cut a title in two
        first = next((i for i, content in enumerate(lines) if content.strip()), 0)
        if lines[first].lstrip().startswith("<think>") and "</think>" in text:
            before, _, after = text.partition("</think>")
            self.mend(first + 1, lines[first], "reasoning block dropped")
            lines = [""] * before.count("\n") + after.split("\n")
        return [(i, content) for i, content in enumerate(lines, 1) if content.strip()]

    def read(self, line: int, text: str, point_of: Callable[[str, list[str]], Point]) -> None:
        """Add the point of a line, which `point_of` reads, or a note why there is none."""
        changes: list[str] = []
        try:
            self.points.append(point_of(text, changes))
            self.mend(line, text, *changes)
        except Unusable as why:
            self.skip(line, text, str(why))

    def _next_id(self) -> int:
        if len(self.points) >= self.max_branches:
            raise Unusable(f"more than {self.max_branches} points")
        return len(self.points) + 1

    def fields(self, text: str, changes: list[str]) -> Point:
        """The point of a line of the format `fields`; raises Unusable."""
        place = self._next_id()
        fields = [f.strip() for f in text.split("|")]
        if len(fields) != 5:
            raise Unusable(f"{len(fields)} fields between `|`, not 5")
        id_text, length_text, tool_text, deps_text, title_text = fields
        number = _number(id_text)
        if number is None:
            raise Unusable("the id is not a number")
        if number in self.numbers:
            raise Unusable(f"the id {number} is repeated")
        if number != place:
            changes.append(f"id {number} became {place}")
        requested = _number(length_text)
        if requested is None:
            raise Unusable("the length is not a number")
        length = min(max(requested, MIN_LENGTH), MAX_LENGTH)
        if length != requested:
            changes.append(f"length {length_text[:12]} became {length}")
        tool = None if tool_text in ("", "-") or tool_text.lower() == "none" else tool_text
        known = TOOL_NAME.fullmatch(tool_text) if self.tools is None else tool_text in self.tools
        if tool is not None and not known:
            changes.append(f"no tool {tool[:32]!r}")
            tool = None
        deps = set()
        for part in () if deps_text in ("", "-") else map(str.strip, deps_text.split(",")):
            dep = self.numbers.get(_number(part))
            if dep is None:
                changes.append(f"no earlier point {part[:12]!r} to depend on")
            else:
                deps.add(dep)
        title = _read_title(title_text, changes)
        self.numbers[number] = place
        return Point(place, length, tool, tuple(sorted(deps)), title=title)

    def listed(self, text: str, changes: list[str]) -> Point:
        """The point of a line of the format `list`; raises Unusable."""
        line = _LINE.fullmatch(text)
        if line is None:
            raise Unusable("the line does not begin with a number")
        place = self._next_id()
        if int(line[1]) != place:
            changes.append(f"number {line[1]} became {place}")
        title = line[2].strip()
        if wrapped := _WRAPPED.match(title):
            changes.append(f"{wrapped[1]} and what follows the title dropped")
            title = wrapped[2].strip().rstrip(":")
        title = _read_title(title, changes)
        if repeats(title, [point.title for point in self.points], ""):
            raise Unusable("the title is repeated")
        return Point(place, USUAL_LENGTH, None, (), title=title)


def _number(text: str) -> int | None:
    """ASCII digits as an int, at most 999,999,999; int() would refuse thousands of digits."""
    if not _NUMBER.fullmatch(text):
        return None
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= 9 else 999_999_999


def title_problem(title: str) -> str | None:
    """Why a title cannot be part of an outline, else None; its length is not checked."""
    if not title.strip():
        return "the title is empty"
    if any(c in BIDI or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in title):
        return "control character in the title"
    if "\ufffd" in title:
        return "undecodable bytes in the title"
    if title.strip() in WORDS or "|" in title or any(m in title for m in MARKERS):
        return "marker text in the title"
    return None


def _read_title(text: str, changes: list[str]) -> str:
    """A title, cut to MAX_TITLE; raises Unusable."""
    if problem := title_problem(text):
        raise Unusable(problem)
    title = text[:MAX_TITLE].rstrip()
    if title in WORDS:  # of "END", sixty blanks and a letter
        raise Unusable("marker text in the title")
    if title != text:
        changes.append(f"title cut to {len(title)} characters")
    return title


def parse_outline(text: str, *, max_branches: int, tools: Sequence[str] | None = None) -> Outline:
    """Read an outline in the format `fields` from the text of generated ids. Never raises;
    docs/outlines.md lists every outcome. tools: the names that a line may give; None for any."""
    reader = _Reader(max_branches, tools)
    lines = reader.lines_of(text)
    if not lines:
        reader.skip(1, "", "the text is empty")
        return reader.outline("direct", "unparsable")
    (number, first), *rest = lines
    if first.strip() == "DIRECT":
        for line, content in rest:
            reader.skip(line, content, "after DIRECT")
        return reader.outline("direct", "direct")
    if first.strip() != "PLAN":
        reader.skip(number, first, "the first line is neither PLAN nor DIRECT")
        return reader.outline("direct", "unparsable")
    ends = [i for i, (_, content) in enumerate(rest) if content.strip() == "END"]
    stop = ends[0] if ends else len(rest)
    for line, content in rest[:stop]:
        reader.read(line, content, reader.fields)
    complete = bool(ends) and not reader.skipped
    for line, content in rest[stop + 1 :]:
        reader.skip(line, content, "after END")
    if not reader.points:
        return reader.outline("plan", "unparsable")
    is_cut = not ends and not text.endswith("\n")
    if is_cut and rest[-1][0] not in {note.line for note in reader.skipped}:
        reader.mend(*rest[-1], "the text ends inside this line")
    return reader.outline("plan", "ok" if complete else "partial")


def render_outline(points: Sequence[Point]) -> str:
    """The text of an outline in the format `fields`, without the end of the turn."""
    lines = [
        f"{p.id}|{p.length}|{p.tool or '-'}|{','.join(map(str, p.deps)) or '-'}|{p.title}"
        for p in points
    ]
    return "\n".join(["PLAN", *lines, "END"]) if lines else "DIRECT"


def repeats(title: str, earlier: Sequence[str], question: str) -> bool:
    """Whether the letters and digits of a title repeat an earlier one, or most of the question."""
    title_key, question_key, *earlier_keys = (
        "".join(c for c in text.casefold() if c.isalnum()) for text in (title, question, *earlier)
    )
    begins = question_key.startswith(title_key) and 2 * len(title_key) > len(question_key)
    return begins or title_key in earlier_keys


def parse_list(text: str, *, max_branches: int) -> Outline:
    """Read a list of titles, as `parse_outline` reads the format `fields`."""
    reader = _Reader(max_branches)
    for number, content in reader.lines_of(text):
        reader.read(number, content, reader.listed)
    if not reader.points:
        reader.skipped[:] = reader.skipped or [LineNote(1, "", "the text is empty")]
        return reader.outline("direct", "unparsable")
    return reader.outline("plan", "partial" if reader.skipped else "ok")


def render_list(points: Sequence[Point]) -> str:
    """The text of an outline in the format `list`, without the end of the turn."""
    return "\n".join(f"{point.id}. {point.title}" for point in points)


class OutlineError(ValueError):
    """A file that is not an outline; one `file:line: reason` per problem."""


def load_outline(
    path: str | Path, *, max_branches: int, tools: Sequence[str] | None = None
) -> Outline:
    """Read an outline file: the format itself (its first line is PLAN or DIRECT), or a list of
    {title, length?, tool?, deps?}, `deps` being numbers of earlier items from 1; JSON if the name
    ends in .json, else YAML. Raises OutlineError: no file, or not a valid outline."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise OutlineError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise OutlineError(f"{path}: more than {MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OutlineError(f"{path}:{line}: not UTF-8") from None
    place: Callable[[int], str] = partial("{}:{}".format, path)  # of a line of the outline
    if text.lstrip().split("\n", 1)[0].strip() not in ("PLAN", "DIRECT"):
        items, places = _items(text, str(path))
        place = places.__getitem__
        if problems := [f"{place(i)}: {p}" for i, x in enumerate(items, 2) for p in _wrong(x)]:
            raise OutlineError("\n".join(problems))
        points = [
            Point(
                id=i,
                length=item.get("length", USUAL_LENGTH),
                tool=item.get("tool"),
                deps=tuple(item.get("deps") or ()),
                title=item["title"].strip(),
            )
            for i, item in enumerate(items, 1)
        ]
        text = render_outline(points)
    outline = parse_outline(text, max_branches=max_branches, tools=tools)
    notes = sorted((*outline.skipped, *outline.mended), key=lambda note: note.line)
    if notes:
        raise OutlineError("\n".join(f"{place(note.line)}: {note.reason}" for note in notes))
    if outline.status not in ("ok", "direct"):
        raise OutlineError(f"{path}: {'no END line' if outline.points else 'no points'}")
    return outline


def _items(text: str, name: str) -> tuple[list[Any], dict[int, str]]:
    """The items of a list, and by line of their outline the place of each."""
    try:
        source = None if name.lower().endswith(".json") else Source(text, name)
        data = json.loads(text) if source is None else source.data
    except json.JSONDecodeError as error:
        raise OutlineError(f"{name}:{error.lineno}:{error.colno}: {error.msg}") from None
    except RecursionError:
        raise OutlineError(f"{name}: nested too deeply") from None
    except ValueError as error:  # of the YAML reader, with the place
        raise OutlineError(str(error)) from None
    if not isinstance(data, list) or not data:
        raise OutlineError(f"{name}:1: neither PLAN, nor DIRECT, nor a list of points")
    places = {}
    for i in range(len(data)):
        at = "" if source is None else "".join(f":{n}" for n in source.place((i,))[1:])
        places[i + 2] = f"{name}{at}: item {i + 1}"
    return data, places


def _wrong(item: Any) -> Iterator[str]:
    """Problems of one item's shape; the reader checks the ranges of values."""

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**9

    if not isinstance(item, dict):
        yield f"a point is a mapping with the keys {', '.join(KEYS)}"
        return
    yield from (f"no key {key!r}{hint(str(key), KEYS)}" for key in item if key not in KEYS)
    title = item.get("title")
    if not isinstance(title, str):
        yield "title is missing" if title is None else "title is not a text"
    elif problem := title_problem(title):
        yield problem
    elif len(title.strip()) > MAX_TITLE:
        yield f"the title has more than {MAX_TITLE} characters"
    if not is_count(item.get("length", USUAL_LENGTH)):
        yield "length is not a positive number"
    tool = item.get("tool") or ""
    if not isinstance(tool, str) or "|" in tool or "\n" in tool:
        yield "tool is not a name"
    deps = item.get("deps") or []
    if not isinstance(deps, list) or not all(map(is_count, deps)):
        yield "deps is not a list of numbers of earlier points"

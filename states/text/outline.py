"""The outline that a model writes before its answer (docs/outlines.md): its formats `fields` and
`list`, readers that never raise, writers, and the strict reader of a user's outline file."""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, RootModel, StringConstraints
from pydantic_core import PydanticCustomError

from ..yaml.source import GraphError, Mark, ProblemCode, Source, read
from ..yaml.spec import Int, Spec, validated
from .tokens import OutlineError

OutlineFormat = Literal["fields", "list"]
Mode = Literal["plan", "direct"]
Status = Literal["ok", "partial", "direct", "unparsable"]

MIN_LENGTH = 10
MAX_LENGTH = 990
USUAL_LENGTH = 60  # expected tokens of a part whose outline gives no length
MAX_TITLE = 60
MAX_SHOWN = 80  # characters of a line in a note
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
        mended = tuple(self.mended)
        return Outline(mode, tuple(self.points), tuple(self.skipped), status, mended=mended)

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


def _valid_title(title: str) -> str:
    if why := title_problem(title):
        raise PydanticCustomError("title", "{why}", {"why": why})
    return title


class Item(Spec):
    """A point in a file that is a list; `deps` are numbers of earlier items from 1."""

    title: Annotated[
        str,
        StringConstraints(strip_whitespace=True, max_length=MAX_TITLE),
        AfterValidator(_valid_title),
    ]
    length: Int = Field(USUAL_LENGTH, ge=MIN_LENGTH, le=MAX_LENGTH)
    tool: Annotated[str, Field(pattern=r"^[^|\n]*$")] | None = None
    deps: tuple[Annotated[Int, Field(ge=1)], ...] | None = ()


class Items(RootModel[tuple[Item, ...]]):
    """The list."""


def load_outline(path: str | Path, *, max_branches: int, tools: Sequence[str]) -> Outline:
    """Read an outline file: the format itself (its first line is PLAN or DIRECT), or a list of
    `Item`; JSON if the name ends in .json, else YAML. Raises OutlineError: no file, or not a valid
    outline."""
    name = str(path)
    source = None
    try:
        text = read(Path(path), name)
        if text.lstrip().split("\n", 1)[0].strip() not in ("PLAN", "DIRECT"):
            source, text = _listed(text, name)
    except OSError as error:
        raise OutlineError(f"{name}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise OutlineError(f"{name}:{error.lineno}:{error.colno}: {error.msg}") from None
    except RecursionError:
        raise OutlineError(f"{name}: nested too deeply") from None
    except ValueError as error:  # of the YAML reader, with the place
        raise OutlineError(str(error)) from None
    outline = parse_outline(text, max_branches=max_branches, tools=tools)
    notes = sorted((*outline.skipped, *outline.mended), key=lambda note: note.line)
    if notes and source is not None:  # its first item is in line 2 of the text
        items = [((note.line - 2,), note.reason) for note in notes]
        wrong = GraphError(source.problem(*item, ProblemCode.WRONG_VALUE) for item in items)
        raise OutlineError(str(wrong))
    if notes:
        raise OutlineError("\n".join(f"{name}:{note.line}: {note.reason}" for note in notes))
    if outline.status not in ("ok", "direct"):
        raise OutlineError(f"{name}: {'no END line' if outline.points else 'no points'}")
    return outline


def _listed(text: str, name: str) -> tuple[Source, str]:
    """A list of points, and its outline in the format `fields`. JSON is read as JSON, because YAML
    has no pairs of surrogates; its values have no places."""
    is_json = name.lower().endswith(".json")
    data = json.loads(text) if is_json else None
    source = Source(json.dumps(data) if is_json else text, name, "outline")
    if is_json:
        source.data = data
        source.marks = dict.fromkeys(source.marks, Mark(name))
    if not isinstance(source.data, list) or not source.data:
        raise OutlineError(f"{name}:1: neither PLAN, nor DIRECT, nor a list of points")
    points = [
        Point(i, item.length, item.tool, item.deps or (), title=item.title)
        for i, item in enumerate(validated(Items, source).root, 1)
    ]
    return source, render_outline(points)

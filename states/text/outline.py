"""The outline that a model writes before its answer: the format, its reader and its writer.

The format is line by line, made to be read without guessing::

    PLAN                                    DIRECT
    1|60|-|-|How rain forms
    2|70|Search|1|Floods in the news
    END

A line is id|expected length in tokens|tool|dependencies|title, with `-` for no tool and for no
dependencies. `DIRECT` alone says that the answer needs no outline. `END` counts as a whole line
only, so a title may contain the word.

The reader takes the text of *generated* ids only, and never raises:

======================================================  ===========================================
what stands there                                       what becomes of it
======================================================  ===========================================
blank lines, blanks around a field, CR before the LF    nothing is reported
one <think>...</think> block in front                   dropped; mended
first line neither PLAN nor DIRECT, nothing at all      unparsable
text behind DIRECT or behind END                        skipped; the status stays
no END                                                  partial; a last line without LF is mended
fewer or more than five fields, an id that is not       the line is skipped; partial
ASCII digits, an id seen before, a length that is not
ASCII digits, an empty title, a title with control
characters, undecodable bytes or marker text
lines beyond max_branches                               skipped; partial
ids with gaps, from 0 or 5, or out of order             numbered 1.. as written; mended
length outside 10..max_length                           moved to the nearer end; mended
a tool that is not allowed                              no tool; mended
a dependency that is no earlier kept point              dropped; mended
a title of more than 60 characters                      cut; mended
======================================================  ===========================================
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

OutlineFormat = Literal["fields", "list"]
Mode = Literal["plan", "direct"]
Status = Literal["ok", "partial", "direct", "unparsable"]

MIN_LENGTH = 10
MAX_LENGTH = 990
MAX_TITLE = 60
# Texts that chat formats use as control tokens; none of them may reach an answer by way of a title.
MARKERS = (
    *("<s>", "</s>", "<bos>", "<eos>", "<pad>", "<unk>", "<think>", "</think>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
)
TOOL_NAME = re.compile(r"\w(?:[\w .-]{0,62}[\w.-])?")
WORDS = ("PLAN", "DIRECT", "END")

_NUMBER = re.compile(r"[0-9]+")
BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
_SHOWN = 80  # characters of a line that a report repeats


@dataclass(frozen=True, slots=True)
class Point:
    """One part of the answer: a branch.

    `id` is 1..N in the order of the outline, `length` the expected length in tokens (a hint),
    `deps` the increasing ids of earlier points whose text this one needs, `title` 1..60 characters
    without control characters, `|` and marker text.
    """

    id: int
    length: int
    tool: str | None
    deps: tuple[int, ...]
    title: str


@dataclass(frozen=True, slots=True)
class LineNote:
    """A line that was skipped or mended. Lines count from 1; their text is cut to 80 letters."""

    line: int
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outline:
    """What was read.

    Attributes:
        mode: `plan` if the text began with PLAN, else `direct`.
        points: in order; dependencies point backwards, so they form a DAG.
        status: `ok`: END was there and every line became a point; `partial`: it was not, or a line
            in front of it was skipped; `direct`: DIRECT; `unparsable`: no usable point.
    """

    mode: Mode
    points: tuple[Point, ...]
    skipped: tuple[LineNote, ...]
    status: Status
    mended: tuple[LineNote, ...] = ()


class Unusable(Exception):
    """Why a line cannot become a point."""


@dataclass(slots=True)
class OutlineReader:
    """What was read so far, line by line."""

    max_branches: int
    tools: Sequence[str] | None
    max_length: int
    points: list[Point] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # id in the text -> id of the point
    skipped: list[LineNote] = field(default_factory=list)
    mended: list[LineNote] = field(default_factory=list)

    def skip(self, line: int, text: str, reason: str) -> None:
        self.skipped.append(LineNote(line, text[:_SHOWN], reason))

    def mend(self, line: int, text: str, reasons: Iterable[str]) -> None:
        self.mended += [LineNote(line, text[:_SHOWN], reason) for reason in reasons]

    def outline(self, mode: Mode, status: Status) -> Outline:
        return Outline(mode, tuple(self.points), tuple(self.skipped), status, tuple(self.mended))

    def lines_of(self, text: str) -> list[tuple[int, str]]:
        """The lines that hold something, with their numbers, behind a reasoning block if any."""
        lines = text.split("\n")  # splitlines() would let Unicode's line ends cut a title in two
        opened = next((i for i, content in enumerate(lines) if content.strip()), 0)
        if lines[opened].lstrip().startswith("<think>") and "</think>" in text:
            before, _, after = text.partition("</think>")
            self.mend(opened + 1, lines[opened], ["reasoning block dropped"])
            lines = [""] * before.count("\n") + after.split("\n")
        return [(i, content) for i, content in enumerate(lines, 1) if content.strip()]

    def read_line(self, line: int, text: str) -> None:
        changes: list[str] = []
        try:
            number, point = self._point(text, changes)
        except Unusable as why:
            self.skip(line, text, str(why))
            return
        self.points.append(point)
        self.numbers[number] = point.id
        self.mend(line, text, changes)

    def _point(self, text: str, changes: list[str]) -> tuple[int, Point]:
        fields = [f.strip() for f in text.split("|")]
        if len(self.points) >= self.max_branches:
            raise Unusable(f"more than {self.max_branches} points")
        if len(fields) != 5:
            raise Unusable(f"{len(fields)} fields between `|`, not 5")
        number = self._id(fields[0], changes)
        point = Point(
            id=len(self.points) + 1,
            length=self._length(fields[1], changes),
            tool=self._tool(fields[2], changes),
            deps=self._deps(fields[3], changes),
            title=read_title(fields[4], changes),
        )
        return number, point

    def _id(self, text: str, changes: list[str]) -> int:
        number = _number(text)
        if number is None:
            raise Unusable("the id is not a number")
        if number in self.numbers:
            raise Unusable(f"the id {number} was given before")
        if number != len(self.points) + 1:
            changes.append(f"id {number} became {len(self.points) + 1}")
        return number

    def _length(self, text: str, changes: list[str]) -> int:
        number = _number(text)
        if number is None:
            raise Unusable("the length is not a number")
        length = min(max(number, MIN_LENGTH), self.max_length)
        if length != number:
            changes.append(f"length {text[:12]} became {length}")
        return length

    def _tool(self, text: str, changes: list[str]) -> str | None:
        if text in ("", "-") or text.lower() == "none":
            return None
        known = TOOL_NAME.fullmatch(text) if self.tools is None else text in self.tools
        if not known:
            changes.append(f"no tool {text[:32]!r}")
            return None
        return text

    def _deps(self, text: str, changes: list[str]) -> tuple[int, ...]:
        ids = set()
        for part in () if text in ("", "-") else text.split(","):
            number = _number(part.strip())
            if number is None or number not in self.numbers:
                changes.append(f"no earlier point {part.strip()[:12]!r} to depend on")
            else:
                ids.add(self.numbers[number])
        return tuple(sorted(ids))


def _number(text: str) -> int | None:
    """ASCII digits as an int; anything longer than nine digits counts as the largest such one."""
    if not _NUMBER.fullmatch(text):
        return None
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= 9 else 999_999_999


def title_problem(title: str) -> str | None:
    """Why a title cannot stand in an outline, None if it can; its length is not looked at."""
    if not title.strip():
        return "the title is empty"
    if any(c in BIDI or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in title):
        return "control character in the title"
    if "\ufffd" in title:
        return "undecodable bytes in the title"
    if title.strip() in WORDS or "|" in title or any(m in title for m in MARKERS):
        return "marker text in the title"
    return None


def read_title(text: str, changes: list[str]) -> str:
    """A title, cut to its most; raises Unusable."""
    if problem := title_problem(text):
        raise Unusable(problem)
    title = text[:MAX_TITLE].rstrip()
    if title in WORDS:  # what is left of "END", sixty blanks and a letter
        raise Unusable("marker text in the title")
    if title != text:
        changes.append(f"title cut to {len(title)} characters")
    return title


def parse_outline(
    text: str,
    *,
    max_branches: int,
    tools: Sequence[str] | None = None,
    max_length: int = MAX_LENGTH,
) -> Outline:
    """Read an outline. Never raises; the module's table lists every outcome.

    `text` is the decoded text of generated ids, special tokens left out. At most `max_branches`
    points are kept. `tools` are the names that a line may give (None for any, () for none),
    `max_length` is the upper end of the expected lengths.
    """
    reader = OutlineReader(max_branches, tools, max_length)
    lines = reader.lines_of(text)
    if not lines:
        reader.skip(1, "", "nothing was written")
        return reader.outline("direct", "unparsable")
    (number, first), rest = lines[0], lines[1:]
    if first.strip() == "DIRECT":
        for line, content in rest:
            reader.skip(line, content, "behind DIRECT")
        return reader.outline("direct", "direct")
    if first.strip() != "PLAN":
        reader.skip(number, first, "the first line is neither PLAN nor DIRECT")
        return reader.outline("direct", "unparsable")
    return _read_plan(reader, rest, closed=text.endswith("\n"))


def _read_plan(reader: OutlineReader, lines: list[tuple[int, str]], *, closed: bool) -> Outline:
    ends = [i for i, (_, content) in enumerate(lines) if content.strip() == "END"]
    stop = ends[0] if ends else len(lines)
    for line, content in lines[:stop]:
        reader.read_line(line, content)
    complete = bool(ends) and not reader.skipped
    for line, content in lines[stop + 1 :]:
        reader.skip(line, content, "behind END")
    if not reader.points:
        return reader.outline("plan", "unparsable")
    if not ends and not closed and lines[-1][0] not in {s.line for s in reader.skipped}:
        reader.mend(*lines[-1], ["the text ends inside this line"])
    return reader.outline("plan", "ok" if complete else "partial")


def render_outline(points: Sequence[Point]) -> str:
    """The text of an outline as a model would write it, without the end of its turn."""
    lines = [
        f"{p.id}|{p.length}|{p.tool or '-'}|{','.join(map(str, p.deps)) or '-'}|{p.title}"
        for p in points
    ]
    return "\n".join(["PLAN", *lines, "END"]) if lines else "DIRECT"

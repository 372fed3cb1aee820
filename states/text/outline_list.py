"""The other format of an outline: a plain numbered list of titles, which small models can write.

::

    1. What bicycles cost
    2. How fast they are in traffic

Nothing else is said of a part: it needs no tool and no other part. The turn ends behind the last
title. The reader takes the text of *generated* ids only, and never raises:

======================================================  ===========================================
what stands there                                       what becomes of it
======================================================  ===========================================
blank lines, blanks around a title, `1)` for `1.`       nothing is reported
one <think>...</think> block in front                   dropped; mended
numbers with gaps, or out of order                      numbered 1.. as they stand; mended
`**bold**` or quotes around a title, a colon behind it  dropped; mended
a title of more than 60 characters                      cut; mended
a line without a number, an empty title, a title with   the line is skipped; partial
control characters, undecodable bytes or marker text,
a title that stood before, lines beyond max_branches
======================================================  ===========================================
"""

import re
from collections.abc import Sequence

from .outline import MAX_LENGTH, LineNote, Outline, OutlineReader, Point, Unusable, read_title

USUAL_LENGTH = 60
_LINE = re.compile(r"\s*([0-9]{1,9})[.)]\s+(.*)")
_WRAPPED = re.compile(r"""(\*\*|\*|__|"|“)(.+?)(\*\*|\*|__|"|”):?""")


def same(title: str) -> str:
    """What two titles have in common that say the same: letters and digits, case folded."""
    return "".join(c for c in title.casefold() if c.isalnum())


def repeats(title: str, earlier: Sequence[str], question: str) -> bool:
    """Whether a title says an earlier one again, or the question, or most of its beginning."""
    own = same(title)
    asked = same(question)
    return own in map(same, earlier) or (asked.startswith(own) and 2 * len(own) > len(asked))


def parse_list(text: str, *, max_branches: int) -> Outline:
    """Read a list of titles. Never raises; the module's table lists every outcome.

    `text` is the decoded text of generated ids, special tokens left out.
    """
    reader = OutlineReader(max_branches, (), MAX_LENGTH)
    for number, content in reader.lines_of(text):
        changes: list[str] = []
        try:
            title = _title(content, reader, changes)
        except Unusable as why:
            reader.skip(number, content, str(why))
            continue
        reader.points.append(Point(len(reader.points) + 1, USUAL_LENGTH, None, (), title))
        reader.mend(number, content, changes)
    if not reader.points:
        reader.skipped[:] = reader.skipped or [LineNote(1, "", "nothing was written")]
        return reader.outline("direct", "unparsable")
    return reader.outline("plan", "partial" if reader.skipped else "ok")


def _title(content: str, reader: OutlineReader, changes: list[str]) -> str:
    line = _LINE.fullmatch(content)
    if line is None:
        raise Unusable("the line does not begin with a number")
    if len(reader.points) >= reader.max_branches:
        raise Unusable(f"more than {reader.max_branches} points")
    if int(line[1]) != len(reader.points) + 1:
        changes.append(f"number {line[1]} became {len(reader.points) + 1}")
    text = line[2].strip()
    if wrapped := _WRAPPED.match(text):
        changes.append(f"{wrapped[1]} and what follows the title dropped")
        text = wrapped[2].strip().rstrip(":")
    title = read_title(text, changes)
    if repeats(title, [point.title for point in reader.points], ""):
        raise Unusable("the title stood before")
    return title


def render_list(points: Sequence[Point]) -> str:
    """The text of an outline as a model would write it, without the end of its turn."""
    return "\n".join(f"{point.id}. {point.title}" for point in points)

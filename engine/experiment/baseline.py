"""`--baseline FILE`: whether a kept result's figures still hold, beyond what noise explains."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .figures import FIGURES, Figure
from .rows import SCHEMA

LEAST = 0.05  # of a figure from clocks: less is not called a change, however sure it is
EXACT = 0.01  # of one that only what is computed decides
SAME = ("prompts", "dtype", "models")  # what must be equal of two results


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A figure of a row, before and now, with its interval if it has one."""

    row: str
    figure: str
    before: list[float | None]
    now: list[float | None]

    def __str__(self) -> str:
        form = FIGURES[self.figure].form
        return f"{self.row}: {self.figure} {_words(self.before, form)} -> {_words(self.now, form)}"


def _words(values: list[float | None], form: str) -> str:
    value, *edges = (format(one, form) for one in values if one is not None)
    return f"{value} ({' to '.join(edges)})" if edges else value


def read_baseline(file: Path) -> dict[str, Any]:
    """Raises UsageError: it is no result of `specsot bench`."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["schema_version"] != SCHEMA or not isinstance(found["rows"], dict):
            raise ValueError("of another version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no result of `specsot bench`"
        raise UsageError(f"--baseline {file}: {reason}") from None
    return dict(found)


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], file: Path) -> None:
    """Raises UsageError where the two measured different things."""
    old = _facts(before)
    new = _facts(now)
    unlike = [name for name in SAME if old[name] != new[name]]
    if unlike:
        raise UsageError(f"--baseline {file}: was measured with other {', '.join(unlike)}")
    if not before["rows"].keys() & now["rows"].keys():
        raise UsageError(f"--baseline {file}: has no row of these")


def _facts(result: Mapping[str, Any]) -> dict[str, Any]:
    graphs = result["setup"]["graphs"].values()
    return {
        "prompts": result["setup"]["prompts"],
        "dtype": sorted({one["dtype"] for one in graphs}),
        "models": sorted({one["model_hash"] for one in graphs}),
    }


def changes(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[FigureChange], list[FigureChange]]:
    """What got worse, and what got better, of the rows and figures that both have.

    Times of another hour are others, so of figures from clocks only ratios to the reference row
    are looked at. One has changed if the intervals lie apart and the values by LEAST.
    """
    found = [*_changes(before, now)]
    worse = [one for one, sign in found if sign < 0]
    return worse, [one for one, sign in found if sign > 0]


def _changes(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[FigureChange, int]]:
    for label, row in now["rows"].items():
        old = before["rows"].get(label, {"figures": {}, "reference": None})
        for name, values in row["figures"].items():
            figure = FIGURES[name]
            past = old["figures"].get(name)
            if past is None or not figure.better or (figure.timed and figure.kind != "paired"):
                continue
            if sign := _sign(figure, past, values):
                yield FigureChange(label, name, past, values), sign


def _sign(figure: Figure, past: list[float | None], values: list[float | None]) -> int:
    """1 for better, -1 for worse, 0 for what noise explains."""
    (old, old_low, old_high), (new, low, high) = past, values
    if (
        old is None
        or new is None
        or abs(new - old) <= (LEAST if figure.timed else EXACT) * abs(old)
    ):
        return 0
    if figure.timed:
        if old_low is None or old_high is None or low is None or high is None:
            return 0  # a single round: nobody knows
        if low <= old_high and old_low <= high:
            return 0
    return figure.better if new > old else -figure.better

"""Comparison of what was found with what was recorded, under the changes that are named."""

import difflib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import yaml

from .run import GOLDEN

PARTS = ("runs", "golden", "trace", "replay", "errors", "cli", "openapi", "graphs")
CHANGES = GOLDEN / "changes.yaml"
MOST_LINES = 14  # of one difference
MOST_SHOWN = 12  # differences of one part
UNEQUAL = 5
ABSENT = "(absent)"


def judge(found: Mapping[str, Mapping[str, Any]]) -> int:
    """Print for every part how many entries are equal, changed or different; the exit code."""
    changes = _changes()
    code = 0
    for part, entries in found.items():
        before = json.loads((GOLDEN / f"{part}.json").read_text(encoding="utf-8"))
        reasons: dict[str, int] = {}
        different: list[str] = []
        equal = 0
        for key in sorted({*before, *entries}):
            if before.get(key, ABSENT) == entries.get(key, ABSENT):
                equal += 1
            elif reason := _reason(changes, part=part, key=key):
                reasons[reason] = reasons.get(reason, 0) + 1
            else:
                different.append(key)
        changed = sum(reasons.values())
        print(f"{part}: {equal} equal, {changed} changed with a reason, {len(different)} different")
        for reason, count in reasons.items():
            print(f"  changed {count}: {reason}")
        for key in different[:MOST_SHOWN]:
            print(f"  different: {key}")
            print(_difference(before.get(key, ABSENT), entries.get(key, ABSENT)))
        for key in different[MOST_SHOWN:]:
            print(f"  different: {key}")
        code = UNEQUAL if different else code
    return code


def _changes() -> list[dict[str, str]]:
    """The rows {part, key, reason} of changes.yaml; part and key may be globs."""
    rows = yaml.safe_load(CHANGES.read_text(encoding="utf-8")) if CHANGES.exists() else []
    return list(rows or [])


def _reason(changes: list[dict[str, str]], part: str, key: str) -> str:
    for row in changes:
        if fnmatchcase(part, row["part"]) and fnmatchcase(key, row["key"]):
            return row["reason"]
    return ""


def _difference(before: Any, after: Any) -> str:
    """A short unified diff of two entries."""
    lines = difflib.unified_diff(_lines(before), _lines(after), "recorded", "found", "", "", 1, "")
    shown = [f"    {line[:160]}" for line in lines][2:]
    more = [f"    ... {len(shown) - MOST_LINES} more lines"] if len(shown) > MOST_LINES else []
    return "\n".join([*shown[:MOST_LINES], *more])


def _lines(value: Any) -> list[str]:
    text = value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True)
    return text.splitlines()

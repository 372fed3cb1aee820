"""Lists of words and phrasings from the almanac's wording file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .almanac import FOLDER, WORDING


@cache
def _wording(path: Path = FOLDER / WORDING) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def words(name: str) -> tuple[str, ...]:
    """The list of this name."""
    return tuple(_wording()[name])


def parts(name: str) -> tuple[tuple[str, str], ...]:
    """The general plan of this name: titles and bodies with ``{x}`` for the subject."""
    return tuple((row["title"], row["body"].strip()) for row in _wording()[name])


def passage(name: str) -> str:
    """The text of this name."""
    return str(_wording()[name]).strip()

"""The vectors of vanilla speculative decoding (tests/golden/vanilla/README.md)."""

import json
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "golden" / "vanilla"


def vectors(name: str) -> Any:
    """A whole file."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def cases(name: str) -> list[Any]:
    found: list[Any] = vectors(name)["cases"]
    return found


def tensor(numbers: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers, or the strings of infinities, nested in lists."""
    return torch.tensor(_floats(numbers), dtype=dtype)


def _floats(numbers: Any) -> Any:
    return [_floats(n) for n in numbers] if isinstance(numbers, list) else float(numbers)

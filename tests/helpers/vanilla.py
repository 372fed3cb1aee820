"""Vanilla speculative decoding: its vectors (tests/golden/vanilla/README.md) and its cost model."""

import json
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "golden" / "vanilla"


def vectors(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def cases(name: str) -> list[Any]:
    found: list[Any] = vectors(name)["cases"]
    return found


def tensor(numbers: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers, or the strings of infinities, nested in lists."""
    return torch.tensor(_floats(numbers), dtype=dtype)


def _floats(numbers: Any) -> Any:
    return [_floats(n) for n in numbers] if isinstance(numbers, list) else float(numbers)


MOST_GAMMA = 32


def mean_emitted(alpha: float, gamma: int) -> float:
    return sum(alpha**accepted for accepted in range(gamma + 1))


def speedup(alpha: float, cost: float, gamma: int) -> float:
    """Tokens per time, plain decoding being 1: a round costs gamma drafts and one verification."""
    return mean_emitted(alpha, gamma) / (gamma * cost + 1)


def best_gamma(alpha: float, cost: float, most: int = MOST_GAMMA) -> int:
    """The gamma with the highest speed-up; 0 means that plain decoding is fastest."""
    return max(range(most + 1), key=lambda gamma: speedup(alpha, cost, gamma))

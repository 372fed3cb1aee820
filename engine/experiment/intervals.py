"""How sure a figure is: bootstrap intervals over prompts and, within them, over repeats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure; low and high: its interval, None where a single round gave it."""

    value: float
    low: float | None = None
    high: float | None = None


def resampled(groups: Sequence[int]) -> npt.NDArray[np.int64]:
    """[DRAWS, rounds]: numbers of rounds; groups: which prompt each round asked.

    Prompts are drawn with replacement, then so many rounds of each as it has at most: what varies
    between questions and what varies between repeats both count. The draws are always the same.
    """
    random = np.random.default_rng(0)
    names = sorted(set(groups))
    own = [np.flatnonzero(np.asarray(groups) == name) for name in names]
    most = max(len(one) for one in own)
    picked = random.integers(len(own), size=(DRAWS, len(own)))
    places = random.random((DRAWS, len(own), most))
    sizes = np.array([len(one) for one in own])
    table = np.stack([np.resize(one, most) for one in own])
    within = (places * sizes[picked][..., None]).astype(np.int64)
    numbers: npt.NDArray[np.int64] = table[picked[..., None], within].reshape(DRAWS, -1)
    return numbers


def estimate(groups: Sequence[int], of: Callable[[npt.NDArray[np.int64]], Values]) -> Estimate:
    """What `of` makes of all rounds, and of drawn ones; of: [..., rounds] numbers -> [...]."""
    value = float(of(np.arange(len(groups))[None])[0])
    if len(groups) < 2:
        return Estimate(value)
    edge = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(of(resampled(groups)), [edge, 100 - edge])
    return Estimate(value, float(low), float(high))

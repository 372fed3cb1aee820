"""What rounds cost: forwards by their rows, all beside them; and when to try what seems too dear.

Measured at the start (`RoundCosts`) or while the run goes (`Clock`); host numbers only.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# rounds without a draft after which one drafts, to see: twice as many each time
FEW = 4
MANY = 64
READ = 2  # rows of a branch that the drafter has to read in a usual round
LAST = 9  # rounds that the overhead is the median of


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds of a forward by its rows; between the points a line, behind them the last one.

    rows: increasing, one at least. None at all: a forward that costs nothing.
    """

    rows: tuple[int, ...]
    ms: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, float]) -> "Curve":
        """From measured points. Fewer rows never take longer than more, which they could be padded
        to: where they did, something else disturbed them."""
        rows = tuple(sorted(points))
        least = accumulate((float(points[one]) for one in reversed(rows)), min)
        return cls(rows, tuple(least)[::-1])

    def at(self, rows_X: npt.ArrayLike) -> Floats:
        """Milliseconds of so many rows."""
        wanted_X = np.asarray(rows_X, np.float64)
        if not self.rows:
            return np.zeros_like(wanted_X)
        inside_X = np.interp(wanted_X, self.rows, self.ms)
        beyond_X = np.maximum(wanted_X - self.rows[-1], 0)
        found_X: Floats = inside_X + beyond_X * self._slope
        return found_X

    @property
    def _slope(self) -> float:
        """Milliseconds of a further row behind the last point; never less than nothing."""
        if len(self.rows) < 2:
            return self.ms[-1] / self.rows[-1]
        return max((self.ms[-1] - self.ms[-2]) / (self.rows[-1] - self.rows[-2]), 0.0)


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """What a round's forwards cost; overhead: milliseconds of all else in the smallest one, None to
    find out."""

    target: Curve
    drafter: Curve
    overhead: float | None = None

    def catching_up(self, unread: int, branches: int) -> float:
        """Milliseconds that the drafter's first forward takes longer, having more rows to read than
        what a round usually commits."""
        usual, first = self.drafter.at([READ * branches, max(unread, READ * branches)])
        return float(first - usual)


@dataclass(eq=False, slots=True)
class Clock:
    """What rounds cost beside their forwards, apart for rounds with drafts and without: the median
    of the last ones. Of trees it grows with the number of forwards, for a level is laid out,
    masked and ranked as a round is; a further draft of a chain takes little beside its forward.

    began, expected, share: of the round that goes on: its moment, what its forwards should take,
        and what it takes beside them in rounds of the smallest tree; share 0: it drafts nothing.
    """

    costs: RoundCosts
    now: Callable[[], float] = perf_counter
    began: float | None = None
    expected: float = 0.0
    share: float = 1.0
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))

    @property
    def overhead(self) -> float:
        """Milliseconds of a round without drafts."""
        return self._of(self.plain or self.drafted)

    @property
    def overhead_drafted(self) -> float:
        """Milliseconds of a round with drafts: never less."""
        return max(self._of(self.drafted or self.plain), self._of(self.plain))

    def _of(self, seen: deque[float]) -> float:
        if self.costs.overhead is not None:
            return self.costs.overhead
        return max(median(seen), 0.0) if seen else 0.0

    def round_(self, expected: float, share: float = 1.0) -> None:
        """A round begins whose forwards should take so long; the one before has ended."""
        now = self.now()
        if self.began is not None:
            seen = self.drafted if self.share else self.plain
            seen.append((1e3 * (now - self.began) - self.expected) / (self.share or 1.0))
        self.began = now
        self.expected = expected
        self.share = share


@dataclass(eq=False, slots=True)
class Pauses:
    """When to draft though it does not seem to pay: what drafts are worth is not known before some
    were judged, and may change. Each time that it still does not pay, the next pause is longer.

    rounds: without a draft; until: so many, then one drafts.
    """

    rounds: int = 0
    until: int = 0

    def over_(self, *, pays: bool) -> bool:
        """A round begins; whether it has to draft, to see."""
        if pays:
            self.rounds = 0
            self.until = FEW
            return False
        self.rounds += 1
        if self.rounds <= self.until:
            return False
        self.rounds = 0
        self.until = min(max(2 * self.until, FEW), MANY)
        return True

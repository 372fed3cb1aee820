"""How much a round drafts: the size with the most expected tokens per millisecond.

`RoundCosts` are measured times of forwards by rows. Acceptance is counted during the run: by depth
for a chain, by rank and depth for a tree. All numbers are on the host, and a choice takes a few
operations on small tables. The choice changes the speed, never the text.

Shape letters: G lengths of a chain (0 is none), C sizes of a tree, D depths.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ..types import DraftSize

Floats = npt.NDArray[np.float64]

USUAL_ROWS = 2  # rows of a branch that the drafter reads in a usual round
OVERHEAD_ROUNDS = 9  # the overhead is the median over these many rounds
# Rounds without drafts before one drafts as a trial; doubled after each trial.
MIN_PAUSE = 4
MAX_PAUSE = 64


# -- costs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds of a forward by rows: linear between the points and beyond the last one.

    rows: increasing. Without points a forward costs nothing.
    """

    rows: tuple[int, ...]
    ms: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, float]) -> "Curve":
        """From measured points, made monotonic: fewer rows could be padded to more."""
        rows = tuple(sorted(points))
        least = accumulate((float(points[count]) for count in reversed(rows)), min)
        return cls(rows, tuple(least)[::-1])

    def at(self, rows_X: npt.ArrayLike) -> Floats:
        """Milliseconds of a forward of these numbers of rows."""
        counts_X = np.asarray(rows_X, np.float64)
        if not self.rows:
            return np.zeros_like(counts_X)
        inside_X = np.interp(counts_X, self.rows, self.ms)
        beyond_X = np.maximum(counts_X - self.rows[-1], 0)
        ms_X: Floats = inside_X + beyond_X * self._slope
        return ms_X

    @property
    def _slope(self) -> float:
        """Milliseconds of each row beyond the last point, at least 0."""
        if len(self.rows) < 2:
            return self.ms[-1] / self.rows[-1]
        return max((self.ms[-1] - self.ms[-2]) / (self.rows[-1] - self.rows[-2]), 0.0)


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Costs of a round's forwards; overhead: milliseconds of the rest of the smallest round, None
    to measure it during the run."""

    target: Curve
    drafter: Curve
    overhead: float | None = None

    def catching_up(self, unread: int, branches: int) -> float:
        """Extra milliseconds of the drafter's first forward for more unread rows than usual."""
        usual = USUAL_ROWS * branches
        usual_ms, first_ms = self.drafter.at([usual, max(unread, usual)])
        return float(first_ms - usual_ms)


@dataclass(eq=False, slots=True)
class Clock:
    """Per-round overhead outside the forwards, tracked separately with and without drafts.

    It is the median of the last rounds. For trees it scales with the number of forwards, since each
    level is laid out, masked and ranked; a further draft of a chain costs little besides its
    forward.

    start, expected, share: of the current round: its time in seconds, the milliseconds that its
        forwards should take, and its overhead relative to the smallest tree; 0 without drafts.
    """

    costs: RoundCosts
    now: Callable[[], float] = perf_counter
    start: float | None = None
    expected: float = 0.0
    share: float = 1.0
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=OVERHEAD_ROUNDS))
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=OVERHEAD_ROUNDS))

    @property
    def overhead(self) -> float:
        """Milliseconds of a round without drafts."""
        return self._median(self.plain or self.drafted)

    @property
    def overhead_drafted(self) -> float:
        """Milliseconds of a round with drafts; at least `overhead`."""
        return max(self._median(self.drafted or self.plain), self._median(self.plain))

    def _median(self, samples: deque[float]) -> float:
        if self.costs.overhead is not None:
            return self.costs.overhead
        return max(median(samples), 0.0) if samples else 0.0

    def round_(self, expected: float, share: float = 1.0) -> None:
        """Start a round whose forwards should take `expected` milliseconds; ends the last one."""
        now = self.now()
        if self.start is not None:
            samples = self.drafted if self.share else self.plain
            samples.append((1e3 * (now - self.start) - self.expected) / (self.share or 1.0))
        self.start = now
        self.expected = expected
        self.share = share


@dataclass(eq=False, slots=True)
class Pauses:
    """When to draft as a trial although it does not seem to pay: acceptance is unknown before the
    first drafts and may change. Each pause between unsuccessful trials is longer.

    rounds: without drafts; until: the length of the current pause.
    """

    rounds: int = 0
    until: int = 0

    def over_(self, *, pays: bool) -> bool:
        """Start a round; whether it must draft as a trial."""
        if pays:
            self.rounds = 0
            self.until = MIN_PAUSE
            return False
        self.rounds += 1
        if self.rounds <= self.until:
            return False
        self.rounds = 0
        self.until = min(max(2 * self.until, MIN_PAUSE), MAX_PAUSE)
        return True


# -- chains ---------------------------------------------------------------------------------------

PRIOR = 0.9  # acceptance before any draft was judged, weighted as `PRIOR_WEIGHT` drafts
PRIOR_WEIGHT = 8.0
OPTIMISM = 0.5  # standard deviations that are added to the observed acceptance
DECAY = 0.95  # of all counts in a round with drafts
SHRINKAGE = 4.0  # drafts after which a depth's, or a branch's, own acceptance weighs half
MAX_CHANCE = 0.99


class ChainChooser:
    """Lengths of chains.

    One length is chosen for all branches. A branch with a lower acceptance gets fewer drafts: each
    must be worth the row that it takes, at the rate of the whole round.

    Args:
        longest: most drafts of a chain.
    """

    def __init__(
        self, costs: RoundCosts, longest: int, now: Callable[[], float] = perf_counter
    ) -> None:
        self.costs = costs
        self.longest = longest
        self.clock = Clock(costs, now)
        self.choice = DraftSize(0, 0, 0.0, 0.0)
        self._hits_D = np.zeros(longest)
        self._tries_D = np.zeros(longest)
        self._by_owner: dict[int, tuple[float, float]] = {}  # hits and tries
        self._forward_ms: dict[int, Floats] = {}  # by the number of branches
        self._pauses = Pauses()

    def choose_(self, owners: Sequence[int], limits: Sequence[int], unread: int = 0) -> DraftSize:
        """The lengths for the round that starts.

        Args:
            limits: for each branch the most drafts that it can use.
            unread: rows that the drafter has not read yet, of prompts or of rounds without drafts.
                Reading them is due once, so it does not affect the choice.
        """
        limit_S1 = np.asarray(limits)[:, None]
        survives_SD = self._survival(owners) * (np.arange(self.longest) < limit_S1)
        tokens_G = len(owners) + np.append(0.0, survives_SD.sum(0).cumsum())
        forwards_G = self._forwards(len(owners))
        ms_G = forwards_G + self.clock.overhead_drafted
        ms_G[0] = forwards_G[0] + self.clock.overhead
        rate_G = tokens_G / np.maximum(ms_G, 1e-9)
        best = int(rate_G.argmax())
        if self._pauses.over_(pays=best > 0) and self.longest:
            best = 1 + int(rate_G[1:].argmax())
        lengths = self._lengths(survives_SD[:, :best], float(rate_G[best]), len(owners))
        best = max(lengths, default=0)
        extra_ms = self.costs.catching_up(unread, len(owners)) if best else 0.0
        self.clock.round_(float(forwards_G[best]) + extra_ms, float(best > 0))
        self.choice = DraftSize(best, best, float(tokens_G[best]), float(ms_G[best]), lengths)
        return self.choice

    def _forwards(self, branches: int) -> Floats:
        """Milliseconds by length: one forward of the target, one of the drafter that reads the
        committed rows and drafts the first token, and one for each further draft."""
        if branches in self._forward_ms:
            return self._forward_ms[branches]
        length_G = np.arange(self.longest + 1)
        first, step = self.costs.drafter.at([USUAL_ROWS * branches, branches])
        drafting_G = np.where(length_G > 0, first + (length_G - 1) * step, 0.0)
        self._forward_ms[branches] = drafting_G + self.costs.target.at(branches * (length_G + 1))
        return self._forward_ms[branches]

    def _lengths(self, survives_SD: Floats, rate: float, branches: int) -> tuple[int, ...]:
        rows = branches * (survives_SD.shape[1] + 1)
        first, last = self.costs.target.at([branches, rows])
        row_ms = max(last - first, 0.0) / max(rows - branches, 1)
        pays_SD = (survives_SD > 0) & (survives_SD >= rate * row_ms)
        return tuple(int(count) for count in pays_SD.sum(1))

    def _survival(self, owners: Sequence[int]) -> Floats:
        """[S, D]: the probability that a branch's drafts down to a depth are all accepted."""
        tries = self._tries_D.sum()
        hits = self._hits_D.sum()
        overall = (hits + PRIOR_WEIGHT * PRIOR) / (tries + PRIOR_WEIGHT)
        overall += OPTIMISM * math.sqrt(overall * (1 - overall) / (tries + PRIOR_WEIGHT))
        rate_D = (self._hits_D + SHRINKAGE * overall) / (self._tries_D + SHRINKAGE)
        counts = [self._by_owner.get(owner, (0.0, 0.0)) for owner in owners]
        factors = [(h + SHRINKAGE * overall) / (t + SHRINKAGE) / overall for h, t in counts]
        chance_SD = np.minimum(np.asarray(factors)[:, None] * rate_D, MAX_CHANCE)
        survives_SD: Floats = chance_SD.cumprod(1)
        return survives_SD

    def learn_(self, owners: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """The outcome of the round; paths: the accepted nodes of each branch, the root first."""
        if not self.choice.size:
            return
        self._hits_D *= DECAY
        self._tries_D *= DECAY
        for owner, length, path in zip(owners, self.choice.lengths, paths, strict=True):
            accepted = len(path) - 1
            tried = min(accepted + 1, length)
            self._hits_D[:accepted] += 1
            self._tries_D[:tried] += 1
            hits, tries = self._by_owner.get(owner, (0.0, 0.0))
            self._by_owner[owner] = DECAY * hits + accepted, DECAY * tries + tried

    def forget_(self, owners: Sequence[int]) -> None:
        """Drop the counts of ended branches."""
        for owner in owners:
            self._by_owner.pop(owner, None)


# -- trees ----------------------------------------------------------------------------------------

ForwardRows = Callable[[int, int], Sequence[int]]
"""(nodes, levels) -> rows of a branch in each forward of the drafter in a round."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NODE_PRIOR = 0.7  # acceptance of the best node before any was judged, weighted as NODE_TRIES
NODE_TRIES = 2.0
RANK_SHARE = 0.5  # prior gain of a range of ranks, relative to the range before it
DEPTH_SHARE = 0.7  # the same for a level
TRIAL_ROUNDS = 16  # every so many rounds the tree is one size larger, as a trial


class TreeChooser:
    """Nodes and levels of trees, the same for all branches; no drafts where that is faster.

    The drafter ranks the nodes, so that a smaller tree is the first part of a larger one. Counted
    are accepted nodes by rank and by depth.

    Args:
        nodes, levels: most of a tree.
    """

    def __init__(
        self,
        costs: RoundCosts,
        nodes: int,
        levels: int,
        forward_rows: ForwardRows,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.costs = costs
        self.forward_rows = forward_rows
        self.clock = Clock(costs, now)
        self.sizes_C = np.array([*(size for size in SIZES if size < nodes), nodes])
        self.depths_D = np.arange(1, levels + 1)
        self.choice = DraftSize(0, 0, 0.0, 0.0)
        self._hits_C = np.zeros(len(self.sizes_C))
        self._tries_C = np.zeros(len(self.sizes_C))
        self._hits_D = np.zeros(levels)
        self._tries_D = np.zeros(levels)
        self._forward_ms: dict[int, Floats] = {}  # by the number of branches
        counts = [
            [1 + len(forward_rows(int(n), int(d))) for d in self.depths_D] for n in self.sizes_C
        ]
        self._shares_CD = np.asarray(counts) / np.min(counts)  # of forwards, to the smallest tree
        self._rounds = 0
        self._pauses = Pauses()

    def choose_(self, owners: Sequence[int], limits: Sequence[int], unread: int = 0) -> DraftSize:
        """As for chains; `limits` has no effect: few rows are beyond the end of an answer."""
        branches = len(owners)
        tokens_CD = branches * (1 + self._gains())
        forwards_CD = self._forwards(branches)
        ms_CD = forwards_CD + self.clock.overhead_drafted * self._shares_CD
        rate_CD = (tokens_CD / np.maximum(ms_CD, 1e-9)) * (self.sizes_C[:, None] >= self.depths_D)
        plain_ms = float(self.costs.target.at(branches))
        plain_rate = branches / max(plain_ms + self.clock.overhead, 1e-9)
        pays = rate_CD.max() > plain_rate
        if not self._pauses.over_(pays=pays) and not pays:
            self.clock.round_(plain_ms, 0.0)
            self.choice = DraftSize(0, 0, float(branches), branches / plain_rate)
            return self.choice
        size, level = (int(index) for index in np.unravel_index(rate_CD.argmax(), rate_CD.shape))
        self._rounds += 1
        if self._rounds % TRIAL_ROUNDS == 0:
            size = min(size + 1, len(self.sizes_C) - 1)
            level = min(level + 1, len(self.depths_D) - 1, int(self.sizes_C[size]) - 1)
        at = size, level
        extra_ms = self.costs.catching_up(unread, branches)
        self.clock.round_(float(forwards_CD[at]) + extra_ms, float(self._shares_CD[at]))
        nodes = int(self.sizes_C[size])
        levels = int(self.depths_D[level])
        self.choice = DraftSize(nodes, levels, float(tokens_CD[at]), float(ms_CD[at]))
        return self.choice

    def _forwards(self, branches: int) -> Floats:
        """[C, D]: milliseconds of all forwards of a round."""
        if branches in self._forward_ms:
            return self._forward_ms[branches]
        drafting_CD = [
            [self._drafting(int(n), int(d), branches) for d in self.depths_D] for n in self.sizes_C
        ]
        target_C = self.costs.target.at(branches * (1 + self.sizes_C))
        self._forward_ms[branches] = np.asarray(drafting_CD) + target_C[:, None]
        return self._forward_ms[branches]

    def _drafting(self, nodes: int, levels: int, branches: int) -> float:
        rows = np.asarray(self.forward_rows(nodes, levels), np.int64)
        return float(self.costs.drafter.at(branches * rows).sum())

    def _gains(self) -> Floats:
        """[C, D]: expected accepted drafts of a tree in a round."""
        mass_C = _acceptance(self._hits_C, self._tries_C, RANK_SHARE)
        depth_D = _acceptance(self._hits_D, self._tries_D, DEPTH_SHARE).cumsum()
        most = max(self._tries_D.max(initial=0.0), 1e-9)
        usual = len(depth_D)
        if self._tries_D.any():
            usual = int((self._tries_D >= RANK_SHARE * most).sum())
        gains_CD: Floats = mass_C.cumsum()[:, None] * (depth_D / depth_D[max(usual, 1) - 1])
        return gains_CD

    def learn_(self, owners: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """The outcome of the round; paths: the accepted nodes of each branch, the root first. Nodes
        are numbered by rank."""
        if not self.choice.size:
            return
        for counts in (self._hits_C, self._tries_C, self._hits_D, self._tries_D):
            counts *= DECAY
        offered_C = self.sizes_C <= self.choice.size
        offered_D = self.depths_D <= self.choice.levels
        for path in paths:
            self._tries_C += offered_C
            self._tries_D += offered_D
            ranks = np.minimum(np.asarray(path[1:], np.int64), self.sizes_C[-1])
            np.add.at(self._hits_C, np.searchsorted(self.sizes_C, ranks), 1)
            self._hits_D[: min(len(path) - 1, len(self._hits_D))] += 1

    def forget_(self, owners: Sequence[int]) -> None:
        """Nothing is counted by branch."""


def _acceptance(hits_X: Floats, tries_X: Floats, share: float) -> Floats:
    """Accepted per try; with few tries close to `share` times the value before."""
    rates = []
    before = NODE_PRIOR / share
    for hits, tries in zip(hits_X.tolist(), tries_X.tolist(), strict=True):
        before = (hits + NODE_TRIES * share * before) / (tries + NODE_TRIES)
        rates.append(before)
    return np.asarray(rates)


Chooser = ChainChooser | TreeChooser

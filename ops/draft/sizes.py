"""How much a round drafts: the size with the most expected tokens per millisecond, by measured
times of forwards and counted acceptance. All numbers are on the host.

Shape letters: G lengths of a chain (0 is none), C sizes of a tree, D depths."""

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
from .kinds import KindRecords

Floats = npt.NDArray[np.float64]

USUAL_ROWS = 2  # rows of a branch that the drafter reads in a usual round
OVERHEAD_ROUNDS = 9  # the overhead is the median over these many rounds
# Rounds without drafts before one drafts as a trial; doubled after each trial.
MIN_PAUSE = 4
MAX_PAUSE = 64


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds of a forward by rows, linear between and beyond the points; 0 without any."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, float]) -> "Curve":
        """From measured points, made monotonic: fewer rows could be padded to more."""
        rows = tuple(sorted(points))
        least = accumulate((float(points[count]) for count in reversed(rows)), min)
        return cls(rows, tuple(least)[::-1])

    def at(self, rows_X: npt.ArrayLike) -> Floats:
        counts_X = np.asarray(rows_X, np.float64)
        if not self.rows:
            return np.zeros_like(counts_X)
        slope = self.ms[-1] / self.rows[-1]
        if len(self.rows) > 1:
            slope = max((self.ms[-1] - self.ms[-2]) / (self.rows[-1] - self.rows[-2]), 0.0)
        beyond_X = np.maximum(counts_X - self.rows[-1], 0)
        return np.interp(counts_X, self.rows, self.ms) + beyond_X * slope


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Costs of a round's forwards, and the milliseconds of its rest; None to measure that. kinds:
    what rounds of several drafters gave, which all runs of a session add to."""

    target: Curve
    drafter: Curve
    overhead: float | None = None
    kinds: KindRecords = field(default_factory=KindRecords)

    def catching_up(self, unread: int, branches: int) -> float:
        """Extra milliseconds of the drafter's first forward for more unread rows than usual."""
        usual = USUAL_ROWS * branches
        usual_ms, first_ms = self.drafter.at([usual, max(unread, usual)])
        return float(first_ms - usual_ms)


class Chooser:
    """The size (`choice`) of each round's drafts: `choose_` starts a round, by the most drafts
    that each branch can use and the rows not read yet; `learn_` gets each branch's accepted
    nodes. plain, drafted: milliseconds outside the forwards of the last rounds. by_owner: counts
    of accepted and of tested drafts, of choosers that count by branch; the drafter drops them."""

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.choice = DraftSize(0, 0, 0.0, 0.0)
        self.plain: deque[float] = deque(maxlen=OVERHEAD_ROUNDS)
        self.drafted: deque[float] = deque(maxlen=OVERHEAD_ROUNDS)
        self._forward_ms: dict[int, Floats] = {}  # of all forwards, by the number of branches
        self._start: float | None = None  # of the current round, in seconds
        self._expected = 0.0  # milliseconds that its forwards should take
        self._share = 1.0  # its overhead relative to the smallest tree's; 0 without drafts
        self._without = 0  # rounds without drafts in the current pause
        self._pause = 0
        self.by_owner: dict[int, tuple[float, float]] = {}

    @property
    def overhead(self) -> float:
        """Median milliseconds of a round without drafts outside its forwards."""
        return self._median(self.plain or self.drafted)

    @property
    def overhead_drafted(self) -> float:
        return max(self._median(self.drafted or self.plain), self._median(self.plain))

    def _median(self, samples: deque[float]) -> float:
        if self.costs.overhead is not None:
            return self.costs.overhead
        return max(median(samples), 0.0) if samples else 0.0

    def _start_round_(self, choice: DraftSize, expected: float, share: float) -> DraftSize:
        """End the last round, start one whose forwards should take `expected` ms; its choice."""
        self.choice = choice
        now = perf_counter()
        if self._start is not None:
            samples = self.drafted if self._share else self.plain
            samples.append((1e3 * (now - self._start) - self._expected) / (self._share or 1.0))
        self._start = now
        self._expected = expected
        self._share = share
        return choice

    def pause_(self) -> None:
        """Another drafter has the rounds until `choose_`: their time says nothing of its own."""
        self._start = None

    def _is_trial_(self, *, pays: bool) -> bool:
        """Whether to draft although that does not seem to pay, after ever longer pauses."""
        if pays:
            self._without = 0
            self._pause = MIN_PAUSE
            return False
        self._without += 1
        if self._without <= self._pause:
            return False
        self._without = 0
        self._pause = min(max(2 * self._pause, MIN_PAUSE), MAX_PAUSE)
        return True


PRIOR = 0.9  # acceptance before any draft was judged, weighted as `PRIOR_WEIGHT` drafts
PRIOR_WEIGHT = 8.0
OPTIMISM = 0.5  # standard deviations that are added to the observed acceptance
DECAY = 0.95  # of all counts in a round with drafts
SHRINKAGE = 4.0  # drafts after which a depth's, or a branch's, own acceptance weighs half
MAX_CHANCE = 0.99


class ChainChooser(Chooser):
    """One length for all chains, up to `longest`; a branch of lower acceptance gets fewer drafts:
    each must be worth the row that it takes, at the rate of the whole round."""

    def __init__(self, costs: RoundCosts, longest: int) -> None:
        super().__init__(costs)
        self.longest = longest
        self._hits_D = np.zeros(longest)
        self._tries_D = np.zeros(longest)

    def choose_(self, owners: Sequence[int], limits: Sequence[int], unread: int = 0) -> DraftSize:
        branches = len(owners)
        tries = self._tries_D.sum()
        overall = (self._hits_D.sum() + PRIOR_WEIGHT * PRIOR) / (tries + PRIOR_WEIGHT)
        overall += OPTIMISM * math.sqrt(overall * (1 - overall) / (tries + PRIOR_WEIGHT))
        rate_D = (self._hits_D + SHRINKAGE * overall) / (self._tries_D + SHRINKAGE)
        counts = [self.by_owner.get(owner, (0.0, 0.0)) for owner in owners]
        factors = [(h + SHRINKAGE * overall) / (t + SHRINKAGE) / overall for h, t in counts]
        chance_SD = np.minimum(np.asarray(factors)[:, None] * rate_D, MAX_CHANCE)
        within_SD = np.arange(self.longest) < np.asarray(limits)[:, None]
        survives_SD = chance_SD.cumprod(1) * within_SD  # all drafts down to a depth are accepted
        tokens_G = branches + np.append(0.0, survives_SD.sum(0).cumsum())
        if branches not in self._forward_ms:
            length_G = np.arange(self.longest + 1)
            first_ms, step_ms = self.costs.drafter.at([USUAL_ROWS * branches, branches])
            drafting_G = np.where(length_G > 0, first_ms + (length_G - 1) * step_ms, 0.0)
            target_G = self.costs.target.at(branches * (length_G + 1))
            self._forward_ms[branches] = drafting_G + target_G
        forwards_G = self._forward_ms[branches]
        ms_G = forwards_G + self.overhead_drafted
        ms_G[0] = forwards_G[0] + self.overhead
        rate_G = tokens_G / np.maximum(ms_G, 1e-9)
        best = int(rate_G.argmax())
        if self._is_trial_(pays=best > 0) and self.longest:
            best = 1 + int(rate_G[1:].argmax())
        first_ms, last_ms = self.costs.target.at([branches, branches * (best + 1)])
        row_ms = max(last_ms - first_ms, 0.0) / max(branches * best, 1)
        drafts_SD = survives_SD[:, :best]
        pays_SD = (drafts_SD > 0) & (drafts_SD >= float(rate_G[best]) * row_ms)
        lengths = tuple(int(count) for count in pays_SD.sum(1))
        best = max(lengths, default=0)
        extra_ms = self.costs.catching_up(unread, branches) if best else 0.0
        size = DraftSize(best, best, float(tokens_G[best]), float(ms_G[best]), lengths=lengths)
        return self._start_round_(size, float(forwards_G[best]) + extra_ms, float(best > 0))

    def learn_(self, owners: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        if not self.choice.size:
            return
        self._hits_D *= DECAY
        self._tries_D *= DECAY
        for owner, length, path in zip(owners, self.choice.lengths, paths, strict=True):
            accepted = len(path) - 1
            tried = min(accepted + 1, length)
            self._hits_D[:accepted] += 1
            self._tries_D[:tried] += 1
            hits, tries = self.by_owner.get(owner, (0.0, 0.0))
            self.by_owner[owner] = DECAY * hits + accepted, DECAY * tries + tried


SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NODE_PRIOR = 0.7  # acceptance of the best node before any was judged, weighted as NODE_TRIES
NODE_TRIES = 2.0
RANK_SHARE = 0.5  # prior gain of a range of ranks, relative to the range before it
DEPTH_SHARE = 0.7  # the same for a level
TRIAL_ROUNDS = 16  # rounds between trials of a tree that is one size larger


class TreeChooser(Chooser):
    """Nodes and levels of trees, the same for all branches, up to the given ones; no drafts where
    that is faster. Nodes are ranked; acceptance is counted by rank and by depth. rows_of: (nodes,
    levels) -> rows of a branch in each forward of the drafter in a round."""

    def __init__(
        self, costs: RoundCosts, nodes: int, levels: int, rows_of: Callable[..., Sequence[int]]
    ) -> None:
        super().__init__(costs)
        self.sizes_C = np.array([*(size for size in SIZES if size < nodes), nodes])
        self.depths_D = np.arange(1, levels + 1)
        self._hits_C = np.zeros(len(self.sizes_C))
        self._tries_C = np.zeros(len(self.sizes_C))
        self._hits_D = np.zeros(levels)
        self._tries_D = np.zeros(levels)
        self._rows_CD = [
            [np.asarray(rows_of(size, depth), np.int64) for depth in self.depths_D.tolist()]
            for size in self.sizes_C.tolist()
        ]
        counts = [[1 + len(rows) for rows in rows_D] for rows_D in self._rows_CD]
        self._shares_CD = np.asarray(counts) / np.min(counts)  # of forwards, to the smallest tree
        self._rounds = 0

    def choose_(self, owners: Sequence[int], limits: Sequence[int], unread: int = 0) -> DraftSize:
        branches = len(owners)
        mass_C = _acceptance(self._hits_C, self._tries_C, RANK_SHARE)
        depth_D = _acceptance(self._hits_D, self._tries_D, DEPTH_SHARE).cumsum()
        usual = len(depth_D)
        if self._tries_D.any():
            usual = int((self._tries_D >= RANK_SHARE * self._tries_D.max()).sum())
        gains_CD = mass_C.cumsum()[:, None] * (depth_D / depth_D[max(usual, 1) - 1])
        tokens_CD = branches * (1 + gains_CD)
        if branches not in self._forward_ms:
            at = self.costs.drafter.at
            drafting = [[at(branches * rows).sum() for rows in rows_D] for rows_D in self._rows_CD]
            target_C = self.costs.target.at(branches * (1 + self.sizes_C))
            self._forward_ms[branches] = np.asarray(drafting) + target_C[:, None]
        forwards_CD = self._forward_ms[branches]
        ms_CD = forwards_CD + self.overhead_drafted * self._shares_CD
        rate_CD = (tokens_CD / np.maximum(ms_CD, 1e-9)) * (self.sizes_C[:, None] >= self.depths_D)
        plain_ms = float(self.costs.target.at(branches))
        plain_rate = branches / max(plain_ms + self.overhead, 1e-9)
        pays = rate_CD.max() > plain_rate
        if not self._is_trial_(pays=pays) and not pays:
            none = DraftSize(0, 0, float(branches), branches / plain_rate)
            return self._start_round_(none, plain_ms, 0.0)
        size, level = (int(index) for index in np.unravel_index(rate_CD.argmax(), rate_CD.shape))
        self._rounds += 1
        if self._rounds % TRIAL_ROUNDS == 0:
            size = min(size + 1, len(self.sizes_C) - 1)
            level = min(level + 1, len(self.depths_D) - 1, int(self.sizes_C[size]) - 1)
        nodes = int(self.sizes_C[size])
        levels = int(self.depths_D[level])
        chosen = size, level
        choice = DraftSize(nodes, levels, float(tokens_CD[chosen]), float(ms_CD[chosen]))
        expected = float(forwards_CD[chosen]) + self.costs.catching_up(unread, branches)
        return self._start_round_(choice, expected, float(self._shares_CD[chosen]))

    def learn_(self, owners: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
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


def _acceptance(hits_X: Floats, tries_X: Floats, share: float) -> Floats:
    """Accepted per try; with few tries close to `share` times the value before."""
    rates = []
    before = NODE_PRIOR / share
    for hits, tries in zip(hits_X.tolist(), tries_X.tolist(), strict=True):
        before = (hits + NODE_TRIES * share * before) / (tries + NODE_TRIES)
        rates.append(before)
    return np.asarray(rates)

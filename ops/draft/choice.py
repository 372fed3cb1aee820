"""How much a round should draft: what is expected to give most tokens in a millisecond.

What a forward costs by its rows is measured (`RoundCosts`), what drafts are worth is counted while
the run goes: how often the draft at each depth of a chain is accepted once its parent is, or the
node at each rank of a tree. Host numbers only, and each choice is a few operations on small tables.
Whatever is chosen, the tokens are the target's own.

Shape letters: G lengths of a chain (0 is none), C sizes of a tree, D depths.
"""

import math
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from ..types import DraftSize
from .costs import READ, Clock, Floats, Pauses, RoundCosts

# acceptance before anything is known, and so many drafts' worth of it
PRIOR = 0.9
TRUST = 8.0
BOLD = 0.5  # standard deviations by which acceptance is thought to be better than it was
KEPT = 0.95  # share of what was counted that is left after a round with drafts
SHRUNK = 4.0  # drafts of its own that a depth, or a branch, needs to be half believed
SURE = 0.99


class ChainChooser:
    """Lengths of chains.

    One length is chosen for all; a branch whose drafts are accepted less often than those of the
    others gets fewer: a draft must be worth the row that it takes, at the rate of the whole round.

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
        self._own: dict[int, tuple[float, float]] = {}
        self._known: dict[int, Floats] = {}  # milliseconds, by the number of branches
        self._pauses = Pauses()

    def choose_(self, owners: Sequence[int], room: Sequence[int], unread: int = 0) -> DraftSize:
        """What these branches draft in the round that begins.

        Args:
            room: drafts that each branch has a use for at most.
            unread: rows that the drafter has yet to read, of prompts or of rounds without drafts.
                That is done once, so it says nothing about what pays.
        """
        room_S1 = np.asarray(room)[:, None]
        survives_SD = self._survival(owners) * (np.arange(self.longest) < room_S1)
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
        more = self.costs.catching_up(unread, len(owners)) if best else 0.0
        self.clock.round_(float(forwards_G[best]) + more, float(best > 0))
        self.choice = DraftSize(best, best, float(tokens_G[best]), float(ms_G[best]), lengths)
        return self.choice

    def _forwards(self, branches: int) -> Floats:
        """Milliseconds by length: a forward of the target, and for the first draft one of the
        drafter that reads what was committed, one more for each further draft."""
        if branches in self._known:
            return self._known[branches]
        length_G = np.arange(self.longest + 1)
        read, step = self.costs.drafter.at([READ * branches, branches])
        drafting_G = np.where(length_G > 0, read + (length_G - 1) * step, 0.0)
        self._known[branches] = drafting_G + self.costs.target.at(branches * (length_G + 1))
        return self._known[branches]

    def _lengths(self, survives_SD: Floats, rate: float, branches: int) -> tuple[int, ...]:
        rows = branches * (survives_SD.shape[1] + 1)
        first, last = self.costs.target.at([branches, rows])
        row = max(last - first, 0.0) / max(rows - branches, 1)
        worth_SD = (survives_SD > 0) & (survives_SD >= rate * row)
        return tuple(int(count) for count in worth_SD.sum(1))

    def _survival(self, owners: Sequence[int]) -> Floats:
        """[S, D]: the chance that a branch's draft at a depth is accepted, with all before it."""
        tries = self._tries_D.sum()
        hits = self._hits_D.sum()
        everyone = (hits + TRUST * PRIOR) / (tries + TRUST)
        everyone += BOLD * math.sqrt(everyone * (1 - everyone) / (tries + TRUST))
        rate_D = (self._hits_D + SHRUNK * everyone) / (self._tries_D + SHRUNK)
        own = [self._own.get(owner, (0.0, 0.0)) for owner in owners]
        factors = [(h + SHRUNK * everyone) / (t + SHRUNK) / everyone for h, t in own]
        chance_SD = np.minimum(np.asarray(factors)[:, None] * rate_D, SURE)
        survives_SD: Floats = chance_SD.cumprod(1)
        return survives_SD

    def learn_(self, owners: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """What became of the round; paths: the nodes that each branch took, the root first."""
        if not self.choice.size:
            return
        self._hits_D *= KEPT
        self._tries_D *= KEPT
        for owner, length, path in zip(owners, self.choice.lengths, paths, strict=True):
            accepted = len(path) - 1
            tried = min(accepted + 1, length)
            self._hits_D[:accepted] += 1
            self._tries_D[:tried] += 1
            hits, tries = self._own.get(owner, (0.0, 0.0))
            self._own[owner] = KEPT * hits + accepted, KEPT * tries + tried

    def forget_(self, owners: Sequence[int]) -> None:
        """Branches that have ended."""
        for owner in owners:
            self._own.pop(owner, None)


Work = Callable[[int, int], Sequence[int]]
"""(nodes, levels) -> the rows that a branch has in each forward of the drafter in a round."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# of a tree's first node, unseen; and so many tries' worth of that
BEST = 0.7
TRIED = 2.0
HALF = 0.5  # what a range of ranks is thought to gain beside the one before it, unseen
DEEPER = 0.7  # the same of a level
EVERY = 16  # rounds after which one is larger than it seems to pay, to see


class TreeChooser:
    """Nodes and levels of trees, the same for all branches.

    Nodes are ranked by the drafter: the tree of fewer nodes is the first part of a larger one. What
    was counted is how often a node of a rank was accepted, and one at a depth.

    Nothing is drafted where that is expected to be faster.

    Args:
        nodes, levels: most of a tree.
    """

    def __init__(
        self,
        costs: RoundCosts,
        nodes: int,
        levels: int,
        work: Work,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.costs = costs
        self.work = work
        self.clock = Clock(costs, now)
        self.sizes_C = np.array([*(one for one in SIZES if one < nodes), nodes])
        self.depths_D = np.arange(1, levels + 1)
        self.choice = DraftSize(0, 0, 0.0, 0.0)
        self._hits_C = np.zeros(len(self.sizes_C))
        self._tries_C = np.zeros(len(self.sizes_C))
        self._hits_D = np.zeros(levels)
        self._tries_D = np.zeros(levels)
        self._known: dict[int, Floats] = {}  # milliseconds, by the number of branches
        counts = [[1 + len(work(int(n), int(d))) for d in self.depths_D] for n in self.sizes_C]
        self._shares_CD = np.asarray(counts) / np.min(counts)  # of forwards, beside the smallest
        self._rounds = 0
        self._pauses = Pauses()

    def choose_(self, owners: Sequence[int], room: Sequence[int], unread: int = 0) -> DraftSize:
        """As of chains; room does not matter: rows behind the end of an answer are few."""
        branches = len(owners)
        tokens_CD = branches * (1 + self._gains())
        forwards_CD = self._forwards(branches)
        ms_CD = forwards_CD + self.clock.overhead_drafted * self._shares_CD
        rate_CD = (tokens_CD / np.maximum(ms_CD, 1e-9)) * (self.sizes_C[:, None] >= self.depths_D)
        forward = float(self.costs.target.at(branches))
        bare = branches / max(forward + self.clock.overhead, 1e-9)
        pays = rate_CD.max() > bare
        if not self._pauses.over_(pays=pays) and not pays:
            self.clock.round_(forward, 0.0)
            self.choice = DraftSize(0, 0, float(branches), branches / bare)
            return self.choice
        size, level = (int(one) for one in np.unravel_index(rate_CD.argmax(), rate_CD.shape))
        self._rounds += 1
        if self._rounds % EVERY == 0:
            size = min(size + 1, len(self.sizes_C) - 1)
            level = min(level + 1, len(self.depths_D) - 1, int(self.sizes_C[size]) - 1)
        at = size, level
        more = self.costs.catching_up(unread, branches)
        self.clock.round_(float(forwards_CD[at]) + more, float(self._shares_CD[at]))
        nodes = int(self.sizes_C[size])
        levels = int(self.depths_D[level])
        self.choice = DraftSize(nodes, levels, float(tokens_CD[at]), float(ms_CD[at]))
        return self.choice

    def _forwards(self, branches: int) -> Floats:
        if branches in self._known:
            return self._known[branches]
        rows = [[self.work(int(n), int(d)) for d in self.depths_D] for n in self.sizes_C]
        drafting = [[self._drafting(one, branches) for one in of_size] for of_size in rows]
        target_C = self.costs.target.at(branches * (1 + self.sizes_C))
        self._known[branches] = np.asarray(drafting) + target_C[:, None]
        return self._known[branches]

    def _drafting(self, rows: Sequence[int], branches: int) -> float:
        return float(self.costs.drafter.at(branches * np.asarray(rows, np.int64)).sum())

    def _gains(self) -> Floats:
        """[C, D]: drafts of a tree that are accepted in a round."""
        mass_C = _believed(self._hits_C, self._tries_C, BEST, HALF)
        depth_D = _believed(self._hits_D, self._tries_D, BEST, DEEPER).cumsum()
        seen = max(self._tries_D.max(initial=0.0), 1e-9)
        usual = int((self._tries_D >= HALF * seen).sum()) if self._tries_D.any() else len(depth_D)
        gains_CD: Floats = mass_C.cumsum()[:, None] * (depth_D / depth_D[max(usual, 1) - 1])
        return gains_CD

    def learn_(self, owners: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """What became of the round; paths: the nodes that each branch took, the root first, which
        are numbered by their ranks."""
        if not self.choice.size:
            return
        for counts in (self._hits_C, self._tries_C, self._hits_D, self._tries_D):
            counts *= KEPT
        offered_C = self.sizes_C <= self.choice.size
        offered_D = self.depths_D <= self.choice.levels
        for path in paths:
            self._tries_C += offered_C
            self._tries_D += offered_D
            ranks = np.minimum(np.asarray(path[1:], np.int64), self.sizes_C[-1])
            np.add.at(self._hits_C, np.searchsorted(self.sizes_C, ranks), 1)
            self._hits_D[: min(len(path) - 1, len(self._hits_D))] += 1

    def forget_(self, owners: Sequence[int]) -> None:
        """Branches have nothing of their own."""


def _believed(hits_X: Floats, tries_X: Floats, first: float, share: float) -> Floats:
    """Hits in a try; where little was tried, a share of what stands before."""
    found = []
    before = first / share
    for hits, tries in zip(hits_X.tolist(), tries_X.tolist(), strict=True):
        before = (hits + TRIED * share * before) / (tries + TRIED)
        found.append(before)
    return np.asarray(found)


Chooser = ChainChooser | TreeChooser

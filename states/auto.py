"""Several drafters of which one drafts in each round: `or` in a block `drafter`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ops.draft.kinds import Expectation, KindChooser, KindRecords
from .drafter import DraftContext, Drafter
from .graph.drafter_settings import nodes_for

if TYPE_CHECKING:
    from ..ops.draft.gamma import GammaRecord
    from ..ops.draft.ngram import HostTree
    from ..ops.types import DraftRows, Proposal
    from .request import Branch, Request
    from .round import CommittedRows, RoundResult

KEPT = 256  # most rows of branches with all features of their rounds
OPENING = 32  # first rounds of a session, from which every drafter learns
SHARE = 0.002  # of the time, for drafters without the round to learn in, and for unverified trees
GAINED = 0.02  # of the time of a round of a kind that expects its tokens, for `expected_`
CANDIDATES = 2.0  # time of learning with the target's part of it, relative to the host's
PROBES = 4  # most unverified trees at once
READING = 0.06  # saved share of the time from which a head reads all requests
SELDOM = 4  # it reads one of so many if it saves less; this doubles if it saves nothing,
AGAIN = 32  # up to so many, which a head that is surely slower has at once


class Probe(NamedTuple):
    """A tree that was not verified, by a kind's number, of the text of a branch up to `size`."""

    kind: int
    branch: Branch
    size: int
    tree: HostTree


class AutoDrafter(Drafter):
    """A main drafter and others, which have no model. All of them follow the text: the main one
    reads a prompt at once, and the rows of rounds without it when it drafts again (`kept`); those
    that keep the target's best tokens do so in the rounds of others as far as it costs little.
    The main one reads and drafts for one of SELDOM requests while it saves little, and for fewer
    and fewer while it saves nothing.

    What the others would have gained is known without a forward. Some know what to expect of the
    next round (`expected_`). Now and then one of the rest drafts a tree that is not verified, but
    compared with the tokens that follow (`Probe`)."""

    def __init__(self, main: Drafter, others: Sequence[Drafter], context: DraftContext) -> None:
        super().__init__(main.settings, replace(context, model=None, kv=None, costs=None))
        self.main = main
        self.kinds = (main, *others)
        self.lookback = main.lookback
        names = [part.settings.kind for part in self.kinds]
        records = KindRecords() if context.costs is None else context.costs.kinds
        late = (0,) if main.parts[0].kv is not None else ()
        expecting = [
            number
            for number, each in enumerate(others, 1)
            if type(each).expected_ is not Drafter.expected_ and each.chooser is None
        ]
        self.chooser = KindChooser(names, records, late, expecting)
        self.every = (self, *(part for kind in self.kinds for part in kind.parts))
        self.head = main.parts[0]
        self.kept: list[CommittedRows] = []
        self._observing = [kind for kind in others if type(kind).observe is not Drafter.observe]
        pairs = enumerate(self.kinds)
        self.learners = [(n, part) for n, kind in pairs for part in kind.parts if part.learns]
        self._learners = [part for _, part in self.learners]  # that are not surely slower
        self._learning: list[Drafter] = []  # in this round, besides the drafter of the round
        self._is_opening = True
        self._may_probe = False
        self._expected: list[Drafter] = []  # those that were asked what to expect of this round
        self._probes: list[Probe] = []
        drafts = [type(kind).tree_ is not Drafter.tree_ and kind.chooser is None for kind in others]
        self.probed = [n for n, each in enumerate(drafts, 1) if each and n not in expecting]
        self._probed = [*self.probed]  # not surely slower, the next first
        self._use_(main)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.every

    def reads(self) -> bool:
        slow = {kind for kind in range(len(self.kinds)) if self.chooser.is_surely_slower(kind)}
        self._learners = [part for kind, part in self.learners if kind not in slow]
        self._probed = [kind for kind in self.probed if kind not in slow]
        self._use_(self.used)
        if self.head.kv is None or self._observing:
            return self.main.reads() or bool(self._observing)
        records = self.chooser.records
        gain = self.chooser.gain(0)
        if 0 in slow:
            records.again = AGAIN
        elif gain > 0:
            records.again = SELDOM
            if gain >= READING:
                records.refused = 0
                return True
        records.refused += 1
        if records.refused < records.again:
            return False
        records.again = min(2 * records.again, AGAIN)
        records.refused = 0
        return True

    def intake_(self, *, attention: str = "auto") -> Any:
        """Rows that the main drafter only reads in this round, or None, and those of the drafter of
        this round."""
        active = self.active
        if active:
            owners = [branch.owner for branch in active]
            self._earn_()
            expected = self._expect_(active)
            if not self.chooser.continues_(owners, expected):
                self._choose_(active, owners, expected)
        else:
            self.chooser.finish_()
        unread = None
        if self.used is self.main:
            self._observe_kept_()
        elif self.head.inbox:
            rows = self.main.intake_(attention=attention)
            unread = None if isinstance(rows, tuple) else rows
        batch = self.used.intake_(attention=attention)
        if self.used.settings.drafts:
            size = self.used.num_nodes(len(active))
            if size != self.chooser.choice.size:
                self.chooser.choice = self.chooser.choice._replace(size=size)
        return unread, batch

    def _earn_(self) -> None:
        """Allow work besides the rounds for a share of the time of the last one."""
        ms = self.chooser.choice.ms
        has_gained = self.chooser.chosen in self.chooser.expecting
        records = self.chooser.records
        records.learning.saved += SHARE * ms
        records.probing.saved += SHARE * ms
        records.expecting.saved += (GAINED if has_gained else SHARE) * ms

    def _expect_(self, active: Sequence[Branch]) -> dict[int, Expectation]:
        """What tokens each branch can expect in this round, by the kinds that know it."""
        chosen = self.chooser.chosen
        has_drafted = chosen in self.chooser.expecting
        records = self.chooser.records
        is_due = records.expecting.is_due
        numbers = self.chooser.expecting if is_due else [chosen] if has_drafted else []
        self._expected = [self.kinds[number] for number in numbers]
        if not numbers:
            return {}
        start = perf_counter()
        expected = {}
        for number in numbers:
            kind = self.kinds[number]
            nodes = nodes_for(kind.settings.offered, len(active))
            each = [kind.expected_(branch, nodes) for branch in active]
            drafts = sum([drafts for _, drafts in each])
            expected[number] = Expectation([tokens for tokens, _ in each], drafts)
        if is_due:
            records.expecting.spend_(start)
        return expected

    def _choose_(
        self, active: Sequence[Branch], owners: list[int], expected: dict[int, Expectation]
    ) -> None:
        """Choose the drafter of the next rounds, and what is done besides in the first of them."""
        is_read = all(branch.request.drafted for branch in active)
        self.chooser.choose_(owners, expected, is_late=is_read)
        used = self.kinds[self.chooser.chosen]
        if used is not self.used:
            self._use_(used)
        self._is_opening = self.chooser.records.rounds < OPENING
        is_due = self._is_opening or self.chooser.records.learning.is_due
        self._learn_with_(self._others if is_due else [])
        self._may_probe = self.chooser.records.probing.is_due

    def _learn_with_(self, others: list[Drafter]) -> None:
        """The drafters that learn in a round besides its own."""
        self._learning = others
        self.used.candidates = bool(others) or self._learns or not self.learners

    def _use_(self, used: Drafter) -> None:
        """Let a kind draft in the next rounds; the others wait."""
        self.used = used
        self._learns = any(part.learns for part in used.parts)
        self._others = [part for part in self._learners if part not in used.parts]
        for kind in self.kinds:
            for part in kind.parts:
                part.waits = kind is not used
                if part.waits and part.chooser is not None:
                    part.chooser.pause_()

    def root(self, batch: Any) -> tuple[DraftRows | None, Any]:
        unread, rows = batch
        if unread is not None:
            self.main.root(unread)
        return unread, self.used.root(rows)

    def grow(self, frontier: tuple[DraftRows | None, Any]) -> Proposal:
        unread, own = frontier
        proposal = self.used.grow(own)
        if unread is not None:
            proposal = replace(proposal, work=proposal.work.plus(unread.work))
        if proposal.candidates and not self.used.candidates:
            return replace(proposal, candidates=False)
        return proposal

    def observe(self, rows: CommittedRows) -> None:
        for kind in self._observing:
            kind.observe(rows)
        self.kept.append(rows)
        waits = self.head.waits and rows.is_path and self.head.kv is not None
        if not waits or len(self.kept) >= KEPT:
            self._observe_kept_()

    def _observe_kept_(self, *_: Any, **__: Any) -> None:
        """Let the main drafter observe the rows of the rounds since its last one."""
        for rows in self.kept:
            self.main.observe(rows)
        self.kept.clear()

    promote = truncate = _observe_kept_  # the main drafter does the rest

    def forget(self, owners: Sequence[int]) -> None:
        self.kept = [rows for rows in self.kept if rows.owner not in owners]
        self._probes = [probe for probe in self._probes if probe.branch.owner not in owners]

    def close(self, request: Request) -> None:
        self.chooser.finish_()

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        if self._learning and branches:
            start = perf_counter()
            for part in self._learning:
                part.learn(branches, result, paths)
            self.chooser.records.learning.spend_(start, CANDIDATES)
            if not self._is_opening:
                self._learn_with_([])
        if branches:
            for kind in self._expected:
                if kind is not self.used:
                    kind.learn(branches, result, paths)
            tokens_ST = result.tokens_ST
            has_drafts = tokens_ST.shape[1] > 1
            drafts = int((tokens_ST[:, 1:] >= 0).sum()) if has_drafts else 0
            self.chooser.learn_([len(path) for path in paths], drafts)
            if self._may_probe or self._probes:
                self._probe_(branches)
        return self.used.learn(branches, result, paths)

    def _probe_(self, branches: Sequence[Branch]) -> None:
        """Count the probes whose outcome is known; then start another one."""
        waiting = []
        for probe in self._probes:
            number, branch, size, tree = probe
            levels = max(tree.depths, default=0)
            following = branch.context(size)[:levels]
            accepted = matched(tree, following)
            if accepted == len(following) < levels and not branch.ended:
                waiting.append(probe)
            else:
                self.chooser.learn_of_(number, 1 + accepted)
        self._probes = waiting
        may_probe = self._may_probe and len(waiting) < PROBES
        self._may_probe = False
        if may_probe and self._probed:
            number = self._probed.pop(0)
            self._probed.append(number)
            kind = self.kinds[number]
            branch = branches[self.chooser.records.rounds % len(branches)]
            if kind.waits and not branch.ended:
                start = perf_counter()
                tree = kind.tree_(branch, nodes_for(kind.settings.offered, len(branches)))
                self.chooser.records.probing.spend_(start)
                self._probes.append(Probe(number, branch, size=branch.size, tree=tree))


def matched(tree: HostTree, tokens: Sequence[int]) -> int:
    """The drafts of a tree that are accepted if these tokens follow its root."""
    nodes = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node = -1
    for count, token in enumerate(tokens):
        if (node, token) not in nodes:
            return count
        node = nodes[node, token]
    return len(tokens)

"""Several drafters of which one drafts in each round: `or` in a block `drafter`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ops.draft.kinds import KindChooser, KindRecords
from .drafter import DraftContext, Drafter
from .graph.drafter_settings import nodes_for

if TYPE_CHECKING:
    from ..ops.draft.gamma import GammaRecord
    from ..ops.draft.ngram import HostTree
    from ..ops.types import DraftRows, Proposal
    from .request import Branch
    from .round import CommittedRows, RoundResult

PROBE = 16  # rounds from one unverified tree to the next
KEPT = 256  # most rows of branches with all features of their rounds
OPENING = 32  # first rounds of a session, from which every drafter learns
FOLLOWING = 0.01  # later, the share of the time that a drafter without the round may learn in
CANDIDATES = 2.0  # time of learning with the target's part of it, relative to the host's
AGAIN = 32  # requests of which one is read by a hopeless head


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
    While the main one is hopeless, it reads and drafts for one of AGAIN requests only.

    What the others would have gained is known without a forward: now and then one of them drafts
    a tree that is not verified, but compared with the tokens that follow (`Probe`)."""

    def __init__(self, main: Drafter, others: Sequence[Drafter], context: DraftContext) -> None:
        super().__init__(main.settings, replace(context, model=None, kv=None, costs=None))
        self.main = main
        self.kinds = (main, *others)
        self.lookback = main.lookback
        names = [part.settings.kind for part in self.kinds]
        records = KindRecords() if context.costs is None else context.costs.kinds
        late = (0,) if main.parts[0].kv is not None else ()
        self.chooser = KindChooser(names, records, late)
        self.every = (self, *(part for kind in self.kinds for part in kind.parts))
        self.head = main.parts[0]
        self.used = main
        self.kept: list[CommittedRows] = []
        self.learners = [part for kind in self.kinds for part in kind.parts if part.learns]
        self._learning: list[Drafter] = []  # in this round, besides the drafter of the round
        self._learning_ms = 0.0  # of the last round in which any learned
        self._saved_ms = 0.0  # for learning
        self._rounds = 0
        self._probe: Probe | None = None

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.every

    def reads(self) -> bool:
        if self.head.kv is None or not self.chooser.is_hopeless(0):
            return True
        records = self.chooser.records
        records.refused = (records.refused + 1) % AGAIN
        return not records.refused

    def intake_(self, *, attention: str = "auto") -> Any:
        """Rows that the main drafter only reads in this round, or None, and those of the drafter of
        this round."""
        active = self.active
        is_read = all(branch.request.drafted for branch in active)
        chosen = self.chooser.choose_([branch.owner for branch in active], is_late=is_read)
        self.used = self.kinds[chosen]
        for kind in self.kinds:
            for part in kind.parts:
                part.waits = kind is not self.used
                if part.waits and part.chooser is not None:
                    part.chooser.pause_()
        unread = None
        if self.used is self.main:
            self._observe_kept_()
        elif self.head.inbox:
            rows = self.main.intake_(attention=attention)
            unread = None if isinstance(rows, tuple) else rows
        self._rounds += 1
        self._saved_ms += FOLLOWING * self.chooser.choice.ms
        self._learning = []
        if self.chooser.records.rounds <= OPENING or self._saved_ms >= self._learning_ms:
            self._learning = [part for part in self.learners if part not in self.used.parts]
        batch = self.used.intake_(attention=attention)
        size = self.used.num_nodes(len(active)) if self.used.settings.drafts else 0
        if size:
            self.chooser.choice = replace(self.chooser.choice, size=size)
        return unread, batch

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
        if self._learning or not self.learners or any(part.learns for part in self.used.parts):
            return proposal
        return replace(proposal, candidates=False)

    def observe(self, rows: CommittedRows) -> None:
        for kind in self.kinds[1:]:
            kind.observe(rows)
        table = self.context.table
        request = table.open[rows.owner] if rows.branch is None else rows.branch.request
        if not request.drafted:
            return
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

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        if self._learning and branches:
            start = perf_counter()
            for part in self._learning:
                part.learn(branches, result, paths)
            self._learning_ms = CANDIDATES * 1e3 * (perf_counter() - start)
            self._saved_ms = 0.0
        if branches:
            self.chooser.learn_([len(path) for path in paths])
            self._probe_(branches)
        return self.used.learn(branches, result, paths)

    def _probe_(self, branches: Sequence[Branch]) -> None:
        """Count the last probe once the text is as long as its tree is deep; then start another."""
        if self._probe is not None:
            number, branch, size, tree = self._probe
            levels = max(tree.depths, default=0)
            following = branch.context(size)[:levels]
            if len(following) < levels and not branch.ended:
                return
            self.chooser.learn_of_(number, 1 + matched(tree, following))
            self._probe = None
        turn, is_over = divmod(self._rounds, PROBE)
        number = 1 + turn % (len(self.kinds) - 1)
        kind = self.kinds[number]
        branch = branches[turn % len(branches)]
        drafts = type(kind).tree_ is not Drafter.tree_ and kind.chooser is None
        if drafts and kind.waits and not is_over and not branch.ended:
            tree = kind.tree_(branch, nodes_for(kind.settings.offered, len(branches)))
            self._probe = Probe(number, branch, size=branch.size, tree=tree)


def matched(tree: HostTree, tokens: Sequence[int]) -> int:
    """The drafts of a tree that are accepted if these tokens follow its root."""
    nodes = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node = -1
    for count, token in enumerate(tokens):
        if (node, token) not in nodes:
            return count
        node = nodes[node, token]
    return len(tokens)

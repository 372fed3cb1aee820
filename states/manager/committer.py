"""What a forward of the target brought: rows are committed where they lie, tips move on."""

from collections.abc import Sequence

from torch import Tensor

from ...ops.blend.blend import BlendReport
from ...ops.draft.gamma import GammaRecord
from ...ops.host import HostReader
from ...ops.kv.pool import KVCache
from ...ops.kv.slots import Ints
from ...ops.verify.verify import Accepted, FirstTokens
from ..requests.blending import BlendState, picked_rows
from ..requests.branch import Branch, Finish, RoundSummary
from ..requests.draft_state import Features
from ..requests.drafting import Drafting
from ..requests.explain import explain
from ..requests.folding import FoldState
from ..requests.rounds import (
    Pick,
    RoundResult,
    Walk,
    bound_path,
    free_path,
    legal_pick,
    read_round,
    take,
)
from .batch import Batch


class Committer:
    """Commits a batch, in one read of the device."""

    def __init__(
        self,
        pools: Sequence[KVCache],
        draftings: Sequence[Drafting],
        fold: FoldState | None,
        blend: BlendState | None,
    ) -> None:
        self.kv, self.pools, self.draftings = pools[0], pools, draftings
        self.fold, self.blend = fold, blend

    def commit_(
        self,
        batch: Batch,
        host: HostReader,
        features_QF: Tensor | None,
        accepted: Accepted | None,
        roots: FirstTokens,
        report: BlendReport | None = None,
    ) -> RoundSummary:
        """Read the round, commit accepted rows where they lie, advance tips, finish branches."""
        result = read_round(host, accepted, roots, picked_rows(report))
        before = {b.owner: len(b.tokens) for b in batch.ran}
        features, pick = Features(features_QF), legal_pick(host)
        placed = batch.placed.with_host_tokens(result.tokens_ST)
        walks = []
        for tree, branch in enumerate(batch.ran if accepted is not None else ()):
            assert accepted is not None
            walk = self._walk(tree, branch, batch, result, accepted, pick)
            walks.append(walk)
            nodes = walk.nodes[: walk.taken + 1]
            slots, rows = placed.tree_slots[tree][nodes], placed.tree_rows[tree][nodes]
            self._keep(branch, slots, rows, features)
        self.kv.release_(placed.fresh[~self.kv.committed[placed.fresh]])
        self._commit_spans(batch, result, roots, features, pick)
        gamma = self._learn(batch.ran, result, [walk.nodes for walk in walks])
        blend = None
        if report is not None and self.blend is not None and batch.rows.blend is not None:
            blend = self.blend.mark_(report, batch.spans, placed, batch.rows.blend, result.picked_P)
        figures = None if accepted is None else accepted.figures
        return RoundSummary(
            tuple(b.name for b in batch.everyone),
            tuple(len(b.tokens) - before.get(b.owner, 0) for b in batch.everyone),
            (*(len(walk.nodes) - 1 for walk in walks), *(-1 for _ in batch.newcomers)),
            int((result.tokens_ST[:, 1:] >= 0).sum()),
            self.kv.current_length,
            sum(pool.current_length for pool in self.pools[1:]),
            batch.rows.tokens_BQ.numel(),
            placed.padding,
            batch.rows.alignment,
            gamma,
            explain(batch.ran, walks, result, figures, batch.rows.bound_trees),
            blend,
        )

    def _takers(self, branch: Branch) -> list[Drafting]:
        """Who takes in a branch's rows: an outline's become those of everybody."""
        return [one for one in self.draftings if one.serves(branch) or branch.is_root]

    def _learn(
        self, ran: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        """Every drafter is told of its own trees."""
        records: list[GammaRecord] = []
        for drafting in self.draftings:
            own = [at for at, branch in enumerate(ran) if drafting.serves(branch)]
            mine = result if len(own) == len(ran) else result.some(own)
            trees = [ran[at] for at in own]
            records += drafting.memory.learn(trees, mine, [paths[at] for at in own])
        return tuple(records)

    def _walk(
        self,
        tree: int,
        branch: Branch,
        batch: Batch,
        result: RoundResult,
        accepted: Accepted,
        pick: Pick,
    ) -> Walk:
        """The way through a tree; its tokens are appended to the branch."""
        bound_trees = batch.rows.bound_trees
        if tree in bound_trees:
            at = bound_trees.index(tree)
            nodes, tokens = bound_path(result, tree, at, branch, accepted.bound, pick)
        else:
            nodes, tokens = free_path(result, tree)
        root, position = branch.tokens[-1], branch.length
        taken = take(branch, tokens)
        branch.accepted.append(len(nodes) - 1)
        branch.emitted.append(taken)
        return Walk(root, position, nodes, tokens, taken)

    def _keep(self, branch: Branch, slots: Ints, rows: Ints, features: Features) -> None:
        """Commit the rows of a path, queue the drafter's rows."""
        positions = range(branch.length, branch.length + len(slots))
        self.kv.commit_(slots, positions, branch.owner, branch.request.prefix_owner)
        for drafting in self._takers(branch):
            drafting.memory.path(branch, rows, features)
        self._remember(branch, rows, features)
        branch.kept += len(slots)
        branch.length += len(slots)

    def _commit_spans(
        self, batch: Batch, result: RoundResult, roots: FirstTokens, features: Features, pick: Pick
    ) -> None:
        """Commit prompt rows; every newcomer gets its root token."""
        by_owner = {b.owner: b for b in batch.newcomers}
        by_prefix = {b.request.prefix_owner: b.request for b in batch.newcomers}
        by_prefix |= {r.prefix_owner: r for r in batch.opened}
        tip, bound = 0, 0
        for span, slots in zip(batch.spans, batch.placed.spans, strict=True):
            for slots_n in slots.slots_Cn:
                self.kv.commit_(slots_n, span.positions)
            if span.owner in by_prefix:
                for drafting in self.draftings:
                    drafting.memory.prefix(by_prefix[span.owner], span, slots.rows, features)
                continue
            branch = by_owner[span.owner]
            if span.bound and branch.matcher is not None:
                token = pick(branch.matcher, result.best_GC[bound], roots.bound, bound)
                branch.matcher.advance(token)
                bound += 1
            elif span.draws:
                token = int(result.drawn_R[tip])
            tip += span.draws
            branch.length += len(span.tokens)
            if span.draws:
                take(branch, [token])
            else:
                branch.end(Finish.STOP)
            for drafting in self._takers(branch):
                drafting.memory.prompt(branch, slots.rows, features)
            self._remember(branch, slots.rows, features)

    def _remember(self, branch: Branch, rows: Ints, features: Features) -> None:
        """Features of rows that will be folded, if the drafter wants any."""
        if self.fold is not None:
            self.fold.remember_(branch, features.of(rows))

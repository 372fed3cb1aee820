"""What a forward of the target brought: rows are committed where they lie, tips move on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..ops.blend import BlendReport
from ..ops.host import HostReader
from ..ops.kv.pool import KVCache
from ..ops.kv.slots import Ints
from ..ops.verify.verify import BROKEN, Accepted, FirstTokens
from .blend import BlendState, picked_rows
from .drafter import Drafter
from .fold import FoldState
from .layout import Batch
from .request import Branch, Finish, Stage, failing
from .round import (
    CommittedRows,
    RoundResult,
    RoundSummary,
    Walk,
    bound_path,
    explain,
    free_path,
    read_round,
    take,
    take_legal_,
    verified_trees,
)
from .segments import SegmentTree


@dataclass(eq=False, slots=True)
class Committer:
    """Commits a batch, in one read of the device; the target's pool is the first."""

    pools: Sequence[KVCache]
    segments: SegmentTree
    drafter: Drafter
    fold: FoldState | None
    blend: BlendState | None

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
        kv = self.pools[0]
        result = read_round(host, accepted, roots, picked_rows(report))
        everyone = batch.everyone
        before = [len(b.tokens) for b in everyone]
        placed = batch.placed.with_host_tokens(result.tokens_ST)
        walks = []
        for tree, branch in enumerate(batch.ran):
            assert accepted is not None, "trees have been judged"
            walk = _walk(tree, batch, result, accepted, host)
            walks.append(walk)
            nodes = np.array(walk.nodes[: walk.taken + 1])
            slots = placed.tree_slots[tree, nodes]
            rows = placed.tree_rows[tree, nodes]
            self._keep(branch, slots, rows, features_QF)
        kv.release_(placed.fresh[~kv.committed[placed.fresh]])
        self._commit_spans(batch, result, roots, features_QF, host)
        gamma = self.drafter.learn(batch.ran, result, [walk.nodes for walk in walks])
        blend = None
        if report is not None and self.blend is not None and batch.rows.blend is not None:
            blend = self.blend.mark_(report, batch.spans, placed, batch.rows.blend, result.picked_P)
        return RoundSummary(
            tuple(b.name for b in everyone),
            tuple(len(b.tokens) - had for b, had in zip(everyone, before, strict=True)),
            (*(len(walk.nodes) - 1 for walk in walks), *(-1 for _ in batch.newcomers)),
            int(np.count_nonzero(result.tokens_ST[:, 1:] >= 0)),
            kv.needed_length,
            sum(pool.needed_length for pool in self.pools[1:]),
            batch.rows.tokens_BQ.numel(),
            placed.padding,
            batch.rows.alignment,
            gamma,
            explain(batch.ran, walks, result, accepted, batch.rows.bound_trees),
            blend,
            verified_trees(batch.ran, walks, result, batch.forced),
            batch.work,
            self.drafter.choices,
        )

    def _keep(self, branch: Branch, slots: Ints, rows: Ints, features_QF: Tensor | None) -> None:
        """Commit the rows of a path; the branch's counts move on."""
        position = branch.length
        first = branch.kept
        branch.kept += len(slots)
        branch.length += len(slots)
        positions = range(position, branch.length)
        self.pools[0].commit_(slots, positions, branch.owner, self.segments.home(branch.owner))
        tokens = branch.tokens[first : branch.kept]
        part = CommittedRows.of_branch(
            branch, position, tokens, rows, features_QF=features_QF, is_path=True
        )
        self._hand_on(branch, part)

    def _commit_spans(
        self,
        batch: Batch,
        result: RoundResult,
        roots: FirstTokens,
        features_QF: Tensor | None,
        host: HostReader,
    ) -> None:
        """Commit prompt rows; every newcomer gets its root token."""
        by_owner = {b.owner: b for b in batch.newcomers}
        parts = {part.owner: part for b in batch.newcomers for part in b.reads}
        tip = 0
        bound = 0
        for span, slots in zip(batch.spans, batch.placed.spans, strict=True):
            owner = span.owner
            position = span.position
            tokens = span.tokens
            for slots_n in slots.slots_Cn:
                self.pools[0].commit_(slots_n, span.positions)
            if owner not in by_owner:
                ended = parts.get(owner)
                if ended is not None:
                    ended.kept += len(tokens)
                    ended.length += len(tokens)
                part = CommittedRows(
                    owner=owner,
                    prefix=owner,
                    position=position,
                    tokens=tokens,
                    rows=slots.rows,
                    features_QF=features_QF,
                    branch=ended,
                )
                if part.matter:
                    self.drafter.observe(part)
                continue
            branch = by_owner[owner]
            branch.length += len(tokens)
            if branch.tokens:  # it goes on where it was: what follows is known
                pass
            elif not span.draws:
                branch.end(Finish.STOP)
            elif branch.matcher is not None:
                with failing(branch):
                    legal = take_legal_(branch.matcher, result.best_RC, roots.bound, bound, host)
                    take(branch, [legal])
                bound += 1
            else:
                take(branch, [int(result.drawn_R[tip])])
            tip += span.draws
            part = CommittedRows.of_branch(
                branch, position, tokens, slots.rows, features_QF=features_QF
            )
            self._hand_on(branch, part)

    def _hand_on(self, branch: Branch, part: CommittedRows) -> None:
        """Pass a branch's rows to the drafter and to the fold."""
        if part.matter:
            self.drafter.observe(part)
        if self.fold is not None:
            self.fold.remember_(branch, part.features())


def _walk(
    tree: int, batch: Batch, result: RoundResult, accepted: Accepted, host: HostReader
) -> Walk:
    """The way through a tree; its tokens are appended to the branch."""
    branch = batch.ran[tree]
    bound_trees = batch.rows.bound_trees
    if tree in bound_trees:
        at = bound_trees.index(tree)
        nodes = [0]
        tokens = [BROKEN]
        with failing(branch):
            nodes, tokens = bound_path(result, tree, at, branch, accepted.bound, host)
    else:
        nodes, tokens = free_path(result, tree)
    root = branch.tokens[-1]
    position = branch.length
    taken = take(branch, tokens) if branch.stage is Stage.RUNNING else 0
    branch.accepted.append(len(nodes) - 1)
    branch.emitted.append(taken)
    branch.forced.append(tree in batch.forced)
    return Walk(root, position, nodes, tokens, taken)

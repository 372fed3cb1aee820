"""After a target forward: read the results once, commit accepted rows, advance branches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from ..ops.blend import BlendReport
from ..ops.forward import HostReader
from ..ops.kv.pool import Ints, KVCache
from ..ops.types import packed_places
from ..ops.verify.verify import BROKEN, Accepted, FirstTokens, GrammarRows
from .blend import BlendState
from .drafter import Drafter
from .fold import FoldState
from .layout import Layout
from .lifecycle import Lifecycle
from .request import Branch, Finish, Matcher, Stage, failing
from .request_table import SegmentTree
from .round import (
    AcceptedPath,
    Batch,
    CommittedRows,
    ExplainedRound,
    Ids,
    PlacedRows,
    RoundResult,
    RoundSummary,
    VerifiedTree,
    explain,
)

NAN_SCORES = "the model's scores are not numbers (NaN)"


class BrokenRequest(ValueError):
    """An error that ends one request with its reason."""


@dataclass(eq=False, slots=True, kw_only=True)
class Committer:
    """Commits a batch with one read of the device; pools[0] is the target's."""

    pools: Sequence[KVCache]
    segments: SegmentTree
    drafter: Drafter
    layout: Layout
    lifecycle: Lifecycle
    fold: FoldState | None
    blend: BlendState | None

    def commit_(
        self,
        batch: Batch,
        *,
        host: HostReader,
        features_QF: Tensor | None,
        accepted: Accepted | None,
        roots: FirstTokens,
        report: BlendReport | None = None,
    ) -> RoundSummary:
        """Read the round, commit accepted rows in place, advance the branches, end those that are
        complete, and release and prepare what follows from that.

        Args:
            features_QF: the target's tapped hidden states of all rows.
            accepted: the verified trees; None without trees.
            roots: the tokens drawn at the ends of prompts.
            report: the reused rows; None without cached documents.
        """
        kv = self.pools[0]
        result = read_round(host, accepted, roots, _picked_rows(report))
        branches = batch.branches
        before = [len(branch.tokens) for branch in branches]
        placed = with_host_tokens(batch.placed, result.tokens_ST)
        paths = []
        for tree, branch in enumerate(batch.ran):
            assert accepted is not None, "trees are verified"
            path = _accept_path(tree, batch, result, accepted, host=host)
            paths.append(path)
            nodes = np.array(path.nodes[: path.num_committed + 1])
            slots = placed.tree_slots[tree, nodes]
            rows = placed.tree_rows[tree, nodes]
            self._commit_path_(branch, slots, rows, features_QF)
        kv.release_(placed.fresh[~kv.committed[placed.fresh]])
        if batch.spans:
            self._commit_prompts_(batch, result, roots, features_QF, host=host)
        gamma = self.drafter.learn(batch.ran, result, [path.nodes for path in paths])
        blend = None
        if report is not None and self.blend is not None and batch.rows.blend is not None:
            blend = self.blend.mark_(
                report, batch.spans, placed, blend=batch.rows.blend, picked_P=result.picked_P
            )
        explained: tuple[ExplainedRound, ...] = ()
        if accepted is not None and accepted.figures is not None:
            bound = batch.rows.bound_trees
            explained = explain(batch.ran, paths, result, accepted.figures, bound_trees=bound)
        summary = RoundSummary(
            branches=tuple([branch.name for branch in branches]),
            committed=tuple([len(b.tokens) - n for b, n in zip(branches, before, strict=True)]),
            accepted=(*[len(path.nodes) - 1 for path in paths], *[-1] * len(batch.newcomers)),
            drafted=int(np.count_nonzero(result.tokens_ST[:, 1:] >= 0)),
            target_length=kv.needed_length,
            draft_length=sum([pool.needed_length for pool in self.pools[1:]]),
            rows=batch.rows.tokens_BQ.numel(),
            padding=placed.padding,
            alignment=batch.rows.alignment,
            gamma=gamma,
            explained=explained,
            blend=blend,
            trees=verified_trees(batch.ran, paths, result, batch.forced),
            work=batch.work,
            choices=self.drafter.choices,
        )
        self._copy_folds_(branches)
        ended = [branch for branch in branches if branch.finish is not None]
        if batch.spans or ended or self.lifecycle.table.cancelled:
            self.lifecycle.release_and_prepare_(branches)
        return summary

    def _copy_folds_(self, branches: Sequence[Branch]) -> None:
        """Copy out the rows of ended parts that a fold needs."""
        if self.fold is not None:
            for branch in branches:
                if branch.ended:
                    row = self.layout.rows_of(branch.owner)[0]
                    slots = self.pools[0].slots_of(branch.owner, row)
                    self.fold.keep_(branch, self.pools[0], slots)

    def _commit_path_(
        self, branch: Branch, slots: Ints, rows: Ints, features_QF: Tensor | None
    ) -> None:
        """Commit the rows of an accepted path."""
        position = branch.length
        first = branch.num_cached_tokens
        branch.num_cached_tokens += len(slots)
        branch.length += len(slots)
        positions = range(position, branch.length)
        self.pools[0].commit_(slots, positions, branch.owner, self.segments.home[branch.owner])
        committed = committed_rows(
            branch,
            position,
            branch.tokens[first : branch.num_cached_tokens],
            rows,
            features_QF=features_QF,
            is_path=True,
        )
        self._observe_(branch, committed)

    def _commit_prompts_(
        self,
        batch: Batch,
        result: RoundResult,
        roots: FirstTokens,
        features_QF: Tensor | None,
        *,
        host: HostReader,
    ) -> None:
        """Commit the rows of prompts; each branch that starts gets its root token."""
        by_owner = {branch.owner: branch for branch in batch.newcomers}
        parts = {part.owner: part for branch in batch.newcomers for part in branch.reads}
        tip = 0
        bound = 0
        for span, slots in zip(batch.spans, batch.placed.spans, strict=True):
            count = len(span.tokens)
            for slots_n in slots.slots_Cn:
                self.pools[0].commit_(slots_n, span.positions)
            if span.owner not in by_owner:
                ended_part = parts.get(span.owner)
                if ended_part is not None:
                    ended_part.num_cached_tokens += count
                    ended_part.length += count
                committed = CommittedRows(
                    owner=span.owner,
                    prefix=span.owner,
                    position=span.position,
                    tokens=span.tokens,
                    rows=slots.rows,
                    features_QF=features_QF,
                    branch=ended_part,
                )
                if ended_part is None or _is_read_later(ended_part):
                    self.drafter.observe(committed)
                continue
            branch = by_owner[span.owner]
            branch.length += count
            if branch.tokens:
                pass  # a resumed branch: its next token is known
            elif not span.draws:
                branch.end(Finish.STOP)
            elif branch.matcher is not None:
                with failing(branch):
                    token = draw_legal(
                        branch.matcher, result.best_RC, roots.bound, bound, host=host
                    )
                    append_tokens(branch, [token])
                bound += 1
            else:
                append_tokens(branch, [int(result.drawn_R[tip])])
            tip += span.draws
            committed = committed_rows(
                branch, span.position, span.tokens, slots.rows, features_QF=features_QF
            )
            self._observe_(branch, committed)

    def _observe_(self, branch: Branch, committed: CommittedRows) -> None:
        """Pass committed rows to the drafter and to the fold."""
        if _is_read_later(branch):
            self.drafter.observe(committed)
        if self.fold is not None:
            self.fold.remember_(branch, committed)


def committed_rows(
    branch: Branch,
    position: int,
    tokens: Sequence[int],
    rows: Ints,
    *,
    features_QF: Tensor | None,
    is_path: bool = False,
) -> CommittedRows:
    """The committed rows of a branch that has advanced; no token follows an ended branch."""
    prefix = branch.request.prefix_owner
    if branch.reads:  # it continues the longest part
        prefix = max(branch.reads, key=lambda part: part.start + part.num_tokens).owner
    return CommittedRows(
        owner=branch.owner,
        prefix=prefix,
        position=position,
        tokens=tokens,
        following=branch.pending if branch.stage is Stage.RUNNING else [],
        rows=rows,
        features_QF=features_QF,
        is_path=is_path,
        branch=branch,
    )


def _is_read_later(branch: Branch) -> bool:
    """Whether later tokens may depend on the branch's rows: those of an outline, of a running
    branch, or of a part that will be combined."""
    return branch.is_root or branch.stage is Stage.RUNNING or branch.stays


def with_host_tokens(placed: PlacedRows, tokens_ST: Ids) -> PlacedRows:
    """The placed rows after the round's read, which tells the owners of shared rows and the padding
    of trees.

    Args:
        tokens_ST: the trees' tokens, -1 for padding.
    """
    has_ST = tokens_ST >= 0
    padding = placed.padding + placed.fresh.size - int(np.count_nonzero(has_ST))
    if placed.tree_rows.ndim == 2:
        return placed if padding == placed.padding else replace(placed, padding=padding)
    place_ST = packed_places(has_ST)
    rows_ST = placed.tree_rows[place_ST]
    slots_ST = placed.tree_slots[place_ST]
    return replace(placed, padding=padding, tree_rows=rows_ST, tree_slots=slots_ST)


# -- the one host read ----------------------------------------------------------------------------


def read_round(
    host: HostReader, accepted: Accepted | None, roots: FirstTokens, picked_P: Tensor | None = None
) -> RoundResult:
    """All device values that the host decides on, in one read."""
    parts = {"drawn_R": roots.drawn_R, "best_RC": roots.bound.best_GC}
    if accepted is not None:
        parts["path_ST"] = accepted.path_ST
        parts["tokens_ST"] = accepted.tokens_ST
        parts["bonus_S"] = accepted.bonus_S
        parts["parents_ST"] = accepted.parents_ST
        parts["side_outputs_SC"] = accepted.side_outputs_SC
        parts["best_GC"] = accepted.bound.best_GC
        if accepted.figures is not None:
            parts["figures_SNC"] = accepted.figures.bits_SNC
    if picked_P is not None:
        parts["picked_P"] = picked_P
    return RoundResult(**dict(zip(parts, host.read_all(parts.values()), strict=True)))


# -- accepted paths -------------------------------------------------------------------------------


def _accept_path(
    tree: int, batch: Batch, result: RoundResult, accepted: Accepted, *, host: HostReader
) -> AcceptedPath:
    """The accepted path of a tree; its tokens are appended to the branch."""
    branch = batch.ran[tree]
    bound_trees = batch.rows.bound_trees
    if tree in bound_trees:
        nodes = [0]
        tokens = [BROKEN]
        with failing(branch):
            row = bound_trees.index(tree)
            nodes, tokens = bound_path(result, tree, row, branch, bound=accepted.bound, host=host)
    else:
        nodes, tokens = free_path(result, tree)
    root = branch.tokens[-1]
    position = branch.length
    committed = append_tokens(branch, tokens) if branch.stage is Stage.RUNNING else 0
    branch.accepted.append(len(nodes) - 1)
    branch.emitted.append(committed)
    branch.forced.append(tree in batch.forced)
    return AcceptedPath(root, position, nodes, tokens, num_committed=committed)


def free_path(result: RoundResult, tree: int) -> tuple[list[int], list[int]]:
    """The accepted nodes of a tree without a grammar, the root first, and the new tokens."""
    node_L = result.path_ST[tree].nonzero()[0]
    drafts = result.tokens_ST[tree, node_L[1:]]
    return node_L.tolist(), [*drafts.tolist(), int(result.bonus_S[tree])]


def bound_path(
    result: RoundResult,
    tree: int,
    row: int,
    branch: Branch,
    *,
    bound: GrammarRows,
    host: HostReader,
) -> tuple[list[int], list[int]]:
    """The accepted path of a tree under a grammar: at each node the best legal token.

    Args:
        row: number of the tree among those under a grammar.
    """
    assert branch.matcher is not None
    first = row * result.path_ST.shape[1]
    closing = closing_ids(branch)
    nodes = [0]
    tokens = []
    while True:
        node = nodes[-1]
        token = draw_legal(branch.matcher, result.best_GC, bound, first + node, host=host)
        tokens.append(token)
        child = _child(result, tree, node, token)
        if child is None or token in closing:
            return nodes, tokens
        nodes.append(child)


def _child(result: RoundResult, tree: int, node: int, token: int) -> int | None:
    matches = (result.parents_ST[tree] == node) & (result.tokens_ST[tree] == token)
    matches[0] = False
    return int(matches.argmax()) if matches.any() else None


def draw_legal(
    matcher: Matcher, best_GC: Ids, bound: GrammarRows, row: int, *, host: HostReader
) -> int:
    """The best legal token of a row; the whole row is read only if no candidate is legal.

    Raises:
        BrokenRequest: the row's scores are NaN.
    """
    if best_GC[row, 0] == BROKEN:
        raise BrokenRequest(NAN_SCORES)
    token = _first_legal(matcher, best_GC[row])
    if token is None:
        token = _first_legal(matcher, host.read_order(bound.whole(row)))
    assert token is not None, "the grammar has a dead end"
    matcher.advance(token)
    return token


def _first_legal(matcher: Matcher, ids: Ids) -> int | None:
    for token in ids.tolist():
        if token >= 0 and matcher.is_legal(token):
            return int(token)
    return None


def append_tokens(branch: Branch, tokens: Sequence[int]) -> int:
    """Append tokens to a branch, and end it at a stop id, at its budget, or at a broken token.

    Stop ids are searched in the whole accepted path.

    Returns:
        The number of appended tokens.
    """
    closing = closing_ids(branch)
    for count, token in enumerate(tokens):
        if token == BROKEN:
            branch.end(Finish.FAILED, NAN_SCORES)
            return count
        if token in closing:
            branch.end(Finish.STOP)
            return count
        branch.tokens.append(token)
        if len(branch.tokens) >= branch.budget:
            branch.end(Finish.LENGTH, branch.note)
            return count + 1
    return len(tokens)


def closing_ids(branch: Branch) -> frozenset[int]:
    """The ids that end a branch: under a grammar those that close it."""
    closing = branch.request.closing_ids if branch.matcher is not None else None
    return closing or branch.request.stop_ids


def _picked_rows(report: BlendReport | None) -> Tensor | None:
    """int64, the flat indices of the rows that the first check layer recomputed, if any."""
    return None if report is None else next(iter(report.picked.values()), None)


def verified_trees(
    ran: Sequence[Branch],
    paths: Sequence[AcceptedPath],
    result: RoundResult,
    forced: Sequence[int],
) -> tuple[VerifiedTree, ...]:
    """A record per tree; ran: their branches."""
    tokens_ST = result.tokens_ST.tolist()
    parents_ST = result.parents_ST.tolist()
    trees = []
    for tree, (branch, path) in enumerate(zip(ran, paths, strict=True)):
        verified = VerifiedTree(
            branch=branch.name,
            position=path.position,
            root=path.root,
            tokens=tuple(tokens_ST[tree]),
            parents=tuple(parents_ST[tree]),
            path=tuple(path.nodes),
            final=path.tokens[-1],
            num_committed=path.num_committed,
            forced=tree in forced,
        )
        trees.append(verified)
    return tuple(trees)

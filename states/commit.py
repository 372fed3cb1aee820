"""After a target forward: read the results once, commit accepted rows, advance branches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..ops.blend import BlendReport
from ..ops.forward import HostReader
from ..ops.kv.pool import NO_SEGMENT, Ints
from ..ops.types import packed_places
from ..ops.verify.verify import BROKEN, Accepted, FirstTokens, GrammarRows
from .lifecycle import Lifecycle
from .request import Branch, Finish, Stage, failing
from .round import Batch, CommittedRows, Ids, RoundResult, RoundSummary, VerifiedTree, explain
from .text.grammar import OutlineMatcher

NAN_SCORES = "the model's scores are not numbers (NaN)"


class BrokenRequest(ValueError):
    """An error that ends one request with its reason."""


class Committer:
    """Commits a batch with one read of the device; pools[0] is the target's."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.kv_cache = lifecycle.kv_cache
        self.pools = self.kv_cache.pools
        self.drafter = self.kv_cache.drafter
        self.fold = self.kv_cache.fold

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
        """Read the round, commit accepted rows, advance the branches, release and prepare.
        features_QF: the target's tapped hidden states; roots: tokens drawn at ends of prompts."""
        kv = self.pools[0]
        picked_P = None if report is None else next(iter(report.picked.values()), None)
        result = read_round(host, accepted, roots, picked_P)
        branches = batch.branches
        before = [len(branch.tokens) for branch in branches]
        fresh = batch.placed.fresh
        has_ST = result.tokens_ST >= 0
        rows_ST = batch.rows.node_rows_ST
        slots_ST = batch.rows.node_slots_ST
        if rows_ST.ndim == 1:  # the device has assigned the rows to nodes
            place_ST = packed_places(has_ST)
            rows_ST = rows_ST[place_ST]
            slots_ST = slots_ST[place_ST]
        trees = []
        for number, branch in enumerate(batch.ran):
            assert accepted is not None, "trees are verified"
            tree = _accept_path(number, batch, result, accepted, host=host)
            trees.append(tree)
            nodes = np.array(tree.path[: tree.num_committed + 1])
            first = branch.num_cached_tokens
            position = branch.length
            branch.num_cached_tokens += len(nodes)
            branch.length += len(nodes)
            home = self.kv_cache.table.segments.home[branch.owner]
            slots = slots_ST[number, nodes]
            kv.commit_(slots, range(position, branch.length), branch.owner, home)
            tokens = branch.tokens[first : branch.num_cached_tokens]
            rows = rows_ST[number, nodes]
            self._observe_(branch, position, tokens, rows, features_QF=features_QF, is_path=True)
        kv.release_(fresh[~kv.committed[fresh]])
        if batch.spans:
            legal = LegalTokens(result.best_RC, roots.bound, host)
            self._commit_prompts_(batch, result, legal, features_QF)
        gamma = self.drafter.learn(batch.ran, result, [tree.path for tree in trees])
        blend = None
        if report is not None and self.kv_cache.blend is not None:
            blend = self.kv_cache.blend.mark_(report, batch, result.picked_P)
        if accepted is not None and accepted.figures is not None:
            trees = explain(batch, trees, result, accepted.figures)
        summary = RoundSummary(
            branches=tuple([branch.name for branch in branches]),
            committed=tuple([len(b.tokens) - n for b, n in zip(branches, before, strict=True)]),
            accepted=(*[len(tree.path) - 1 for tree in trees], *[-1] * len(batch.newcomers)),
            drafted=int(np.count_nonzero(result.tokens_ST[:, 1:] >= 0)),
            target_length=kv.needed_length,
            draft_length=sum([pool.needed_length for pool in self.pools[1:]]),
            rows=batch.rows.tokens_BQ.numel(),
            padding=sum(batch.placed.paddings) + fresh.size - int(np.count_nonzero(has_ST)),
            alignment=batch.rows.alignment,
            gamma=gamma,
            blend=blend,
            trees=tuple(trees),
            work=batch.work,
            choices=tuple(
                [d.chooser.choice for d in self.drafter.parts if d.chooser and not d.waits]
            ),
        )
        ended = [branch for branch in branches if branch.finish is not None]
        if self.fold is not None:
            for branch in ended:
                slots = kv.slots_of(branch.owner, self.kv_cache.layout.rows_of(branch.owner)[0])
                self.fold.keep_(branch, kv, slots)
        if batch.spans or ended or self.lifecycle.table.cancelled:
            self.lifecycle.release_and_prepare_(branches)
        return summary

    def _commit_prompts_(
        self, batch: Batch, result: RoundResult, legal: "LegalTokens", features_QF: Tensor | None
    ) -> None:
        """Commit the rows of prompts; each branch that starts gets its root token."""
        tip = 0
        bound = 0
        for span, slots in zip(batch.spans, batch.placed.spans, strict=True):
            count = len(span.tokens)
            for slots_n in slots.slots_Cn:
                self.pools[0].commit_(slots_n, span.positions)
            branch = span.branch
            if branch is not None:
                branch.length += count
                if branch.ended:  # the end of a part that another branch reads
                    branch.num_cached_tokens += count
                elif branch.tokens:
                    pass  # a resumed branch: its next token is known
                elif not span.draws:
                    branch.end(Finish.STOP)
                elif branch.matcher is None:
                    append_tokens(branch, [int(result.drawn_R[tip])])
                else:
                    with failing(branch):
                        append_tokens(branch, [legal.draw(branch.matcher, bound)])
                    bound += 1
            tip += span.draws
            rows = slots.flat_Cn[0]
            self._observe_(
                branch, span.position, span.tokens, rows, features_QF=features_QF, owner=span.owner
            )

    def _observe_(
        self,
        branch: Branch | None,
        position: int,
        tokens: Sequence[int],
        rows: Ints,
        *,
        features_QF: Tensor | None,
        owner: int = NO_SEGMENT,
        is_path: bool = False,
    ) -> None:
        """Show committed rows to the drafter, if it reads the request, and to the fold; owner: of
        rows without a branch."""
        request = self.kv_cache.table.open[owner] if branch is None else branch.request
        if not request.drafted and self.fold is None:
            return
        prefix = owner = owner if branch is None else branch.owner
        if branch is not None and position == branch.start:
            prefix = branch.request.prefix_owner
            if branch.reads:  # it continues the longest part
                prefix = max(branch.reads, key=lambda part: part.start + part.num_tokens).owner
        runs = branch is not None and branch.stage is Stage.RUNNING
        committed = CommittedRows(
            owner=owner,
            prefix=prefix,
            position=position,
            tokens=tokens,
            following=branch.pending if branch is not None and runs else [],
            rows=rows,
            features_QF=features_QF,
            is_path=is_path,
            branch=branch,
        )
        # Later rows read those of a prefix, and of branches that run or stay.
        if request.drafted and (branch is None or runs or branch.is_root or branch.stays):
            self.drafter.observe(committed)
        if branch is not None and self.fold is not None:
            self.fold.remember_(branch, committed)


def read_round(
    host: HostReader, accepted: Accepted | None, roots: FirstTokens, picked_P: Tensor | None = None
) -> RoundResult:
    """All device values that the host decides on, in one read."""
    parts = {"drawn_R": roots.drawn_R, "best_RC": roots.bound.best_GC}
    if accepted is not None:
        for name in ("path_ST", "tokens_ST", "bonus_S", "parents_ST", "side_outputs_SC"):
            parts[name] = getattr(accepted, name)
        parts["best_GC"] = accepted.bound.best_GC
        if accepted.figures is not None:
            parts["figures_SNC"] = accepted.figures.bits_SNC
    if picked_P is not None:
        parts["picked_P"] = picked_P
    return RoundResult(**dict(zip(parts, host.read_all(parts.values()), strict=True)))


def _accept_path(
    tree: int, batch: Batch, result: RoundResult, accepted: Accepted, *, host: HostReader
) -> VerifiedTree:
    """A verified tree; the tokens of its accepted path are appended to the branch."""
    branch = batch.ran[tree]
    bound_trees = batch.rows.bound_trees
    if tree in bound_trees:
        nodes = [0]
        tokens = [BROKEN]
        with failing(branch):
            legal = LegalTokens(result.best_GC, accepted.bound, host)
            nodes, tokens = bound_path(result, tree, bound_trees.index(tree), branch, legal=legal)
    else:
        node_L = result.path_ST[tree].nonzero()[0]
        nodes = node_L.tolist()
        tokens = [*result.tokens_ST[tree, node_L[1:]].tolist(), int(result.bonus_S[tree])]
    root = branch.tokens[-1]
    committed = append_tokens(branch, tokens) if branch.stage is Stage.RUNNING else 0
    forced = tree in batch.forced
    branch.accepted.append(len(nodes) - 1)
    branch.emitted.append(committed)
    branch.forced.append(forced)
    return VerifiedTree(
        branch=branch.name,
        position=branch.length,
        root=root,
        tokens=tuple(result.tokens_ST[tree].tolist()),
        parents=tuple(result.parents_ST[tree].tolist()),
        path=tuple(nodes),
        final=tokens[-1],
        num_committed=committed,
        forced=forced,
    )


@dataclass(frozen=True, slots=True)
class LegalTokens:
    """The best legal tokens of rows under a grammar, whose best ids of all are `best_GC`."""

    best_GC: Ids
    rows: GrammarRows
    host: HostReader

    def draw(self, matcher: OutlineMatcher, row: int) -> int:
        """The best legal token of a row, which is read whole only if no candidate is legal."""
        if self.best_GC[row, 0] == BROKEN:
            raise BrokenRequest(NAN_SCORES)
        token = _first_legal(matcher, self.best_GC[row])
        if token is None:
            token = _first_legal(matcher, self.host.read_order(self.rows.whole(row)))
        assert token is not None, "the grammar has a dead end"
        matcher.advance(token)
        return token


def _first_legal(matcher: OutlineMatcher, ids: Ids) -> int | None:
    return next((token for token in ids.tolist() if token >= 0 and matcher.is_legal(token)), None)


def bound_path(
    result: RoundResult, tree: int, row: int, branch: Branch, *, legal: LegalTokens
) -> tuple[list[int], list[int]]:
    """The accepted path of the tree that is number `row` of those under a grammar."""
    assert branch.matcher is not None
    first = row * result.path_ST.shape[1]
    closing = closing_ids(branch)
    nodes = [0]
    tokens = []
    while True:
        token = legal.draw(branch.matcher, first + nodes[-1])
        tokens.append(token)
        is_child_T = (result.parents_ST[tree] == nodes[-1]) & (result.tokens_ST[tree] == token)
        is_child_T[0] = False
        if token in closing or not is_child_T.any():
            return nodes, tokens
        nodes.append(int(is_child_T.argmax()))


def append_tokens(branch: Branch, tokens: Sequence[int]) -> int:
    """Append the tokens of an accepted path to a branch, and end it at a stop id anywhere in it, at
    its budget, or at a broken token. Returns the number of appended tokens."""
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

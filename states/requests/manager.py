"""The one book of a run: requests, branches, owners, positions, and what each pool holds of them.

All decisions are functions of host integers read once per round. The rows themselves are laid out
by the layout; slots belong to the pools. The drafter's rows derive from the target's: they wait
in `inbox` until the drafter's next forward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from ...ops.blend.blend import BlendReport
from ...ops.draft.gamma import GammaRecord, GammaState, first_state, next_state, records
from ...ops.host import HostReader
from ...ops.kv.pool import NOBODY, Ints
from ...ops.types import DraftRows, Proposal, Rows
from ...ops.verify.first_tokens import FirstTokens
from ...ops.verify.verify import Accepted
from ..layout.layout import Span
from ..layout.tree_rows import Trees
from ..text.prompt_tokens import Chunk
from .blending import blend_summary, mark_reused_, picked_rows
from .branch import Branch, Finish, Request, RoundSummary, Stage
from .draft_inputs import DRAFT_INPUTS, DraftInputs
from .explain import explain
from .request_table import RequestTable
from .rounds import RoundResult, Walk, bound_path, free_path, legal_pick, read_round, take


class BranchStateManager(RequestTable):
    """The book with its rows: lays out every forward and commits what came of it."""

    # -- rows of the next target forward ----------------------------------------------------------

    def open_requests_(self) -> Rows:
        """Prompt rows of waiting requests: the shared prefix and the root branch behind it."""
        _, opened = self.waiting()
        spans = [span for request in opened for span in self._open(request)]
        return self._place(None, spans)

    def fork_(self) -> Rows:
        """Rows of waiting branches; text common to all goes into the prefix."""
        branches, _ = self.waiting()
        return self._place(None, self._start_all(branches))

    def fold_(self) -> Rows:
        """Rows of the branches that combine finished parts: the parts, folded."""
        folds = self.folds()
        rows = self._place(None, self._start_all(folds))
        for branch in [b for fold in folds for b in fold.request.branches]:
            branch.leave_parts_()  # they are on their way into the pool
        return rows

    def tree_rows_(self, proposal: Proposal) -> Rows:
        return self._place(proposal, [])

    def admit_(self, proposal: Proposal) -> Rows:
        """All trees, and behind them the prompts of everybody who can start now."""
        branches, opened = self.waiting()
        spans = self._start_all(branches)
        spans += [span for request in opened for span in self._open(request)]
        return self._place(proposal, spans)

    def _place(self, proposal: Proposal | None, spans: list[Span]) -> Rows:
        trees = None if proposal is None else self._trees(proposal)
        self._placed = self.layout.place_(self.kv, trees, spans)
        self._spans = spans
        by_owner = {branch.owner: branch for branch in self._newcomers}
        drawn = [by_owner[span.owner] for span in spans if span.draws]
        ran = self.active if proposal is not None else []
        if self.blending is not None:
            self._blend = self.blending.blend(spans, self._placed)
        sampler = self.samplers.of([*ran, *drawn])
        return replace(self._placed.rows, sampler=sampler, blend=self._blend)

    def _trees(self, proposal: Proposal) -> Trees:
        return Trees(
            [b.tokens[-1] for b in self.active],
            [b.length for b in self.active],
            [b.owner for b in self.active],
            [b.request.prefix_owner for b in self.active],
            tuple(i for i, b in enumerate(self.active) if b.matcher is not None),
            proposal,
        )

    def _open(self, request: Request) -> list[Span]:
        """Spans of a request's prompt; with a given outline nothing is drawn."""
        self._opened.append(request)
        self.layout.open_(request.prefix_owner, self.pools)
        spans = self._extend_prefix(request, request.prefix, request.prefix_chunks)
        if request.outline_budget == 0:
            branch = self.new_branch(request, 0, request.budget)
            request.branches, request.stage = [branch], Stage.RUNNING
        else:
            branch = self.new_branch(request, -1, request.outline_budget)
            request.root, request.stage = branch, Stage.OUTLINE
        branch.prompt, branch.chunks = [*request.tail], request.tail_chunks
        if request.given is None:
            if request.new_matcher is not None and branch.is_root:
                branch.matcher = request.new_matcher()
            return [*spans, self._start(branch)]
        if not self.rules.share_outline:
            branch.end(Finish.STOP)
            return spans
        branch.prompt += request.given_ids
        return [*spans, self._start(branch)]

    def _start_all(self, branches: Iterable[Branch]) -> list[Span]:
        spans = []
        for branch in branches:
            request = branch.request
            spans += self._extend_prefix(request, request.hoist, request.hoist_chunks)
            request.hoist, request.hoist_chunks = [], ()
            spans.append(self._start(branch))
        return spans

    def _extend_prefix(
        self, request: Request, ids: Sequence[int], chunks: tuple[Chunk, ...]
    ) -> list[Span]:
        if not ids:
            return []
        span = Span(request.prefix_owner, NOBODY, request.prefix_length, ids, chunks=chunks)
        request.prefix_length += len(ids)
        request.context += ids
        return [span]

    def _start(self, branch: Branch) -> Span:
        request = branch.request
        branch.stage = Stage.RUNNING
        branch.start = branch.length = request.prefix_length
        room = self.rules.max_positions - branch.start - len(branch.prompt)
        if room < branch.budget:
            branch.budget, branch.note = room, f"cut to the model's {self.rules.max_positions}"
        self._newcomers.append(branch)
        self.layout.enter_(branch.owner, request.prefix_owner, self.pools)
        draws = not (branch.is_root and request.given is not None)
        bound = branch.matcher is not None
        owner, prefix = branch.owner, request.prefix_owner
        return Span(owner, prefix, branch.start, branch.prompt, draws, bound, branch.chunks)

    # -- after the forward ------------------------------------------------------------------------

    def commit_(
        self,
        host: HostReader,
        features: Tensor | None,
        accepted: Accepted | None,
        roots: FirstTokens,
        report: BlendReport | None = None,
    ) -> RoundSummary:
        """Read the round, commit accepted rows where they lie, advance tips, finish branches."""
        assert self._placed is not None
        verdict = read_round(host, accepted, roots, picked_rows(report))
        ran = list(self.active) if accepted is not None else []  # who had a tree in this forward
        before = {b.owner: len(b.tokens) for b in ran}
        picked = DRAFT_INPUTS[self.rules.drafter.takes](features)
        figures = None if accepted is None else accepted.figures
        self._placed = self._placed.with_host_tokens(verdict.tokens_ST)
        walks = self._commit_trees(host, verdict, accepted, picked)
        paths = [walk.nodes for walk in walks]
        self._commit_spans(host, verdict, roots, picked)
        self.inbox += picked.segments
        started = self._newcomers
        everyone = [*ran, *started]
        summary = RoundSummary(
            tuple(b.name for b in everyone),
            tuple(len(b.tokens) - before.get(b.owner, 0) for b in everyone),
            (*(len(p) - 1 for p in paths), *(-1 for _ in started)),
            int((verdict.tokens_ST[:, 1:] >= 0).sum()),
            self.kv.current_length,
            0 if self.kv_draft is None else self.kv_draft.current_length,
            self._placed.rows.tokens_BQ.numel(),
            self._placed.padding,
            self._placed.rows.alignment,
            self._learn(ran, verdict, paths),
            explain(ran, walks, verdict, figures, self._placed.rows.bound_trees),
        )
        if report is not None and self._blend is not None:
            summary = replace(summary, blend=blend_summary(report, self._blend))
            mark_reused_(self.reused, self._spans, self._placed, self._blend, verdict.picked_P)
        self._newcomers, self._opened, self._placed, self._blend = [], [], None, None
        self.keep_parts_(everyone)
        self.retire_and_prepare_(everyone)
        return summary

    def length_state(self, branch: Branch) -> GammaState:
        """What the draft-length policy knows of a branch."""
        assert self.rules.drafter.lengths is not None
        return branch.gamma or first_state(self.rules.drafter.lengths)

    def _learn(
        self, ran: Sequence[Branch], verdict: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        """Let the drafter's memory see what came of its drafts."""
        settings, notes = self.rules.drafter.lengths, verdict.side_outputs_SC
        if self.recall is not None and notes.size:
            for branch, row, path in zip(ran, notes, paths, strict=True):
                fillers = row.reshape(verdict.tokens_ST.shape[1], -1)[list(path)].tolist()
                self.recall.observe(branch, fillers)
        if settings is None or not notes.size:
            return ()
        found = records(verdict.side_outputs_SC[:, :-1], [len(path) - 1 for path in paths])
        drafted = verdict.side_outputs_SC[:, -1].tolist()
        for branch, record, count in zip(ran, found, drafted, strict=True):
            state = self.length_state(branch)
            branch.gamma = next_state(settings, state, count, record.accepted, record.ema)
        return tuple(found)

    def _commit_trees(
        self,
        host: HostReader,
        verdict: RoundResult,
        accepted: Accepted | None,
        picked: DraftInputs,
    ) -> list[Walk]:
        """Walk every tree."""
        assert self._placed is not None
        pick = legal_pick(host)
        bound = {tree: i for i, tree in enumerate(self._placed.rows.bound_trees)}
        walks = []
        for tree, branch in enumerate(self.active if accepted is not None else []):
            if tree in bound and accepted is not None:
                best = accepted.bound
                nodes, tokens = bound_path(verdict, tree, bound[tree], branch, best, pick)
            else:
                nodes, tokens = free_path(verdict, tree)
            root, position = branch.tokens[-1], branch.length
            taken = take(branch, tokens)
            walks.append(Walk(root, position, nodes, tokens, taken))
            self._keep(branch, tree, nodes[: taken + 1], picked)
            branch.accepted.append(len(nodes) - 1)
            branch.emitted.append(taken)
        fresh = self._placed.fresh
        self.kv.release_(fresh[~self.kv.committed[fresh]])
        return walks

    def _keep(self, branch: Branch, tree: int, nodes: list[int], picked: DraftInputs) -> None:
        """Commit the rows of `nodes`, queue the drafter's rows."""
        assert self._placed is not None
        kept = self._placed.tree_slots[tree][nodes]
        self.kv.commit_(kept, range(branch.length, branch.length + len(nodes)), branch.owner)
        picked.path(branch, self._placed.tree_rows[tree][nodes])
        self._remember(branch, picked, self._placed.tree_rows[tree][nodes])
        branch.kept += len(nodes)
        branch.length += len(nodes)

    def _commit_spans(
        self, host: HostReader, verdict: RoundResult, roots: FirstTokens, picked: DraftInputs
    ) -> None:
        """Commit prompt rows; every newcomer gets its root token."""
        assert self._placed is not None
        pick, by_owner = legal_pick(host), {b.owner: b for b in self._newcomers}
        by_prefix = {b.request.prefix_owner: b.request for b in self._newcomers}
        by_prefix |= {r.prefix_owner: r for r in self._opened}
        tip, bound = 0, 0
        for span, laid in zip(self._spans, self._placed.spans, strict=True):
            for slots in laid.slots_Cn:
                self.kv.commit_(slots, span.positions)
            if span.owner in by_prefix:
                picked.prefix(by_prefix[span.owner], span, laid.rows)
                continue
            branch = by_owner[span.owner]
            if span.bound and branch.matcher is not None:
                token = pick(branch.matcher, verdict.best_GC[bound], roots.bound, bound)
                branch.matcher.advance(token)
                bound += 1
            elif span.draws:
                token = int(verdict.drawn_R[tip])
            tip += span.draws
            branch.length += len(span.tokens)
            if span.draws:
                take(branch, [token])
            else:
                branch.end(Finish.STOP)
            picked.prompt(branch, laid.rows)
            self._remember(branch, picked, laid.rows)

    def _remember(self, branch: Branch, picked: DraftInputs, rows: Ints) -> None:
        """Features of rows that will be folded, if the drafter wants any."""
        if self.folding is not None and self.folding.keeps(branch):
            branch.features += picked.features(rows)

    def intake_(self) -> DraftRows | tuple[Branch, ...]:
        """Hand the drafter everything committed since its last forward."""
        if self.kv_draft is None:
            return tuple(self.active)
        segments, self.inbox = self.inbox, []
        active = [(b.owner, b.request.prefix_owner, b.length, b.tokens[-1]) for b in self.active]
        rows = self.layout.place_draft_(self.kv_draft, segments, active)
        return replace(rows, sampler=self.samplers.of(self.active))

"""The batch of the next target forward: token trees of running branches, and prompts that start."""

from dataclasses import replace

from ..ops.types import NO_WORK, Proposal
from .admission import Admission
from .kv_cache import KVCacheManager
from .request import Branch, Finish, Request, Stage, move
from .round import Batch, Span, Trees
from .scheduler import StepPlan
from .text.tokens import PromptTokens


class BatchBuilder:
    def __init__(self, kv_cache: KVCacheManager, admission: Admission) -> None:
        self.admission = admission
        self.kv_cache = kv_cache
        self.table = kv_cache.table
        self.layout = kv_cache.layout

    def build_(self, step: StepPlan | None, proposal: Proposal | None = None) -> Batch:
        """The batch of the active branches' trees, if any, and of all that starts in the step."""
        newcomers, spans = ([], []) if step is None else self.start_(step)
        trees = None if proposal is None else self.trees(proposal)
        ran = [] if proposal is None else self.table.active
        requests = [*[b.request for b in ran], *[self.table.open[span.request] for span in spans]]
        tapped = any(request.drafted for request in requests)
        placed = self.layout.place_(self.kv_cache.pools[0], trees, spans, tapped=tapped)
        drawing = [*ran, *[span.branch for span in spans if span.branch and span.draws]]
        sampled = [branch for branch in drawing if not branch.request.sampling.plain]
        sampler = self.kv_cache.samplers.of(drawing) if sampled else None
        blend = None if self.kv_cache.blend is None else self.kv_cache.blend.rows(spans, placed)
        rows = placed.rows
        if sampler is not None or blend is not None:
            rows = replace(rows, sampler=sampler, blend=blend)
        return Batch(
            rows=rows,
            placed=placed,
            ran=tuple(ran),
            newcomers=tuple(newcomers),
            branches=(*ran, *newcomers),
            spans=tuple(spans),
            forced=() if proposal is None else proposal.forced,
            work=NO_WORK if proposal is None else proposal.work,
        )

    def start_(self, step: StepPlan) -> tuple[list[Branch], list[Span]]:
        """Allocate what starts: the branches, and the rows of prompts and of chunks of prompts."""
        branches = [*step.starting]
        prefixes = self.kv_cache.prefixes
        if prefixes is not None:  # preempted branches continue after cached rows of their own
            for branch in (*branches, *[request.first_branch for request in step.requests]):
                if branch is not None and branch.tokens:
                    prefixes.resume_(branch)
        self._make_room_(step)
        spans = [span for branch in branches for span in self._start_branch_(branch)]
        for request in step.requests:
            first, prompt = self._start_request_(request)
            branches += first
            spans += prompt
        for request, count in step.chunks:
            spans += self._read_chunk_(request, count)
        return branches, spans

    def trees(self, proposal: Proposal) -> Trees:
        if self.kv_cache.beams is not None:
            return self.kv_cache.beams.trees(proposal)
        active = self.table.active
        return Trees(
            roots=[branch.tokens[-1] for branch in active],
            positions=[branch.length for branch in active],
            owners=[branch.owner for branch in active],
            bound=tuple(i for i, branch in enumerate(active) if branch.matcher is not None),
            proposal=proposal,
        )

    def _make_room_(self, step: StepPlan) -> None:
        """Allocate regions for new requests, and evict idle cached rows where they are needed."""
        requests = [*step.requests, *[request for request, _ in step.chunks]]
        new = [request for request in requests if request.waits]
        for request in new:
            self.layout.open_(request.prefix_owner, *self.admission.region(request))
        starting: list[Branch | Request] = [*step.starting, *requests]
        if self.kv_cache.prefixes is not None and starting:
            running = len(self.table.active)
            claimed = self.admission.claimed(self.table.open.values(), running, starting)
            self.kv_cache.prefixes.make_room_(claimed, new)

    def _start_request_(self, request: Request) -> tuple[list[Branch], list[Span]]:
        """Start a request: its first branch, if one starts, and the rows of its prompt."""
        self.table.begin(request)
        spans = []
        start = 0
        for part in (request.prefix, *request.prefix_parts):  # divided as they were first read
            if start + len(part) > request.prefix_length:
                spans += self._extend_prefix_(request, part.behind(request.prefix_length - start))
            start += len(part)
        if (first := request.first_branch) is not None:
            request.first_branch = None
            move(request, "outline" if first.is_root else "merge" if first.combines else "run")
            return [first], [*spans, *self._start_branch_(first)]
        if request.outline_budget == 0:
            for number in range(request.samples):  # further samples start once the prompt has rows
                sample = self.table.new_branch(request, number, request.budget)
                sample.prompt = request.tail
                request.branches.append(sample)
            branch = request.branches[0]
            move(request, "run")
        else:
            branch = self.table.new_branch(request, -1, request.outline_budget)
            request.root = branch
            move(request, "outline")
        branch.prompt = request.tail
        if request.given_outline is not None:
            if not self.table.limits.share_outline:
                branch.end(Finish.STOP)
                return [], spans
            branch.prompt += request.given_ids
        elif request.new_matcher is not None:
            branch.matcher = request.new_matcher()
        return [branch], [*spans, self._allocate_(branch)]

    def _read_chunk_(self, request: Request, count: int) -> list[Span]:
        """The next tokens of a prompt, also of the first branch's own, as rows of the prefix."""
        self.table.begin(request)
        if request.stage is not Stage.PREFILL:
            move(request, "read")
        request.borrow_tail(request.prefix_length + count)
        rest = request.body[request.prefix_length :]
        return self._extend_prefix_(request, PromptTokens(rest[:count]))

    def _start_branch_(self, branch: Branch) -> list[Span]:
        request = branch.request
        common = request.common_prompt
        spans = self._extend_prefix_(request, common)
        if len(common):
            request.prefix_parts.append(common)
        request.common_prompt = PromptTokens()
        # A part that its budget ended may lack the row of its last token.
        for part in branch.reads:
            if rest := part.pending:
                spans.append(Span(part.owner, request.prefix_owner, part.length, rest, branch=part))
        return [*spans, self._allocate_(branch)]

    def _extend_prefix_(self, request: Request, text: PromptTokens) -> list[Span]:
        if not len(text):
            return []
        owner = request.prefix_owner
        span = Span(owner, owner, request.prefix_length, text.ids, chunks=text.chunks)
        request.extend_prefix(text.ids)
        return [span]

    def _allocate_(self, branch: Branch) -> Span:
        request = branch.request
        limit = self.table.limits.max_positions
        move(branch, "run")
        branch.start = branch.first_position
        branch.length = max(branch.start, branch.first_own_row)
        if (most := limit - branch.start - len(branch.prompt)) < branch.budget:
            branch.budget = most
            branch.note = f"cut to the model's {limit}"
        branch.in_shared_row = self.layout.enter_(branch.owner, request.prefix_owner)
        rows = branch.rows.behind(branch.length - branch.start)
        is_given = branch.is_root and request.given_outline is not None
        return Span(
            branch.owner,
            request.prefix_owner,
            branch.length,
            rows.ids,
            branch=branch,
            draws=not (branch.tokens or is_given),  # a branch that resumes knows its next token
            bound=branch.matcher is not None,
            chunks=rows.chunks,
        )

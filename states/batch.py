"""Which rows the next forward of the target gets: a `Batch` of trees, and of prompts that begin."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..ops.kv.pool import KVCache
from ..ops.types import Proposal
from .admission import Admission
from .beam import BeamState
from .blend import BlendState
from .kv_cache import Keeper
from .layout import Batch, Layout, Span
from .request import Branch, Finish, Request, Stage, move
from .request_table import RequestTable
from .rows import Trees
from .sampling import Samplers
from .text.tokens import PromptTokens


@dataclass(eq=False, slots=True)
class Placer:
    """Lays branches out as rows; `pools` are the target's and then the drafters', if there are any.

    beams: the searches, where every branch is one. keeper: what is kept of earlier prompts.
    """

    table: RequestTable
    layout: Layout
    pools: Sequence[KVCache]
    admission: Admission
    samplers: Samplers
    blend: BlendState | None
    beams: BeamState | None
    keeper: Keeper | None

    def place_(
        self,
        proposal: Proposal | None,
        branches: Iterable[Branch],
        requests: Iterable[Request],
        chunks: Iterable[tuple[Request, int]] = (),
    ) -> Batch:
        """Rows of the active branches' trees, if there are any, and of whoever begins.

        chunks: requests whose prompts go on by so many tokens, and do not end.
        """
        opened = list(requests)
        newcomers, spans = self.start_(branches, opened, chunks)
        trees = None if proposal is None else self.trees(proposal)
        placed = self.layout.place_(self.pools[0], trees, spans)
        ran = tuple(self.table.active) if proposal is not None else ()
        by_owner = {branch.owner: branch for branch in newcomers}
        drawn = [by_owner[span.owner] for span in spans if span.draws]
        sampler = self.samplers.of([*ran, *drawn])
        blend = None if self.blend is None else self.blend.rows(spans, placed)
        rows = placed.rows
        if sampler is not None or blend is not None:
            rows = replace(rows, sampler=sampler, blend=blend)
        who = ran, tuple(newcomers), tuple(opened), tuple(spans)
        drafted = () if proposal is None else (proposal.forced, proposal.work)
        return Batch(rows, placed, *who, *drafted)

    def start_(
        self,
        branches: Iterable[Branch],
        requests: Iterable[Request],
        chunks: Iterable[tuple[Request, int]] = (),
    ) -> tuple[list[Branch], list[Span]]:
        """Room for whoever begins, and the rows of their prompts.

        Returns:
            The branches that begin, those of the requests among them; and what is read.
        """
        opened = list(requests)
        newcomers = list(branches)
        read = list(chunks)
        self._go_on_behind_(newcomers, opened)
        self._make_room_(newcomers, opened, [request for request, _ in read])
        spans = [span for branch in newcomers for span in self._start_behind(branch)]
        for request in opened:
            root, more = self._open(request)
            newcomers += root
            spans += more
        spans += [span for request, count in read for span in self._read(request, count)]
        return newcomers, spans

    def trees(self, proposal: Proposal) -> Trees:
        """The active branches as roots of trees, or their beams."""
        if self.beams is not None:
            return self.beams.trees(proposal)
        active = self.table.active
        return Trees(
            [b.tokens[-1] for b in active],
            [b.length for b in active],
            [b.owner for b in active],
            tuple(i for i, b in enumerate(active) if b.matcher is not None),
            proposal,
        )

    def _open(self, request: Request) -> tuple[list[Branch], list[Span]]:
        """A request's first branch, if one begins, and the spans of its prompt; with a given
        outline nothing is drawn."""
        self._begin(request)
        parts = list(_parts_unread(request))
        spans = [span for part in parts for span in self._extend_prefix(request, part)]
        if (first := request.first) is not None:
            request.first = None
            way = "outline" if first.is_root else "merge" if first.combines else "run"
            move("request", request, way)
            return [first], [*spans, *self._start_behind(first)]
        if request.outline_budget == 0:
            numbers = range(request.samples)
            drawn = [self.table.new_branch(request, n, request.budget) for n in numbers]
            request.branches = drawn
            branch = drawn[0]
            for one in drawn:  # the others wait until the prompt is there to stand behind
                one.prompt = request.tail
            move("request", request, "run")
        else:
            branch = self.table.new_branch(request, -1, request.outline_budget)
            request.root = branch
            move("request", request, "outline")
        branch.prompt = request.tail
        if request.given is not None:
            if not self.table.limits.share_outline:
                branch.end(Finish.STOP)
                return [], spans
            branch.prompt += request.given_ids
        if request.given is None and request.new_matcher is not None:  # a first branch has it
            branch.matcher = request.new_matcher()
        return [branch], [*spans, self._start(branch)]

    def _make_room_(
        self, branches: Sequence[Branch], opened: Sequence[Request], read: Sequence[Request]
    ) -> None:
        """Requests that begin get a place for what is not kept of them; idle rows make way there,
        and where running branches have reserved their slots."""
        new = [one for one in (*opened, *read) if one.waits]
        for request in new:
            size, least = self.admission.region(request)
            self.layout.open_(request.prefix_owner, size, self.pools, least)
        starting: list[Branch | Request] = [*branches, *opened, *read]
        if self.keeper is not None and starting:
            running = self.table.open.values()
            active = len(self.table.active)
            self.keeper.make_room_(self.admission.claimed(running, active, starting), new)

    def _go_on_behind_(self, branches: Iterable[Branch], opened: Iterable[Request]) -> None:
        """Branches that were preempted go on behind what is still there of them."""
        firsts = [request.first for request in opened if request.first is not None]
        for branch in (*branches, *firsts):
            if self.keeper is not None and branch.tokens:
                self.keeper.go_on_behind_(branch)

    def _begin(self, request: Request) -> None:
        """From now on it is open."""
        if request.stage is not Stage.PREFILL:
            self.table.begin(request)

    def _read(self, request: Request, count: int) -> list[Span]:
        """The next tokens of a prompt as rows of the prefix; what the first branch would read by
        itself becomes a part of it."""
        self._begin(request)
        if request.stage is not Stage.PREFILL:
            move("request", request, "read")
        if (more := count + request.prefix_length - request.body_size) > 0:
            request.widen(more)
        rest = request.body[request.prefix_length :]
        return self._extend_prefix(request, PromptTokens(rest[:count]))

    def _start_behind(self, branch: Branch) -> list[Span]:
        """A waiting branch's prompt, behind what all branches' prompts begin with."""
        request = branch.request
        spans = self._extend_prefix(request, request.hoist)
        if len(request.hoist):
            request.grown.append(request.hoist)
        request.hoist = PromptTokens()
        return [*spans, *_unread(branch), self._start(branch)]

    def _extend_prefix(self, request: Request, more: PromptTokens) -> list[Span]:
        if not len(more):
            return []
        owner = request.prefix_owner
        position = request.prefix_length
        request.read(more.ids)
        return [Span(owner, owner, position, more.ids, chunks=more.chunks)]

    def _start(self, branch: Branch) -> Span:
        request = branch.request
        limit = self.table.limits.max_positions
        move("branch", branch, "run")
        branch.start = branch.begins
        branch.length = max(branch.start, branch.shared)
        room = limit - branch.start - len(branch.prompt)
        if room < branch.budget:
            branch.budget = room
            branch.note = f"cut to the model's {limit}"
        branch.among = self.layout.enter_(branch.owner, request.prefix_owner, self.pools)
        rows = branch.rows.behind(branch.length - branch.start)
        return Span(
            branch.owner,
            request.prefix_owner,
            branch.length,
            rows.ids,
            draws=not (branch.tokens or (branch.is_root and request.given is not None)),
            bound=branch.matcher is not None,
            chunks=rows.chunks,
        )


def _unread(branch: Branch) -> list[Span]:
    """Last tokens of the parts that it sees, where a budget ended them before they had a row."""
    prefix = branch.request.prefix_owner
    return [Span(one.owner, prefix, one.length, one.pending) for one in branch.reads if one.pending]


def _parts_unread(request: Request) -> Iterator[PromptTokens]:
    """What branches share that has no rows yet, each part as it was read first."""
    at = 0
    for part in (request.prefix, *request.grown):
        if at + len(part) > request.prefix_length:
            yield part.behind(request.prefix_length - at)
        at += len(part)

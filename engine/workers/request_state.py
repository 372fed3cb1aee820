"""A request of a run on workers, as the director has it: its branches, and which group has what."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...states.phases.parse import fan_out_
from ...states.request import (
    ENDING_OF,
    Branch,
    Finish,
    MigratedBranch,
    MigratedRequest,
    Request,
    move,
)
from ...states.request_table import RequestTable
from ..events import OUTLINE
from ..prepare.inputs import Prompt
from ..run.session import Session
from .worker_groups import WorkerGroup


@dataclass(eq=False, slots=True)
class RequestState:
    """A request with its branches, in host integers, so that any worker can continue it.

    Attributes:
        writer: writes the outline. source: has the rows of the prefix, `rows` of each pool, for its
            first `ids`; holders: groups that decode branches and have them. assigned: the group
            that decodes a branch, by its index.
    """

    session: Session
    table: RequestTable
    prompt: Prompt
    request: Request
    writer: WorkerGroup | None = None
    source: WorkerGroup | None = None
    rows: tuple[int, ...] = ()
    holders: set[WorkerGroup] = field(default_factory=set)
    assigned: dict[int, WorkerGroup] = field(default_factory=dict)

    @property
    def needs_writer(self) -> bool:
        """Whether its outline is not written, and no group writes it."""
        root = self.request.root
        return root is not None and not root.ended and self.writer is None

    @property
    def outlined(self) -> bool:
        """Whether its outline has ended and was not parsed."""
        root = self.request.root
        return root is not None and root.ended and not self.request.branches

    @property
    def unassigned(self) -> list[Branch]:
        """Branches that could be decoded, and that no group has."""
        return [
            branch
            for branch in self.request.branches
            if not branch.ended and len(branch.prompt) and branch.index not in self.assigned
        ]

    @property
    def ended(self) -> bool:
        branches = self.request.branches
        return bool(branches) and all(branch.ended for branch in branches)

    def running(self) -> Iterator[tuple[WorkerGroup, Branch]]:
        """Branches that a group has, the root branch among them, with the group."""
        root = self.request.root
        if self.writer is not None and root is not None and not root.ended:
            yield self.writer, root
        for branch in self.request.branches:
            if not branch.ended and branch.index in self.assigned:
                yield self.assigned[branch.index], branch

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens that all of its branches share."""
        return (*self.request.body.ids, *self.request.common_prompt.ids)

    def part(self, branches: Sequence[Branch]) -> MigratedRequest:
        """Some branches, or without any the outline, as far as they are not written."""
        arrival = self.request.arrival
        if not branches:
            root = self.request.root
            assert root is not None
            return MigratedRequest(outline=tuple(root.tokens), arrival=arrival)
        migrated = tuple(
            MigratedBranch(
                index=branch.index,
                prompt=branch.prompt.ids,
                tokens=tuple(branch.tokens),
                budget=branch.budget,
            )
            for branch in branches
        )
        return MigratedRequest(self.prefix, migrated, arrival=arrival)

    def branch_of(self, index: int) -> Branch | None:
        """A branch by its index; None if it has not started."""
        branches = self.request.all_branches()
        return next((branch for branch in branches if branch.index == index), None)

    def end_(self, index: int, finish: Finish, note: str) -> None:
        """End a branch; a request ends with an outline that cannot be written."""
        branch = self.branch_of(index)
        request = self.request
        if branch is None:
            return
        if not branch.ended:
            branch.end(finish, note)
        self.assigned.pop(index, None)
        unwritten = index == OUTLINE and finish not in (Finish.STOP, Finish.LENGTH)
        if unwritten or finish is Finish.FAILED:
            request.finish = finish
            request.why = note
        if unwritten:
            if not branch.tokens:  # it has not started
                request.root = None
            self.table.end_unstarted(request, finish, note)
        elif finish is Finish.FAILED:
            for other in request.branches:
                if not other.ended:
                    other.end(finish, note)
        self._read_prompts_()
        if self.ended:
            move(request, ENDING_OF[request.finish])

    def parse_(self) -> None:
        """Parse the outline into branches, with the prompts of those that have no dependencies."""
        request = self.request
        prompts = self.session.prompts
        skeleton = self.session.program.graph.skeleton
        root = request.root
        assert skeleton is not None and root is not None
        tokens = root.tokens if request.given_outline is None else request.given_ids
        request.outline = request.given_outline or prompts.read_outline(
            tokens, max_branches=skeleton.max_branches, tools=skeleton.tools
        )
        if prompts.share == "outline":
            request.prefix_parts.append(request.tail + tokens)
        fan_out_(
            self.table,
            self.session.reading,
            request,
            pending=(),
            direct_tokens=skeleton.direct_tokens,
        )
        request.context = list(self.prefix)
        request.prefix_length = len(request.context)
        move(request, "run")
        self._read_prompts_()

    def _read_prompts_(self) -> None:
        """Prompts of the branches whose dependencies have ended."""
        branches = self.request.branches
        ended = {branch.point.id for branch in branches if branch.point and branch.ended}
        for branch in branches:
            point = branch.point
            if point is None or branch.ended or len(branch.prompt):
                continue
            if ended.issuperset(point.deps):
                branch.prompt = self.session.reading.branch(branch)

    def drop_lost_(self, present: Container[WorkerGroup]) -> list[str]:
        """Take back what groups had that are not present any more; names of its branches."""
        request = self.request
        lost = {index for index, group in self.assigned.items() if group not in present}
        names = [branch.name for branch in request.branches if branch.index in lost]
        if self.writer is not None and self.writer not in present and request.root is not None:
            self.writer = None
            names += [] if request.root.ended else [request.root.name]
        self.assigned = {i: group for i, group in self.assigned.items() if i not in lost}
        self.holders = {group for group in self.holders if group in present}
        if self.source is not None and self.source not in present:
            self.source = next(iter(self.holders), None)
        return names


def new_request_state(session: Session, table: RequestTable, prompt: Prompt) -> RequestState:
    """A submitted request with its seed and budget, and the root branch, or without an outline the
    branches, which can be assigned; raises PromptError."""
    request = session.request(prompt)
    table.add(request)
    budget = prompt.max_new_tokens or session.max_new_tokens
    prompt = replace(prompt, seed=request.seed, max_new_tokens=budget)
    if request.outline_budget == 0:
        for index in range(request.samples):
            branch = table.new_branch(request, index, request.budget)
            branch.prompt = request.tail
            request.branches.append(branch)
        move(request, "run")
    else:
        request.root = table.new_branch(request, OUTLINE, request.outline_budget)
        move(request, "outline")
        if request.given_outline is not None:
            request.root.end(Finish.STOP)
    return RequestState(session, table, prompt, request)

"""One request on its way through a cluster: what is known of it, and who does what of it."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ....states.migrated_request import MigratedBranch, MigratedRequest
from ....states.phases.parse import fan_out_
from ....states.request import ENDING_OF, Branch, Finish, Request, move
from ....states.request_table import RequestTable
from ...prepare.inputs import Prompt
from ...run.session import Session
from .members import Unit

OUTLINE = -1  # the number of the root branch


@dataclass(eq=False, slots=True)
class RequestCourse:
    """A request with its branches, in host integers, so that any worker can go on with it.

    Attributes:
        writer: who writes the outline. source: who has the rows of the prefix, `rows` of each pool,
            that stand for its first `ids`; holders: those who decode branches and have them.
        at: who decodes which branch, by its number; those that are in nobody's hands are not in it.
    """

    session: Session
    table: RequestTable
    prompt: Prompt
    request: Request
    writer: Unit | None = None
    source: Unit | None = None
    rows: tuple[int, ...] = ()
    holders: set[Unit] = field(default_factory=set)
    at: dict[int, Unit] = field(default_factory=dict)

    def begin_(self) -> None:
        """Without an outline to write, branches can be given away at once."""
        request = self.request
        if request.outline_budget == 0:
            numbers = range(request.samples)
            request.branches = [self._branch(number, request.budget) for number in numbers]
            for branch in request.branches:
                branch.prompt = request.tail
            move(request, "run")
            return
        request.root = self._branch(OUTLINE, request.outline_budget)
        move(request, "outline")
        if request.given_outline is not None:
            request.root.end(Finish.STOP)

    def _branch(self, index: int, budget: int) -> Branch:
        return self.table.new_branch(self.request, index, budget)

    # -- what is to be done -----------------------------------------------------------------------

    @property
    def wants_outline(self) -> bool:
        """Its outline is not written, and nobody writes it."""
        root = self.request.root
        return root is not None and not root.ended and self.writer is None

    @property
    def wanted(self) -> list[Branch]:
        """Branches that could be decoded, and that nobody has."""
        return [one for one in self.request.branches if self._waits(one)]

    def _waits(self, branch: Branch) -> bool:
        return not branch.ended and bool(len(branch.prompt)) and branch.index not in self.at

    def in_hand(self) -> Iterator[tuple[Unit, Branch]]:
        """Branches that somebody writes, the root branch among them, with whom."""
        root = self.request.root
        if self.writer is not None and root is not None and not root.ended:
            yield self.writer, root
        for branch in self.request.branches:
            if not branch.ended and branch.index in self.at:
                yield self.at[branch.index], branch

    @property
    def prefix(self) -> tuple[int, ...]:
        """All that its branches stand behind."""
        return (*self.request.body.ids, *self.request.common_prompt.ids)

    def outline_work(self) -> MigratedRequest:
        """The outline, as far as it is not written."""
        assert self.request.root is not None
        written = tuple(self.request.root.tokens)
        arrival = self.request.arrival
        return MigratedRequest(outline=written, arrival=arrival)

    def branch_work(self, branches: Sequence[Branch]) -> MigratedRequest:
        """Branches, as far as they are not written."""
        handed = [
            MigratedBranch(one.index, one.prompt.ids, tuple(one.tokens), one.budget)
            for one in branches
        ]
        return MigratedRequest(self.prefix, tuple(handed), arrival=self.request.arrival)

    # -- what has been done -----------------------------------------------------------------------

    def take_(self, index: int, start: int, tokens: Sequence[int]) -> None:
        """Tokens that are certain; what was known of them already is the same."""
        if (branch := self.branch_of(index)) is not None:
            branch.tokens[start : start + len(tokens)] = tokens

    def branch_of(self, index: int) -> Branch | None:
        """A branch by its number, or the root branch; None if that never began."""
        everyone = self.request.all_branches()
        return next((one for one in everyone if one.index == index), None)

    def end_(self, index: int, finish: Finish, note: str) -> None:
        """A branch has ended; where the outline could not be written, the request has."""
        branch = self.branch_of(index)
        request = self.request
        if branch is None:
            return
        if not branch.ended:
            branch.end(finish, note)
        self.at.pop(index, None)
        if index == OUTLINE and finish not in (Finish.STOP, Finish.LENGTH):
            if not branch.tokens:  # it never began
                request.root = None
            request.finish = finish
            request.why = note
            self.table.end_unstarted(request, finish, note)
        elif finish is Finish.FAILED:
            request.finish = finish
            request.why = note
            for one in request.branches:
                if not one.ended:
                    one.end(finish, note)
        self._prepare_()
        if request.branches and all(one.ended for one in request.branches):
            move(request, ENDING_OF[request.finish])

    def has_(self, unit: Unit, rows: tuple[int, ...], *, decodes: bool) -> None:
        """Somebody has so many rows of the prefix, of each pool; decodes: and can decode branches
        behind them."""
        self.source = unit
        self.rows = rows
        if decodes:
            self.holders.add(unit)

    def parse_(self) -> None:
        """Read the outline into branches, whose prompts are known as far as they depend on none."""
        request = self.request
        prompts = self.session.prompts
        skeleton = self.session.program.graph.skeleton
        root = request.root
        assert skeleton is not None and root is not None
        written = root.tokens if request.given_outline is None else request.given_ids
        request.outline = request.given_outline or prompts.read_outline(
            written, max_branches=skeleton.max_branches, tools=skeleton.tools
        )
        if prompts.share == "outline":
            request.prefix_parts.append(request.tail + written)
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
        self._prepare_()

    def _prepare_(self) -> None:
        """Prompts of the branches all of whose dependencies have ended."""
        ended = {one.point.id for one in self.request.branches if one.point and one.ended}
        for branch in self.request.branches:
            point = branch.point
            known = point is None or branch.ended or bool(len(branch.prompt))
            if point is not None and not known and ended.issuperset(point.deps):
                branch.prompt = self.session.reading.branch(branch)

    @property
    def outlined(self) -> bool:
        """Its outline has ended and was not read."""
        root = self.request.root
        return root is not None and root.ended and not self.request.branches

    @property
    def ended(self) -> bool:
        return bool(self.request.branches) and all(one.ended for one in self.request.branches)

    def forget_(self, there: Container[Unit]) -> list[str]:
        """Some are gone: what they had is in nobody's hands; names of it.

        Args:
            there: who is not.
        """
        request = self.request
        gone = {one for one in self.at.values() if one not in there}
        lost = [one.name for one in request.branches if self.at.get(one.index) in gone]
        if self.writer is not None and self.writer not in there and request.root is not None:
            self.writer = None
            lost += [] if request.root.ended else [request.root.name]
        self.at = {index: one for index, one in self.at.items() if one not in gone}
        self.holders = {one for one in self.holders if one in there}
        if self.source is not None and self.source not in there:
            self.source = next(iter(self.holders), None)
        return lost


def new_course(session: Session, table: RequestTable, prompt: Prompt) -> RequestCourse:
    """A request that nothing is done of yet; its seed is said from now on.

    Raises:
        PromptError: the text cannot be a prompt.
    """
    request = session.request(prompt)
    table.add(request)
    budget = prompt.max_new_tokens or session.max_new_tokens
    said = replace(prompt, seed=request.seed, max_new_tokens=budget)
    course = RequestCourse(session, table, said, request)
    course.begin_()
    return course

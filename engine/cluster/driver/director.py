"""Directs the workers of a cluster: what the states of graphs/machines/cluster.yaml do.

All that is true of requests is host integers here; workers tell what they commit as they go. So
whatever a worker had when it was lost goes on elsewhere from its last committed token, and coins
are keyed by position: the text is the same.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ....states.migrated_request import MigratedRequest
from ....states.request import Branch, Finish, Request
from ....states.request_table import RequestTable, RunLimits
from ...prepare.inputs import Prompt
from ...run.session import Session
from ...workers.placement import assign_branches, expected_length
from ..workers.messages import (
    Assign,
    BranchEnded,
    Committed,
    Count,
    Counted,
    Recall,
    Regrouped,
    Reply,
    WorkEnded,
)
from .course import OUTLINE, RequestCourse, new_course
from .members import ClusterMember, Unit
from .membership import HEARING, Membership, Tell
from .regrouping import Regrouping


@dataclass(frozen=True, slots=True)
class GivenWork:
    """Who has what of a request."""

    course: RequestCourse
    unit: Unit
    branches: tuple[int, ...]


@dataclass(eq=False)
class Director:
    """The driver of a cluster; see `states.phases.cluster_ops`.

    Attributes:
        table: all requests. courses: the same in their order.
        regrouping: brings prefixes to workers. tokens: committed, by worker.
    """

    session: Session
    membership: Membership
    tell: Tell
    table: RequestTable = field(init=False)
    regrouping: Regrouping = field(init=False)
    courses: list[RequestCourse] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    _given: dict[str, GivenWork] = field(default_factory=dict)
    _counted: dict[ClusterMember, Counted] = field(default_factory=dict)
    _works: int = 0

    def __post_init__(self) -> None:
        graph = self.session.program.graph
        target = self.session.models.target
        shares = graph.skeleton is None or graph.skeleton.share == "outline"
        most = target.max_positions
        limits = RunLimits(graph.layout, graph.drafter, shares, most, target.vocab_size)
        self.table = RequestTable(limits)
        self.regrouping = Regrouping(self.membership, self.tell)

    def submit(self, prompts: Iterable[Prompt]) -> None:
        """Take requests in; raises PromptError."""
        self.courses += [new_course(self.session, self.table, prompt) for prompt in prompts]

    # -- the states -------------------------------------------------------------------------------

    def form_group_(self) -> None:
        """Take care of who is gone, and group those that are there."""
        self._forget_lost_()
        self.membership.form_(self._took_)
        self._forget_lost_()

    def write_outlines_(self) -> None:
        """Give outlines to those with least to do, first come first served."""
        for course in self.courses:
            if course.wants_outline and (free := self._free(self.membership.writers)):
                course.writer = free[0]
                self._give_(course, free[0], course.outline_work(), (OUTLINE,))

    def read_outlines_(self) -> None:
        """Read the outlines that have ended."""
        for course in self.courses:
            if course.outlined:
                course.parse_()
                self.tell({"event": "outline", "request": course.request.key})

    def regroup_(self) -> None:
        """Place branches, and bring prefixes to those who lack them."""
        for course in self.courses:
            self._place_(course)
            self.regrouping.send_(course, self._took_)

    def give_branches_(self) -> None:
        """Give what was placed to those it was placed with."""
        for course in self.courses:
            given = self._in_hand(course)
            for unit in self.membership.decoders:
                mine = [
                    one
                    for one in course.request.branches
                    if course.at.get(one.index) is unit and one.index not in given
                ]
                if mine:
                    numbers = tuple(one.index for one in mine)
                    self._give_(course, unit, course.branch_work(mine), numbers)

    def gather_(self) -> None:
        """Take in what was said, and who was lost."""
        todo = self.outlines_written or self.outlines_wanted or self.branches_wanted
        self.membership.hear_(self._took_, 0 if todo else HEARING)
        self._forget_lost_()

    # -- the guards -------------------------------------------------------------------------------

    @property
    def group_changed(self) -> bool:
        return self.membership.changed

    @property
    def outlines_wanted(self) -> bool:
        return bool(self._free(self.membership.writers)) and any(
            one.wants_outline for one in self.courses
        )

    @property
    def outlines_written(self) -> bool:
        return any(one.outlined for one in self.courses)

    @property
    def branches_wanted(self) -> bool:
        return bool(self._free(self.membership.decoders)) and any(
            one.wanted for one in self.courses
        )

    @property
    def all_ended(self) -> bool:
        return all(one.ended for one in self.courses)

    @property
    def requests(self) -> Sequence[Request]:
        return self.table.requests

    # -- who does what ----------------------------------------------------------------------------

    def _loads(self, units: Sequence[Unit]) -> dict[Unit, int]:
        """Tokens that each is expected to write still."""
        loads = dict.fromkeys(units, 0)
        for unit, branch in self._placed():
            if unit in loads:
                loads[unit] += expected_length(branch)
        return loads

    def _room(self, units: Sequence[Unit]) -> dict[Unit, int]:
        """Branches that each can take."""
        counts = Counter(unit for unit, _ in self._placed())
        return {one: one.most - counts[one] for one in units}

    def _placed(self) -> Iterator[tuple[Unit, Branch]]:
        """What is in somebody's hands, with whose."""
        for course in self.courses:
            yield from course.in_hand()

    def _free(self, units: Sequence[Unit]) -> list[Unit]:
        """Those that can take one more branch, those with least to do first."""
        loads = self._loads(units)
        room = self._room(units)
        return sorted((one for one in units if room[one] > 0), key=lambda one: loads[one])

    def _place_(self, course: RequestCourse) -> None:
        units = self.membership.decoders
        chosen = assign_branches(
            course.wanted, self._loads(units), self._room(units), course.holders
        )
        for branch, unit in chosen:
            course.at[branch.index] = unit
        if chosen:
            where = {branch.name: unit.name for branch, unit in chosen}
            self.tell({"event": "placed", "branches": where})

    def _in_hand(self, course: RequestCourse) -> set[int]:
        own = (one for one in self._given.values() if one.course is course)
        return {index for one in own for index in one.branches}

    def _give_(
        self,
        course: RequestCourse,
        unit: Unit,
        handed: MigratedRequest,
        branches: tuple[int, ...],
    ) -> None:
        self._works += 1
        name = f"{self._works}"
        self._given[name] = GivenWork(course, unit, branches)
        order = Assign(name, course.prompt, handed, unit.tp, unit.number)
        if unit.tp > 1:  # everybody is told what some do together, in one order
            self.membership.tell_all(order)
        else:
            unit.leader.ask(order)

    # -- what workers say -------------------------------------------------------------------------

    def _took_(self, member: ClusterMember, reply: Reply) -> None:
        if isinstance(reply, Regrouped):
            self.regrouping.took(member, reply)
            return
        if isinstance(reply, Counted):
            self._counted[member] = reply
            return
        given = self._given.get(getattr(reply, "work", ""))
        if given is None or given.unit.leader is not member:
            return
        match reply:
            case Committed():
                given.course.take_(reply.branch, reply.start, reply.tokens)
                self.tokens[member.name] += len(reply.tokens)
                self.tell({"event": "tokens", "request": given.course.request.key})
            case BranchEnded():
                given.course.end_(reply.branch, Finish(reply.finish), reply.note)
                if reply.rows:
                    decodes = given.unit in self.membership.decoders
                    given.course.has_(given.unit, reply.rows, decodes=decodes)
            case WorkEnded():
                del self._given[reply.work]

    def _forget_lost_(self) -> None:
        """What was in the hands of those who are gone is in nobody's any more."""
        there = {*self.membership.decoders, *self.membership.writers}
        there |= {one.alone for one in self.membership.members}
        gone = [name for name, given in self._given.items() if given.unit not in there]
        for name in gone:
            del self._given[name]
        lost = [one for course in self.courses for one in course.forget_(there)]
        if lost:
            self.tell({"event": "again", "branches": lost})

    def counted(self) -> dict[str, Counted]:
        """What workers have counted since the last time, by name; raises ClusterError."""
        asked = self.membership.ready
        self._counted = {}
        for member in asked:
            member.ask(Count(self._works))
        while any(one in self.membership.members and one not in self._counted for one in asked):
            self.membership.hear_(self._took_)
        return {member.name: reply for member, reply in self._counted.items()}

    def recall_(self) -> None:
        """Nobody wants what is still being written."""
        self._given.clear()
        for member in self.membership.ready:
            member.ask(Recall())

"""Directs the workers of a cluster: what the states of graphs/machines/cluster.yaml do.

All that is true of requests is host integers here; workers tell what they commit as they go. So
whatever a worker had when it was lost goes on elsewhere from its last committed token, and coins are
keyed by position: the text is the same.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from ...states.requests.branch import Finish, Request
from ...states.requests.request_table import RequestTable, RunLimits
from ..prepare.inputs import Prompt
from ..prepare.request_settings import HandedOver
from ..run.session import Session
from .course import OUTLINE, Course, new_course
from .membership import Member, Membership, Tell
from .messages import (
    Assign,
    BranchEnded,
    Committed,
    Count,
    Counted,
    Recall,
    Regroup,
    Regrouped,
    Reply,
    WorkEnded,
)
from .placing import expected_length, placed


@dataclass(slots=True)
class RegroupFigures:
    """What went from workers to workers. bytes: that arrived; seconds: in all, and those of the
    collectives; failed: collectives that did not come to an end."""

    count: int = 0
    rows: int = 0
    bytes: int = 0
    failed: int = 0
    seconds: float = 0.0
    collective_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GivenWork:
    """Who has what of a request."""

    course: Course
    member: Member
    branches: tuple[int, ...]


@dataclass(eq=False)
class Director:
    """The driver of a cluster; see `states.phases.cluster_ops`.

    Attributes:
        table: all requests. courses: the same in their order.
        figures: of regroups. tokens: committed, by worker.
    """

    session: Session
    membership: Membership
    tell: Tell
    table: RequestTable = field(init=False)
    courses: list[Course] = field(default_factory=list)
    figures: RegroupFigures = field(default_factory=RegroupFigures)
    tokens: Counter[str] = field(default_factory=Counter)
    _given: dict[str, GivenWork] = field(default_factory=dict)
    _answers: dict[int, dict[Member, Regrouped]] = field(default_factory=dict)
    _counted: dict[Member, Counted] = field(default_factory=dict)
    _regroups: int = 0
    _works: int = 0

    def __post_init__(self) -> None:
        graph, target = self.session.program.graph, self.session.models.target
        shares = graph.skeleton is None or graph.skeleton.share == "outline"
        most = target.max_positions
        limits = RunLimits(graph.layout, graph.drafter, shares, most, target.vocab_size)
        self.table = RequestTable(limits)

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
        """Give outlines to the workers with least to do, first come first served."""
        for course in self.courses:
            if course.wants_outline and (free := self._free()):
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
            lacking = {one for one in course.at.values()} - course.holders
            if lacking and self._can_send(course):
                self._send_prefix_(course)

    def give_branches_(self) -> None:
        """Give what was placed to those it was placed with."""
        for course in self.courses:
            given = self._in_hand(course)
            for member in self.membership.ready:
                mine = [
                    one
                    for one in course.request.branches
                    if course.at.get(one.index) is member and one.index not in given
                ]
                if mine:
                    numbers = tuple(one.index for one in mine)
                    self._give_(course, member, course.branch_work(mine), numbers)

    def gather_(self) -> None:
        """Take in what was said, and who was lost."""
        self.membership.hear_(self._took_)
        self._forget_lost_()

    # -- the guards -------------------------------------------------------------------------------

    @property
    def group_changed(self) -> bool:
        return self.membership.changed

    @property
    def outlines_wanted(self) -> bool:
        return bool(self._free()) and any(one.wants_outline for one in self.courses)

    @property
    def outlines_written(self) -> bool:
        return any(one.outlined for one in self.courses)

    @property
    def branches_wanted(self) -> bool:
        return bool(self._free()) and any(one.wanted for one in self.courses)

    @property
    def all_ended(self) -> bool:
        return all(one.ended for one in self.courses)

    @property
    def requests(self) -> Sequence[Request]:
        return self.table.requests

    # -- who does what ----------------------------------------------------------------------------

    def _loads(self) -> dict[Member, float]:
        """Tokens that each worker is expected to write still."""
        loads = dict.fromkeys(self.membership.ready, 0.0)
        for given in self._given.values():
            for index in given.branches:
                one = given.course.branch_of(index)
                if one is not None and not one.ended and given.member in loads:
                    loads[given.member] += expected_length(one)
        return loads

    def _counts(self) -> Counter[Member]:
        """Branches that each worker has."""
        counts: Counter[Member] = Counter()
        for given in self._given.values():
            ones = (given.course.branch_of(index) for index in given.branches)
            counts[given.member] += sum(one is not None and not one.ended for one in ones)
        return counts

    def _free(self) -> list[Member]:
        """Workers that can take one more branch, those with least to do first."""
        loads, counts = self._loads(), self._counts()
        free = [one for one in loads if one.loaded and counts[one] < one.loaded.most]
        return sorted(free, key=lambda one: loads[one])

    def _place_(self, course: Course) -> None:
        loads, counts = self._loads(), self._counts()
        room = {one: one.loaded.most - counts[one] for one in loads if one.loaded is not None}
        chosen = placed(course.wanted, loads, room, course.holders)
        for branch, member in chosen:
            course.at[branch.index] = member
        if chosen:
            where = {branch.name: member.name for branch, member in chosen}
            self.tell({"event": "placed", "branches": where})

    def _in_hand(self, course: Course) -> set[int]:
        own = (one for one in self._given.values() if one.course is course)
        return {index for one in own for index in one.branches}

    def _give_(
        self, course: Course, member: Member, handed: HandedOver, branches: tuple[int, ...]
    ) -> None:
        self._works += 1
        name = f"{self._works}"
        self._given[name] = GivenWork(course, member, branches)
        member.ask(Assign(name, course.prompt, handed))

    # -- prefixes ---------------------------------------------------------------------------------

    def _can_send(self, course: Course) -> bool:
        group = self.membership.group
        return course.source in group and len(group) > 1 and bool(course.rows)

    def _send_prefix_(self, course: Course) -> None:
        """One collective of the whole group; where it fails, whoever lacks the prefix reads it."""
        group, began = self.membership.group, monotonic()
        self._regroups += 1
        answers = self._answers[self._regroups] = {}
        assert course.source is not None
        ids, salt = course.prefix[: course.rows[0]], course.prompt.cache_salt
        order = (self.membership.epoch, course.source.rank, ids, course.rows, salt)
        for member in group:
            member.ask(Regroup(self._regroups, *order))
        while any(one in self.membership.members and one not in answers for one in group):
            self.membership.hear_(self._took_)
        del self._answers[self._regroups]
        course.holders |= {one for one, reply in answers.items() if reply.kept}
        self._count_(course, answers, monotonic() - began)

    def _count_(self, course: Course, answers: Mapping[Member, Regrouped], seconds: float) -> None:
        figures, whys = self.figures, [one.why for one in answers.values() if one.why]
        bytes_moved = sum(one.bytes for one in answers.values())
        spent = max((one.collective for one in answers.values()), default=0.0)
        figures.count += 1
        figures.rows += sum(course.rows)
        figures.bytes += bytes_moved
        figures.failed += bool(whys)
        figures.seconds += seconds
        figures.collective_seconds += spent
        for member, reply in answers.items():
            member.epoch = -1 if reply.why else member.epoch
        about = {"event": "regroup", "request": course.request.key, "rows": list(course.rows)}
        moved = {"bytes": bytes_moved, "seconds": seconds, "collective_seconds": spent}
        self.tell({**about, **moved, **({"why": whys} if whys else {})})

    # -- what workers say -------------------------------------------------------------------------

    def _took_(self, member: Member, reply: Reply) -> None:
        if isinstance(reply, Regrouped):
            if reply.number in self._answers:
                self._answers[reply.number][member] = reply
            return
        if isinstance(reply, Counted):
            self._counted[member] = reply
            return
        given = self._given.get(getattr(reply, "work", ""))
        if given is None or given.member is not member:
            return
        match reply:
            case Committed():
                given.course.take_(reply.branch, reply.start, reply.tokens)
                self.tokens[member.name] += len(reply.tokens)
                self.tell({"event": "tokens", "request": given.course.request.key})
            case BranchEnded():
                given.course.end_(reply.branch, Finish(reply.finish), reply.note)
            case WorkEnded():
                self._ended_(reply, given)

    def _ended_(self, reply: WorkEnded, given: GivenWork) -> None:
        del self._given[reply.work]
        course, member = given.course, given.member
        if given.branches == (OUTLINE,) and reply.rows:
            course.source, course.rows = member, reply.rows
            course.holders.add(member)

    def _forget_lost_(self) -> None:
        """What lost workers had is in nobody's hands any more."""
        for member in self.membership.take_lost():
            mine = [name for name, given in self._given.items() if given.member is member]
            for name in mine:
                del self._given[name]
            lost = [one for course in self.courses for one in course.forget_(member)]
            if lost:
                self.tell({"event": "again", "branches": lost})

    def counted(self) -> dict[str, Counted]:
        """What workers have counted since the last time, by name; raises ClusterError."""
        asked, self._counted = self.membership.ready, {}
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


"""Prefixes on their way to the workers that need them: one collective for each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic

from ..workers.messages import Regroup, Regrouped
from .course import RequestCourse
from .members import NONE, ClusterMember
from .membership import Membership, Tell, Took


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


@dataclass(eq=False, slots=True)
class Regrouping:
    """Sends prefixes from those who have them to the whole group."""

    membership: Membership
    tell: Tell
    figures: RegroupFigures = field(default_factory=RegroupFigures)
    _answers: dict[int, dict[ClusterMember, Regrouped]] = field(default_factory=dict)

    def send_(self, course: RequestCourse, took: Took) -> None:
        """Bring a prefix to those who lack it, if somebody can. Where it fails, they read it.

        Args:
            took: is given what else is heard meanwhile.
        """
        lacking = set(course.at.values()) - course.holders
        while lacking and self._can_send(course):
            answers = self._collective(course, took)
            has = [one.rows for one in answers.values() if one.rows is not None]
            if not has:
                return
            course.rows = has[0]  # fewer: some have been evicted

    def _can_send(self, course: RequestCourse) -> bool:
        group = self.membership.group
        source = course.source
        there = source is not None and all(one in group for one in source.members)
        return bool(course.rows) and there and self.membership.whole and len(group) > 1

    def _collective(self, course: RequestCourse, took: Took) -> dict[ClusterMember, Regrouped]:
        """One of the whole group; what its members say of it."""
        group = self.membership.group
        began = monotonic()
        source = course.source
        assert source is not None
        number = self.figures.count = self.figures.count + 1
        answers = self._answers[number] = {}
        ids = course.prefix[: course.rows[0]]
        salt = course.prompt.cache_salt
        who = (source.tp, source.number)
        epoch = self.membership.epoch
        self.membership.tell_all(Regroup(number, epoch, *who, ids, course.rows, salt))
        while any(one in self.membership.members and one not in answers for one in group):
            self.membership.hear_(took)
        del self._answers[number]
        kept = {one for one, reply in answers.items() if reply.kept}
        units = self.membership.decoders
        course.holders |= {one for one in units if kept.issuperset(one.members)}
        self._count_(course, answers, monotonic() - began)
        return answers

    def took(self, member: ClusterMember, reply: Regrouped) -> None:
        """A member's word on one of them."""
        if reply.number in self._answers:
            self._answers[reply.number][member] = reply

    def _count_(
        self, course: RequestCourse, answers: Mapping[ClusterMember, Regrouped], seconds: float
    ) -> None:
        figures = self.figures
        whys = [one.why for one in answers.values() if one.why]
        moved = sum(one.bytes for one in answers.values())
        spent = max((one.collective for one in answers.values()), default=0.0)
        figures.rows += sum(course.rows)
        figures.bytes += moved
        figures.failed += bool(whys)
        figures.seconds += seconds
        figures.collective_seconds += spent
        for member, reply in answers.items():
            member.epoch = NONE if reply.why else member.epoch
        about = {"event": "regroup", "request": course.request.key, "rows": list(course.rows)}
        times = {"bytes": moved, "seconds": seconds, "collective_seconds": spent}
        self.tell({**about, **times, **({"why": whys} if whys else {})})

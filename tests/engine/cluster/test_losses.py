"""Workers that are lost on the way: others go on from the last committed token, same text."""

from collections.abc import Callable

import pytest
from helpers.clusters import BEES, CAMPING, Chaos, Ran, alone, on_workers, session_of
from helpers.thread_workers import ThreadLauncher, ThreadPort

from specsot.engine.cluster.driver.director import Director
from specsot.engine.cluster.driver.members import ClusterMember
from specsot.engine.errors import ClusterError
from specsot.engine.run.session import Session
from specsot.states.machine import Run

SETS = ("sampling.temperature=0.8",)


def writer(director: Director) -> ClusterMember:
    """Who writes an outline, or has written one."""
    courses = sorted(director.courses, key=lambda one: one.outlined)
    return next(one.writer.leader for one in courses if one.writer is not None)


def decoder(director: Director) -> ClusterMember:
    return next(one.leader for course in director.courses for one in course.at.values())


def outline_begun(director: Director, run: Run) -> bool:
    roots = (one.request.root for one in director.courses)
    return any(root is not None and not root.ended and root.tokens for root in roots)


def outline_asked(director: Director, run: Run) -> bool:
    return any(one.writer is not None for one in director.courses)


def branches_given(director: Director, run: Run) -> bool:
    return run.state == "parallel"


def before_regroup(director: Director, run: Run) -> bool:
    return run.state == "parse"


def mid_branch(director: Director, run: Run) -> bool:
    branches = (b for one in director.courses for b in one.request.branches)
    return any(len(b.tokens) > 4 and not b.ended for b in branches)


MOMENTS: dict[str, tuple[Callable[[Director, Run], bool], Callable[[Director], ClusterMember]]] = {
    "while an outline is asked for": (outline_asked, writer),
    "in the middle of an outline": (outline_begun, writer),
    "between outline and regroup": (before_regroup, writer),
    "as branches are given": (branches_given, decoder),
    "in the middle of a branch": (mid_branch, decoder),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_lost_worker_changes_nothing(moment: str) -> None:
    session = session_of("bim_eagle", *SETS, budget=40)
    chaos = Chaos(*MOMENTS[moment])
    ran = on_workers(session, [BEES, CAMPING], chaos=chaos)
    assert ran.digest == alone(session, [BEES, CAMPING])
    assert len(chaos.lost) == ran.director.membership.losses == 1
    assert [one["worker"] for one in ran.told("lost")] == chaos.lost


def test_what_was_committed_is_not_written_again() -> None:
    session = session_of("bim_plain", *SETS, budget=40)
    ran = on_workers(session, [BEES], chaos=Chaos(mid_branch, decoder))
    (again,) = ran.told("again")
    assert again["branches"]
    whole = sum(len(one.tokens) for one in ran.answers[0].sections)
    written = sum(ran.director.tokens.values()) - len(ran.answers[0].outline_tokens)
    assert whole == written, "every token was told once"


def test_the_only_worker_is_replaced() -> None:
    session = session_of("bim_eagle", *SETS, budget=40)
    ran = on_workers(session, [BEES], workers=1, chaos=Chaos(mid_branch, decoder))
    assert ran.digest == alone(session, [BEES])
    assert [one["worker"] for one in ran.told("worker")] == ["worker-1"]


def test_a_worker_that_is_lost_in_the_middle_of_a_regroup() -> None:
    """Whoever takes its place gets the prefix in the next one."""
    session = session_of("bim_eagle", *SETS)
    launcher = Deserting(session)
    ran = on_workers(session, [BEES], launcher=launcher, deadline=1.0)
    assert ran.digest == alone(session, [BEES])
    assert launcher.deserted and ran.director.membership.losses == 1


class Deserting(ThreadLauncher):
    """Its first worker that is asked to receive a prefix is gone at that moment."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.deserted: list[str] = []

    def start(self, name: str, part: int) -> ThreadPort:
        port = super().start(name, part)
        ask = port.ask

        def ask_or_go(order: str) -> None:
            if order.startswith('["Regroup"') and not self.deserted and name == "worker-1":
                self.deserted.append(name)
                port.kill()
            ask(order)

        port.ask = ask_or_go  # type: ignore[method-assign]
        return port


def test_workers_that_cannot_begin_end_the_run_with_their_reason() -> None:
    class Broken(ThreadLauncher):
        def start(self, name: str, part: int) -> ThreadPort:
            port = super().start(name, part)
            port.kill()
            port.lost = "no memory"
            return port

    session = session_of("bim_plain")
    with pytest.raises(ClusterError, match="3 workers in a row were lost: no memory"):
        on_workers(session, [BEES], launcher=Broken(session))


def test_nothing_of_a_lost_worker_is_heard_later() -> None:
    ran: Ran = on_workers(session_of("bim_eagle"), [BEES], chaos=Chaos(mid_branch, decoder))
    members = ran.director.membership.members
    assert len(members) == 2 and all(not one.port.lost for one in members)

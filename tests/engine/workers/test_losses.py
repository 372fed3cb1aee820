"""Workers that are lost on the way: others go on from the last committed token, same text."""

from collections.abc import Callable

import pytest
from helpers.clusters import (
    BEES,
    CAMPING,
    Chaos,
    Ran,
    ThreadHost,
    ThreadWorkers,
    alone,
    decoder,
    mid_branch,
    on_workers,
    outline_begun,
    session_of,
)

from specsot.engine.errors import ClusterError
from specsot.engine.workers.director import Director
from specsot.engine.workers.link import HostError, Pipe, WorkerLink
from specsot.engine.workers.protocol import Load, Message, Regroup
from specsot.engine.workers.worker_groups import RunWorker
from specsot.states.machine import Run

SETS = ("sampling.temperature=0.8",)


def writer(director: Director) -> RunWorker:
    courses = sorted(director.states, key=lambda one: one.outlined)
    return next(one.writer.leader for one in courses if one.writer is not None)


def outline_asked(director: Director, run: Run) -> bool:
    return any(one.writer is not None for one in director.states)


def branches_given(director: Director, run: Run) -> bool:
    return run.state == "parallel"


def before_regroup(director: Director, run: Run) -> bool:
    return run.state == "parse"


MOMENTS: dict[str, tuple[Callable[[Director, Run], bool], Callable[[Director], RunWorker]]] = {
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
    assert len(chaos.lost) == ran.director.workers.losses == 1
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


def test_a_worker_that_is_lost_in_the_middle_of_a_regroup(monkeypatch: pytest.MonkeyPatch) -> None:
    send, lost = WorkerLink.send, list[str]()

    def send_or_lose(link: WorkerLink, message: Message) -> None:
        if isinstance(message, Regroup) and not lost and link.name == "worker-1":
            lost.append(link.name)
            link.cut("was cut")
        send(link, message)

    monkeypatch.setattr(WorkerLink, "send", send_or_lose)
    session = session_of("bim_eagle", *SETS)
    ran = on_workers(session, [BEES], deadline=1.0)
    assert ran.digest == alone(session, [BEES])
    assert lost and ran.director.workers.losses == 1


def test_workers_that_cannot_begin_end_the_run_with_their_reason() -> None:
    class Broken(ThreadHost):
        async def start(self) -> Pipe:
            raise HostError("no memory")

    class BrokenWorkers(ThreadWorkers):
        def host(self, number: int, part: int) -> ThreadHost:
            return Broken(Load({}), lambda connection: None)

    session = session_of("bim_plain")
    with pytest.raises(ClusterError, match=r"3 workers in a row were lost: .*: no memory"):
        on_workers(session, [BEES], hosts=BrokenWorkers(session))


def test_nothing_of_a_lost_worker_is_heard_later() -> None:
    chaos = Chaos(mid_branch, decoder)
    ran: Ran = on_workers(session_of("bim_eagle"), [BEES], chaos=chaos)
    names = {one.name for one in ran.director.workers.workers}
    assert len(names) == 2 and chaos.lost and names.isdisjoint(chaos.lost)

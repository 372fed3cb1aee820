"""Workers that are lost on the way: others go on from the last committed token, same text."""

import socket
from collections.abc import Callable
from threading import Thread

import pytest
from helpers.clusters import (
    BEES,
    CAMPING,
    Chaos,
    ThreadHost,
    before_regroup,
    branches_given,
    checked_run,
    decoder,
    mid_branch,
    on_workers,
    outline_begun,
    session_of,
)

from specsot.engine.errors import ClusterError
from specsot.engine.events import OUTLINE
from specsot.engine.workers.director import Director
from specsot.engine.workers.link import Pipe, WorkerLink, WorkerSource
from specsot.engine.workers.process import WorkerProcess
from specsot.engine.workers.protocol import (
    Assign,
    Heartbeat,
    Load,
    Message,
    Ready,
    Regroup,
    WorkerSocket,
)
from specsot.engine.workers.worker_groups import RunWorker
from specsot.states.machine import Run
from specsot.states.request import MigratedRequest

SETS = ("sampling.temperature=0.8",)


def writer(director: Director) -> RunWorker:
    states = sorted(director.states, key=lambda one: one.request.outline_ended)
    groups = (one.assigned.get(OUTLINE, one.source) for one in states)
    return next(group.leader for group in groups if group is not None)


def outline_asked(director: Director, run: Run) -> bool:
    return any(OUTLINE in one.assigned for one in director.states)


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
    ran = checked_run(session, [BEES, CAMPING], chaos=chaos)
    assert len(chaos.lost) == ran.director.workers.losses == 1
    assert [one["worker"] for one in ran.told("lost")] == chaos.lost
    assert {one.name for one in ran.director.workers.workers}.isdisjoint(chaos.lost)


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
    ran = checked_run(session, [BEES], workers=1, chaos=Chaos(mid_branch, decoder))
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
    ran = checked_run(session, [BEES], deadline=1.0)
    assert lost and ran.director.workers.losses == 1


def test_workers_that_cannot_begin_end_the_run_with_their_reason() -> None:
    class Broken(ThreadHost):
        async def start(self) -> Pipe:
            raise ClusterError("no memory")

    source = WorkerSource(lambda number, part: Broken(Load({}), lambda connection: None))
    with pytest.raises(ClusterError, match=r"3 workers in a row were lost: .*: no memory"):
        on_workers(session_of("bim_plain"), [BEES], source=source)


def test_a_driver_that_is_gone_leaves_nothing_for_the_next() -> None:
    process = WorkerProcess(lambda job: session_of("autoregressive"))

    def drive(*orders: Load | Assign) -> tuple[WorkerSocket, Thread]:
        ours, theirs = socket.socketpair()
        thread = Thread(target=process.serve, args=(theirs,), daemon=True)
        thread.start()
        driver = WorkerSocket(ours)
        for order in orders:
            driver.send(order)
        return driver, thread

    first, thread = drive(Load({}), Assign("1", BEES, MigratedRequest()))
    replies = iter(one for one in first if not isinstance(one, Heartbeat))
    assert isinstance(next(replies), Ready)
    loop = process.loop
    first.close()
    thread.join(20)
    second, thread = drive(Load({}))
    replies = iter(one for one in second if not isinstance(one, Heartbeat))
    assert isinstance(next(replies), Ready) and process.loop is loop, "its models stay loaded"
    heard = [next(iter(second)) for _ in range(3)]
    assert all(isinstance(one, Heartbeat) for one in heard)
    second.close()
    thread.join(20)
    assert not thread.is_alive()

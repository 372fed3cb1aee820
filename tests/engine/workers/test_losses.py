"""Workers that are lost on the way: others go on from the last committed token, same text."""

import socket
from collections.abc import Callable
from threading import Thread

import pytest
from helpers import clusters

from specsot.engine.errors import ClusterError
from specsot.engine.events import OUTLINE
from specsot.engine.workers import protocol
from specsot.engine.workers.director import Director
from specsot.engine.workers.link import Pipe, WorkerLink, WorkerSource
from specsot.engine.workers.process import WorkerProcess
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
    "in the middle of an outline": (clusters.outline_begun, writer),
    "between outline and regroup": (clusters.before_regroup, writer),
    "as branches are given": (clusters.branches_given, clusters.decoder),
    "in the middle of a branch": (clusters.mid_branch, clusters.decoder),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_lost_worker_changes_nothing(moment: str) -> None:
    session = clusters.session_of("bim_eagle", *SETS)
    chaos = clusters.Chaos(*MOMENTS[moment])
    ran = clusters.checked_run(session, [clusters.BEES, clusters.CAMPING], chaos=chaos)
    assert len(chaos.lost) == ran.director.workers.losses == 1
    assert [one["worker"] for one in ran.told("lost")] == chaos.lost
    assert {one.name for one in ran.director.workers.workers}.isdisjoint(chaos.lost)


def hang(member: RunWorker) -> None:
    assert isinstance(member.host, clusters.ThreadHost)
    member.host.flows.clear()


def test_what_was_committed_is_not_written_again() -> None:
    """By those that go on for a worker that hangs."""
    session = clusters.session_of("bim_plain", *SETS, budget=24)
    chaos = clusters.Chaos(clusters.mid_branch, clusters.decoder, hang)
    ran = clusters.checked_run(session, [clusters.BEES], chaos=chaos, deadline=2.0)
    assert [one["why"] for one in ran.told("lost")] == ["has not answered for 2 s"]
    (again,) = ran.told("again")
    assert again["branches"]
    whole = sum(len(one.tokens) for one in ran.answers[0].sections)
    written = sum(ran.director.tokens.values()) - len(ran.answers[0].outline_tokens)
    assert whole == written, "every token was told once"


def test_the_only_worker_is_replaced() -> None:
    session = clusters.session_of("bim_eagle", *SETS)
    ran = clusters.checked_run(
        session,
        [clusters.BEES],
        workers=1,
        chaos=clusters.Chaos(clusters.mid_branch, clusters.decoder),
    )
    assert [one["worker"] for one in ran.told("worker")] == ["worker-1"]


def test_a_worker_that_is_lost_in_the_middle_of_a_regroup(monkeypatch: pytest.MonkeyPatch) -> None:
    send, lost = WorkerLink.send, list[str]()

    def send_or_lose(link: WorkerLink, message: protocol.Message) -> None:
        if isinstance(message, protocol.Regroup) and not lost and link.name == "worker-1":
            lost.append(link.name)
            link.cut("was cut")
        send(link, message)

    monkeypatch.setattr(WorkerLink, "send", send_or_lose)
    session = clusters.session_of("bim_eagle", *SETS)
    ran = clusters.checked_run(session, [clusters.BEES], deadline=1.0)
    assert lost and ran.director.workers.losses == 1


def test_workers_that_cannot_begin_end_the_run_with_their_reason() -> None:
    class Broken(clusters.ThreadHost):
        async def start(self) -> Pipe:
            raise ClusterError("no memory")

    source = WorkerSource(lambda number, part: Broken(protocol.Load({}), lambda connection: None))
    with pytest.raises(ClusterError, match=r"3 workers in a row were lost: .*: no memory"):
        clusters.on_workers(clusters.session_of("bim_plain"), [clusters.BEES], source=source)


def test_a_driver_that_is_gone_leaves_nothing_for_the_next() -> None:
    process = WorkerProcess(lambda job: clusters.session_of("autoregressive"))

    def drive(*orders: protocol.Load | protocol.Assign) -> tuple[protocol.WorkerSocket, Thread]:
        ours, theirs = socket.socketpair()
        thread = Thread(target=process.serve, args=(theirs,), daemon=True)
        thread.start()
        driver = protocol.WorkerSocket(ours)
        for order in orders:
            driver.send(order)
        return driver, thread

    first, thread = drive(protocol.Load({}), protocol.Assign("1", clusters.BEES, MigratedRequest()))
    replies = iter(one for one in first if not isinstance(one, protocol.Heartbeat))
    assert isinstance(next(replies), protocol.Ready)
    loop = process.loop
    first.close()
    thread.join(20)
    second, thread = drive(protocol.Load({}))
    replies = iter(one for one in second if not isinstance(one, protocol.Heartbeat))
    assert isinstance(next(replies), protocol.Ready)
    assert process.loop is loop, "its models stay loaded"
    heard = [next(iter(second)) for _ in range(3)]
    assert all(isinstance(one, protocol.Heartbeat) for one in heard)
    second.close()
    thread.join(20)
    assert not thread.is_alive()

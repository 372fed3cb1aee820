"""Workers that are lost on the way: others go on from the last committed token, same text."""

import socket
from collections.abc import Callable
from threading import Thread
from time import monotonic, sleep
from typing import Any

import pytest
from helpers import clusters
from helpers.support import outline_of

from specsot.engine.errors import ClusterError
from specsot.engine.events import OUTLINE
from specsot.engine.run.engine import Engine
from specsot.engine.workers import protocol, ray_workers
from specsot.engine.workers.director import Director
from specsot.engine.workers.link import Pipe, WorkerLink, WorkerSource
from specsot.engine.workers.process import WorkerProcess
from specsot.engine.workers.worker_groups import RunWorker
from specsot.states.machine import Run
from specsot.states.prompt_builder import PromptBuilder
from specsot.states.request import MigratedRequest, Request

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


@pytest.mark.parametrize("tp", [1, 2])
def test_after_a_failed_branch_nothing_more_of_its_request_is_taken_in(tp: int) -> None:
    """Workers end its other branches, which they may still write for a moment."""
    written = list[list[int]]()
    engines = list[Engine]()

    def fail_a_branch(director: Director) -> RunWorker:
        state = director.states[0]
        branch = next(one for one in state.request.branches if one.index in state.assigned)
        group = state.assigned[branch.index]
        id = next(id for id, pair in director._assignments.items() if pair == (state, group))
        engines.extend(hosts.loop(number).engines[tp].engine for number in range(2))
        failed = protocol.BranchEnded(id, branch.index, "failed", "it broke")
        director.workers.on_output(group.leader, failed)
        assert state.request.finished
        written.extend([*one.tokens] for one in state.request.branches)
        return group.leader

    def both_begun(director: Director, run: Run) -> bool:
        state = director.states[0]
        begun = [one for one in state.request.branches if one.tokens and not one.ended]
        return len(begun) == 2 and len({state.assigned[one.index] for one in begun}) == 2 // tp

    chaos = clusters.Chaos(both_begun, fail_a_branch, lambda worker: None)
    session = clusters.session_of(
        "bim_plain", *SETS, outline=outline_of(2), budget=80, packed=tp == 1
    )
    hosts = clusters.ThreadWorkers(session)
    prompts = [clusters.CAMPING, clusters.BEES]
    ran = clusters.on_workers(session, prompts, chaos=chaos, source=hosts.source, branches=tp)
    assert chaos.lost and not ran.director.states[0].assigned
    assert all(engine.stats().ended["cancelled"] for engine in engines), "they go on decoding"
    failed, whole = ran.answers
    assert [one.note for one in failed.sections] == ["it broke"] * len(written)
    assert [[*one.tokens] for one in failed.sections] == written
    assert {one.finish for one in whole.sections} <= {"stop", "length"}


@pytest.mark.parametrize("step", ["shared", "branch"])
def test_a_prompt_that_cannot_be_built_fails_its_own_request(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = getattr(PromptBuilder, step)

    def build_or_fail(builder: PromptBuilder, item: Any) -> Any:
        request = item if isinstance(item, Request) else item.request
        if request.key == clusters.CAMPING.key:
            raise UnicodeError("no text")
        return build(builder, item)

    monkeypatch.setattr(PromptBuilder, step, build_or_fail)
    session = clusters.session_of("bim_plain", *SETS, outline=outline_of(2))
    ran = clusters.checked_run(session, [clusters.CAMPING, clusters.BEES])
    assert {one.note for one in ran.answers[0].sections} == {"UnicodeError: no text"}


def test_an_assignment_that_a_worker_cannot_start_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one without an outline."""

    def submit(*args: object, **settings: object) -> None:
        raise ValueError("no such token")

    monkeypatch.setattr(Engine, "submit", submit)
    session = clusters.session_of("autoregressive", budget=12)
    (answer,) = clusters.on_workers(session, [clusters.CAMPING]).answers
    note = "ValueError: no such token"
    assert [(one.finish, one.note) for one in answer.sections] == [("failed", note)]


def test_a_driver_that_is_gone_at_once_leaves_a_ray_worker_free() -> None:
    with socket.create_server((protocol.LOOPBACK, 0)) as listener:
        worker = ray_workers.RayWorker(".")
        for _ in range(2):
            assert worker.connect(*listener.getsockname(), "0" * 32)
            assert worker.state() == "in use"
            listener.accept()[0].close()
            limit = monotonic() + 20
            while worker.state() != "free":
                assert monotonic() < limit, "the worker is not free"
                sleep(0.01)


def test_workers_that_cannot_begin_end_the_run_with_their_reason() -> None:
    class Broken(clusters.ThreadHost):
        async def start(self) -> Pipe:
            raise ClusterError("no memory")

    source = WorkerSource(
        lambda number, part: Broken(protocol.Load("", {}), lambda connection: None)
    )
    with pytest.raises(ClusterError, match=r"3 workers in a row were lost: .*: no memory"):
        clusters.on_workers(clusters.session_of("bim_plain"), [clusters.BEES], source=source)


def test_a_driver_that_is_gone_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    session = clusters.session_of("autoregressive")
    monkeypatch.setattr("specsot.engine.workers.process.load_job", lambda job: session)
    process = WorkerProcess()

    def drive(*orders: protocol.Load | protocol.Assign) -> tuple[protocol.WorkerSocket, Thread]:
        ours, theirs = socket.socketpair()
        thread = Thread(target=process.serve, args=(theirs,), daemon=True)
        thread.start()
        driver = protocol.WorkerSocket(ours)
        for order in orders:
            driver.send(order)
        return driver, thread

    first, thread = drive(
        protocol.Load("", {}), protocol.Assign("1", clusters.BEES, MigratedRequest())
    )
    replies = iter(one for one in first if not isinstance(one, protocol.Heartbeat))
    assert isinstance(next(replies), protocol.Ready)
    loop = process.loop
    first.close()
    thread.join(20)
    second, thread = drive(protocol.Load("", {}))
    replies = iter(one for one in second if not isinstance(one, protocol.Heartbeat))
    assert isinstance(next(replies), protocol.Ready)
    assert process.loop is loop, "its models stay loaded"
    heard = [next(iter(second)) for _ in range(3)]
    assert all(isinstance(one, protocol.Heartbeat) for one in heard)
    second.close()
    thread.join(20)
    assert not thread.is_alive()

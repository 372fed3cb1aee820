"""What a step does, from host integers alone: plans of managers without models."""

import threading
import time

import pytest
from helpers import managers
from helpers.many import Calls

from specsot.engine.record.recorder import action_of
from specsot.states.manager import BranchStateManager
from specsot.states.policies import POLICIES
from specsot.states.request import Finish
from specsot.states.scheduler import Inbox


def round_(made: BranchStateManager, *tokens: int) -> None:
    offer = managers.proposal(*([managers.chain()] * len(made.active)))
    batch = managers.tree_rows_(made, offer)
    paths: list[list[int]] = [[]] * len(made.active)
    managers.commit_(made, batch, outcome=managers.accepted(batch, offer, paths, tokens))


def test_requests_open_then_run_and_at_last_their_answers_are_wanted() -> None:
    made, one = managers.manager(), managers.request("a")
    step = managers.plan(made)
    assert (step.number, action_of(step), step.num_starts, step.waiting) == (1, "rest", 0, 0)
    made.lifecycle.submit(one)
    step = managers.plan(made)
    assert (action_of(step), step.requests, step.waiting) == ("open", (one,), 1)
    assert step.why == "no branch runs: a" and [*step.requests] == [one]
    managers.commit_(made, managers.start_(made, *step.requests), [20])
    step = managers.plan(made)
    assert (action_of(step), step.why, step.running, step.num_starts) == ("round", "1 run", 1, 0)
    round_(made, managers.STOP)
    step = managers.plan(made)
    assert (action_of(step), step.why) == ("answer", "1 ended")
    assert action_of(managers.plan(made)) == "rest", "answers are handed over once"


def test_a_run_hands_over_all_answers_at_its_end_and_an_engine_each_at_once() -> None:
    for serves, wanted in ((False, "round"), (True, "answer")):
        made, inbox = managers.manager(), Inbox(serves=serves)
        first, second = managers.running(made, managers.request("a"), managers.request("b"))
        first.end(Finish.STOP)
        made.lifecycle.release_and_prepare_()
        assert action_of(managers.plan(made, inbox)) == wanted
        second.end(Finish.STOP)
        made.lifecycle.release_and_prepare_()
        assert action_of(managers.plan(made, inbox)) == "answer"
        assert [one.key for one in made.table.finished] == ["a", "b"]


def test_a_newcomer_rides_in_a_round_of_the_others() -> None:
    made, late = managers.manager(), managers.request("b")
    managers.running(made, managers.request("a"))
    made.lifecycle.submit(late)
    step = managers.plan(made)
    assert (action_of(step), step.requests, step.why) == ("round", (late,), "1 run, b join")


def test_branches_of_an_outline_that_was_just_read_start_in_a_forward_of_their_own() -> None:
    made = managers.manager(most=6)
    one = managers.request("a", tail=[7], outline_budget=4)
    root, _ = managers.running(made, one, managers.request("b"))
    root.end(Finish.STOP)
    step = managers.plan(made)
    assert (action_of(step), step.why) == ("parse", "outlines are complete: a")
    branches = managers.fan_out_(made, one, [], [[41], [42]])
    step = managers.plan(made)
    assert action_of(step) == "fork" and step.why == "outlines were parsed: a/1, a/2"
    assert [*step.starting] == branches
    assert action_of(managers.plan(made)) == "round", "later ones ride along"


def test_who_must_wait_is_told_why() -> None:
    for made, why in (
        (managers.manager(most=1), "b: running branches: 1 of 1"),
        (managers.manager(capacity=24), "b: needs 14 slots, 12 are free"),
    ):
        managers.running(made, managers.request("a"))
        made.lifecycle.submit(managers.request("b"))
        step = managers.plan(made)
        assert (action_of(step), step.num_starts, step.blocked) == ("round", 0, why)


def test_whoever_is_stuck_is_refused_and_the_rest_goes_on() -> None:
    made = managers.manager(capacity=120)
    one = managers.request("a", prefix=[5] * 4, tail=[7], outline_budget=4)
    (branch,) = managers.fanned_out(made, one, [], [[41]])
    branch.budget = 150
    late = managers.request("b", prefix=[5] * 10, budget=40)
    made.lifecycle.submit(late)
    step = managers.plan(made)
    assert branch.finish is Finish.REFUSED and branch.note == "no room with the other requests"
    assert (action_of(step), [*step.requests]) == ("open", [late])


def test_one_that_must_be_alone_waits_for_all_others_and_nobody_joins_it() -> None:
    made = managers.manager()
    (first,) = managers.running(made, managers.request("a"))
    alone, late = managers.request("b", exclusive=True), managers.request("c")
    made.lifecycle.submit(alone)
    made.lifecycle.submit(late)
    step = managers.plan(made)
    assert (action_of(step), step.num_starts) == ("round", 0)
    assert step.blocked == "b: runs alone, others run"
    first.end(Finish.STOP)
    made.lifecycle.release_and_prepare_()
    step = managers.plan(made)
    assert [*step.requests] == [alone]
    managers.commit_(made, managers.start_(made, alone), [20])
    step = managers.plan(made)
    assert (step.num_starts, step.blocked) == (0, "c: b runs alone")


def test_a_request_whose_time_is_up_ends_wherever_it_is() -> None:
    made = managers.manager(most=1)
    now = time.monotonic()
    (branch,) = managers.running(made, managers.request("a", deadline=now + 1))
    made.lifecycle.submit(managers.request("b", deadline=now - 1))
    made.lifecycle.submit(managers.request("c", deadline=now + 1000))
    time.sleep(max(now + 1 - time.monotonic(), 0))
    step = managers.plan(made)
    assert branch.finish is Finish.TIMEOUT and branch.tokens == [20]
    assert [one.key for one in [*step.requests]] == ["c"]
    assert [one.branches[0].note for one in made.table.finished] == ["its time was up"] * 2


def test_deadlines_of_requests_that_ended_are_forgotten() -> None:
    made = managers.manager()
    for number in range(300):
        one = managers.request(str(number), deadline=time.monotonic() + 1000)
        managers.commit_(made, managers.open_requests_(made, one), [managers.STOP])
        made.table.forget_finished()
    assert len(made.table.deadlines) < 100


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_costs_the_same_however_many_wait(policy: str) -> None:
    costs = {}
    for waiting in (100, 10_000):
        made = managers.manager(most=2, policy=policy)
        managers.running(made, managers.request("a"), managers.request("b"))
        for number in range(waiting):
            made.lifecycle.submit(managers.request(str(number)))
        managers.plan(made)  # who has come is ranked once
        with Calls() as calls:
            assert managers.plan(made).waiting == waiting
        costs[waiting] = calls.count
    assert costs[100] == costs[10_000] < 120


def test_a_step_does_not_look_at_what_has_ended() -> None:
    made, costs = managers.manager(), []
    for _ in range(3):
        for number in range(50):
            managers.commit_(
                made, managers.open_requests_(made, managers.request(str(number))), [managers.STOP]
            )
        managers.plan(made)
        (branch,) = managers.running(made, managers.request("a"))
        with Calls() as calls:
            managers.plan(made)
        costs.append(calls.count)
        branch.end(Finish.STOP)
        made.lifecycle.release_and_prepare_()
    assert len(made.requests) == 153 and len(set(costs)) == 1


# -- the inbox ------------------------------------------------------------------------------------


def test_a_closed_inbox_takes_nothing_and_is_over() -> None:
    inbox, one = Inbox(stays=True), managers.request()
    assert not inbox.over and inbox.submit([one])
    inbox.close()
    assert not inbox.over and not inbox.submit([one]), "one is still to be taken in"
    assert inbox.drain() == ([one], []) and inbox.over
    inbox.end(one, Finish.CANCELLED)
    assert not inbox.over and inbox.drain() == ([], [(one, Finish.CANCELLED)])
    assert inbox.drain() == ([], [])


@pytest.mark.parametrize("what", ["submit", "end", "close"])
def test_whoever_waits_at_an_inbox_is_woken(what: str) -> None:
    inbox, one = Inbox(stays=True), managers.request()
    thread = threading.Thread(target=inbox.wait)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    {"submit": lambda: inbox.submit([one]), "end": lambda: inbox.end(one, Finish.CANCELLED),
     "close": inbox.close}[what]()  # fmt: skip
    thread.join(10)
    assert not thread.is_alive()
    inbox.wait()
    Inbox(stays=True, sleeps=False).wait()


def test_what_ends_through_the_inbox_ends_at_the_next_step() -> None:
    made, inbox = managers.manager(), Inbox(stays=True, serves=True)
    one, two = managers.request("a"), managers.request("b")
    inbox.submit([one, two])
    assert made.requests == []
    step = managers.plan(made, inbox)
    assert [*step.requests] == [one, two]
    inbox.end(one, Finish.CANCELLED)
    inbox.end(one, Finish.TIMEOUT)
    step = managers.plan(made, inbox)
    assert action_of(step) == "answer" and made.table.finished == [one]
    assert [branch.finish for branch in one.branches] == [Finish.CANCELLED]
    inbox.end(one, Finish.TIMEOUT)
    assert [*managers.plan(made, inbox).requests] == [two]

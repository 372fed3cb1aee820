"""The policies: who starts first, who may overtake, and that nobody starves."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import call
from helpers.managers import STOP, commit_, fan_out_, manager, plan, request, running, start_
from helpers.toy_graph import install

from specsot.engine.prepare.files import open_graph
from specsot.states.graph.graph import SchedulerBlock
from specsot.states.manager import BranchStateManager
from specsot.states.policies import AGEING, POLICIES, PolicyError, find_policy
from specsot.states.request import Finish, Request
from specsot.states.scheduler import StepPlan
from specsot.states.yaml.source import GraphError

SHORT, LONG = 10, 60


def start_step_(made: BranchStateManager, step: StepPlan, token: int = 20) -> list[Request]:
    begun = [*step.requests]
    if begun:
        batch = start_(made, *begun)
        commit_(made, batch, [token] * len(batch.newcomers))
    return begun


def served(made: BranchStateManager, first: Request, steps: int) -> Iterator[tuple[int, str]]:
    """(step, key) of whoever begins, one at a time, while a short request comes in every step."""
    made.lifecycle.submit(first)
    for number in range(steps):
        made.lifecycle.submit(request(str(number), budget=SHORT))
        for one in start_step_(made, plan(made), STOP):
            yield number, one.key


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_request_is_served_however_many_short_ones_come(policy: str) -> None:
    made = manager(most=1, policy=policy)
    for number in range(20):
        made.lifecycle.submit(request(f"before {number}", budget=SHORT))
    begun = {key: step for step, key in served(made, request("long", budget=LONG), 200)}
    assert "long" in begun
    if policy == "max_throughput":
        assert 20 < begun["long"] <= 20 + (LONG - SHORT) // AGEING + 1
    else:
        assert begun["long"] == 20


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_does_not_fit_beside_others_is_served_in_the_end(policy: str) -> None:
    made = manager(capacity=70, most=2, policy=policy, max_wait=12)
    (runs,) = running(made, request("first", budget=SHORT))
    long, begun, overtook = request("long", budget=LONG), 0, 0
    made.lifecycle.submit(long)
    for number in range(100):
        made.lifecycle.submit(request(str(number), budget=SHORT))
        new = start_step_(made, plan(made))
        if long in new:
            begun = number
            break
        overtook += len(new)
        runs.end(Finish.STOP)  # those who run take turns: one ends when the next has begun
        made.lifecycle.release_and_prepare_()
        if new:
            runs = new[-1].branches[0]
        elif made.active:
            runs = made.active[0]
    assert begun, "it starved"
    assert (overtook > 0) == POLICIES[policy].overtakes
    assert begun <= (LONG - SHORT + 3 if policy == "max_throughput" else 12 + 3)


def test_who_is_done_soonest_goes_first() -> None:
    made = manager(most=1, policy="max_throughput")
    for key, budget in (("c", 30), ("a", 10), ("b", 20)):
        made.lifecycle.submit(request(key, budget=budget))
    order = [one.key for _ in range(3) for one in start_step_(made, plan(made), STOP)]
    assert order == ["a", "b", "c"]


def test_branches_of_an_answer_go_before_new_requests_and_as_a_gang() -> None:
    made = manager(most=3, capacity=600, policy="sot_priority")
    one, two = (request(k, tail=[7], outline_budget=4, budget=8) for k in "ab")
    roots = running(made, one, two)
    for root in roots:
        root.end(Finish.STOP)
    many = fan_out_(made, one, [], [[41], [42], [43]])
    few = fan_out_(made, two, [], [[44], [45]])
    made.lifecycle.submit(request("new"))
    step = plan(made)
    assert [*step.starting] == [*few, many[0]], "all of the answer that is closest to its end"
    assert step.requests == ()


def test_a_policy_that_is_none_is_told_with_those_that_are() -> None:
    for policy in POLICIES:
        assert open_graph("eagle", [f"scheduler.policy={policy}"]).graph.scheduler.policy == policy
    with pytest.raises(GraphError) as error:
        open_graph("eagle", ["scheduler.policy=fastest"])
    assert "no policy 'fastest'; there are fcfs" in str(error.value)
    assert "sot_priority" in str(error.value)
    with pytest.raises(GraphError, match="unknown key 'polcy'; did you mean 'policy'"):
        open_graph("eagle", ["scheduler.polcy=fcfs"])


MODULE = """
from specsot.states.policies import Policy

def last(one):
    return (-one.arrival,)

def throws(one):
    raise ZeroDivisionError("by nobody")

good = Policy(last, overtakes=True)
bad = Policy(throws)
odd = Policy(lambda one: one.prompt / 3)
none = last
"""
NAMES = ("good", "bad", "odd", "none", "gone")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with policies."""
    (tmp_path / "own_policies.py").write_text(MODULE)
    for name in NAMES:
        install(tmp_path, "specsot.policies", f"own_policies:{name}", name)
    monkeypatch.syspath_prepend(tmp_path)


def test_it_ranks_those_who_wait(own: None) -> None:
    made = manager(most=1, policy="good")
    for key in "abc":
        made.lifecycle.submit(request(key))
    assert [one.key for one in plan(made).requests] == ["c"]


def test_nobody_starves_under_it(own: None) -> None:
    made, begun = manager(most=1, policy="good", max_wait=12), dict[str, int]()
    for key in ("old", "older"):
        made.lifecycle.submit(request(key))
    for step in range(40):
        made.lifecycle.submit(request(str(step)))
        begun |= {one.key: step for one in start_step_(made, plan(made), STOP)}
    assert (begun["old"], begun["older"]) == (12, 25)
    assert len(begun) == 40, "somebody began in every step"


def test_a_graph_names_it_and_nothing_is_imported_to_check_it(own: None) -> None:
    assert SchedulerBlock(policy="good").policy == "good"
    with pytest.raises(ValueError, match="did you mean 'good'"):
        SchedulerBlock(policy="goood")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "own_policies:none is not a Policy"),
        ("gone", "AttributeError: module 'own_policies' has no attribute 'gone'"),
    ],
)
def test_what_is_no_policy_is_told_with_its_package(name: str, said: str, own: None) -> None:
    with pytest.raises(PolicyError, match=said) as told:
        find_policy(name)
    assert f"scheduler.policy '{name}': " in str(told.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [("bad", "ZeroDivisionError: by nobody"), ("odd", "a rank is a tuple of integers, not 0.6")],
)
def test_one_that_fails_ends_the_run_with_one_error(name: str, said: str, own: None) -> None:
    made = manager(policy=name)
    made.lifecycle.submit(request("a"))
    with pytest.raises(PolicyError, match=said):
        plan(made)


@pytest.mark.parametrize(
    ("name", "whose"), [("bad", r"own_policies \(.*own_policies.py:\d+\)"), ("odd", "the policy")]
)
def test_the_command_line_says_so_in_a_line(
    name: str, whose: str, own: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "autoregressive", "hello", "--runs-dir", str(tmp_path / "runs"))
    assert call(*words, "--set", f"scheduler.policy={name}") == 1
    err = capfd.readouterr().err
    lines = [line for line in err.splitlines() if f"scheduler.policy '{name}'" in line]
    assert re.search(f"this is a fault of {whose}; see ", err)
    assert len(lines) == 1 and "Traceback" not in err

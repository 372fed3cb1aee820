"""The policies: who starts first, who may overtake, and that nobody starves."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.commands import call
from helpers.managers import (
    STOP,
    commit_,
    fan_out_,
    manager,
    request,
    running,
    start_,
)

from specsot.states.graph.graph import SchedulerBlock
from specsot.states.manager import BranchStateManager
from specsot.states.phases.schedule import plan_
from specsot.states.policies import AGEING, POLICIES, Candidate, PolicyError, find_policy
from specsot.states.request import Finish, Request
from specsot.states.scheduler import Inbox, StepPlan

SHORT, LONG = 10, 60


def plan(made: BranchStateManager) -> StepPlan:
    return plan_(made, Inbox())


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


def test_first_come_first_served_is_overtaken_by_nobody() -> None:
    made = manager(capacity=70, most=3)
    running(made, request("first", budget=SHORT))
    made.lifecycle.submit(request("long", budget=LONG))
    made.lifecycle.submit(request("short", budget=SHORT))
    step = plan(made)
    assert step.num_starts == 0 and step.blocked.startswith("long: needs")


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


def test_ranks_are_of_host_integers_alone() -> None:
    early = Candidate(1, 5, False, 0, 100, 40, 40)
    late = Candidate(2, 6, False, 0, 100, 40, 40)
    for policy in POLICIES.values():
        assert policy.rank(early) < policy.rank(late)
        assert all(isinstance(value, int) for value in policy.rank(early))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policies_of_a_graph_are_these(policy: str) -> None:
    from specsot.engine.prepare.files import open_graph

    assert open_graph("eagle", [f"scheduler.policy={policy}"]).graph.scheduler.policy == policy


def test_a_policy_that_is_none_is_told_with_those_that_are() -> None:
    from specsot.engine.prepare.files import open_graph
    from specsot.states.yaml.source import GraphError

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
NAMES = {name: f"own_policies:{name}" for name in ("good", "bad", "odd", "none")}

Install = Callable[[], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    def make() -> None:
        about = tmp_path / "own_policies-1.0.dist-info"
        about.mkdir()
        (tmp_path / "own_policies.py").write_text(MODULE)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-policies\nVersion: 1.0\n")
        points = [f"{name} = {where}" for name, where in NAMES.items()]
        points.append("gone = own_policies:gone")
        (about / "entry_points.txt").write_text("\n".join(["[specsot.policies]", *points]))
        monkeypatch.syspath_prepend(tmp_path)

    return make


def test_it_ranks_those_who_wait(install: Install) -> None:
    install()
    made = manager(most=1, policy="good")
    for key in "abc":
        made.lifecycle.submit(request(key))
    step = plan_(made, Inbox())
    assert [one.key for one in step.requests] == ["c"]


def test_nobody_starves_under_it(install: Install) -> None:
    install()
    made, begun = manager(most=1, policy="good", max_wait=12), dict[str, int]()
    for key in ("old", "older"):
        made.lifecycle.submit(request(key))
    for step in range(40):
        made.lifecycle.submit(request(str(step)))
        new = [*plan_(made, Inbox()).requests]
        batch = start_(made, *new)
        commit_(made, batch, [STOP] * len(batch.newcomers))
        begun |= {one.key: step for one in new}
    assert (begun["old"], begun["older"]) == (12, 25)
    assert len(begun) == 40, "somebody began in every step"


def test_a_graph_names_it_and_nothing_is_imported_to_check_it(install: Install) -> None:
    with pytest.raises(ValueError, match="no policy 'good'; there are fcfs, max_throughput"):
        SchedulerBlock(policy="good")
    install()
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
def test_what_is_no_policy_is_told_with_its_package(name: str, said: str, install: Install) -> None:
    install()
    with pytest.raises(PolicyError, match=said) as told:
        find_policy(name)
    assert f"scheduler.policy '{name}': " in str(told.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [("bad", "ZeroDivisionError: by nobody"), ("odd", "a rank is a tuple of integers, not 0.6")],
)
def test_one_that_fails_ends_the_run_with_one_error(name: str, said: str, install: Install) -> None:
    install()
    made = manager(policy=name)
    made.lifecycle.submit(request("a"))
    with pytest.raises(PolicyError, match=said):
        plan_(made, Inbox())
    assert find_policy("fcfs").rank(Candidate(1, 1, False, 0, 3, 4, 4)) == (1, 0)


def test_the_command_line_says_so_in_a_line(
    install: Install, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    install()
    words = ("run", "autoregressive", "hello", "--runs-dir", str(tmp_path / "runs"))
    assert call(*words, "--set", "scheduler.policy=bad") == 1
    err = capfd.readouterr().err
    lines = [line for line in err.splitlines() if "scheduler.policy 'bad'" in line]
    assert len(lines) == 1 and "Traceback" not in err

"""A policy of a user's package: found by its name, used like ours, and its faults are told."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import call
from helpers.managers import STOP, beginning, commit_, manager, request, start_

from specsot.states.graph.graph import SchedulerBlock
from specsot.states.phases.schedule import plan_
from specsot.states.policies import Candidate, PolicyError, find_policy
from specsot.states.scheduler import Inbox

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
    assert [made.table.request_of(owner).key for owner in step.requests] == ["c"]


def test_nobody_starves_under_it(install: Install) -> None:
    install()
    made, begun = manager(most=1, policy="good", max_wait=12), dict[str, int]()
    for key in ("old", "older"):
        made.lifecycle.submit(request(key))
    for step in range(40):
        made.lifecycle.submit(request(str(step)))
        new = beginning(made, plan_(made, Inbox()))
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

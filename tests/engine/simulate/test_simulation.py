"""A simulation answers everything, and its figures add up."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specsot.engine.errors import UsageError
from specsot.engine.prepare.files import open_graph
from specsot.engine.simulate.costs import StepCost, fit
from specsot.engine.simulate.world import Arrival, Simulation, Workload, arrivals, quantiles
from specsot.states.policies import POLICIES
from specsot.states.scheduler import StepPlan

WORK = Workload(prompt=(5, 40), answer=(3, 30))
PARTS = Workload(prompt=(5, 15), answer=(5, 60), parts=(3, 6), stems=3, shared=70)
TIGHT = ("layout.kv_slots=420", "scheduler.admission=optimistic", "skeleton.max_tokens=60")
TIGHT += ("layout.max_num_branches=24", "limits.max_new_tokens=60")


def graph_of(name: str, *sets: str) -> Any:
    return open_graph(name, sets=sets).graph


@pytest.mark.parametrize("policy", ["fcfs", "max_throughput", "sot_priority"])
def test_everything_is_answered_and_nothing_stays(policy: str) -> None:
    found = []
    for chunk in ("16", "1024"):
        sets = (*TIGHT, f"scheduler.max_num_batched_tokens={chunk}")
        world = Simulation(graph_of("bim_plain", *sets), StepCost(), policy, seed=3)
        served = world.run(arrivals("bursts:20:10", 90, PARTS, seed=1))
        assert served.requests == 90 and served.refused == 0
        assert len(served.time_to_first_token) == len(served.time_to_answer) == 90
        assert served.preemptions > 0 and served.hit_rate > 0.1
        assert not world.live and world.pool.needed_length == 0
        world.pool.check_integrity()
        kept = world.manager.prefixes
        assert kept is not None and world.pool.current_length == kept.idle
        found.append(served.tokens)
    whole = [one.outline + sum(one.texts) for one in arrivals("bursts:20:10", 90, PARTS, seed=1)]
    assert found == [sum(whole)] * 2, "no policy and no chunk changes what is written"


def test_policies_differ_where_requests_wait_and_differ_in_size() -> None:
    """The workloads of docs/scheduling.md, smaller: medians of the time to the first token."""

    def median(policy: str, spec: str, work: Workload, sets: tuple[str, ...]) -> float:
        world = Simulation(graph_of("bim_plain", *sets), StepCost(), policy, seed=3)
        times = world.run(arrivals(spec, 200, work, seed=1)).time_to_first_token
        return quantiles(times)["p50"]

    mixed = Workload(prompt=(5, 190), answer=(2, 50), outline=(4, 8), parts=(0, 6))
    small = ("layout.kv_slots=500", "skeleton.max_tokens=16", "limits.max_new_tokens=64")
    fcfs, sot = (median(name, "poisson:6", mixed, small) for name in ("fcfs", "sot_priority"))
    assert sot < 0.7 * fcfs
    plain = [median(name, "bursts:3:40", Workload(), ()) for name in POLICIES]
    assert plain[0] == plain[2] > 1.2 * plain[1], "sot_priority is fcfs without parts"


def test_who_begins_like_somebody_that_runs_needs_no_room_for_it() -> None:
    sets = ("layout.kv_slots=400", "layout.max_num_branches=12", "limits.max_new_tokens=10")
    world, ran = Simulation(graph_of("autoregressive", *sets), StepCost(), "fcfs"), list[int]()
    plan = world.manager.scheduler.plan_

    def plan_(*, serves: bool) -> StepPlan:
        step = plan(serves=serves)
        ran.append(step.running)
        return step

    world.manager.scheduler.plan_ = plan_  # type: ignore[method-assign]
    alike = [Arrival(0.0, 210, (10,), stem=1, shared=200) for _ in range(12)]
    assert world.run([Arrival(0.0, 201, (1,), stem=1, shared=200), *alike]).requests == 13
    assert max(ran) == 9, "200 slots of all, 21 of each with its tree's"


def test_a_clock_of_its_own() -> None:
    cost = StepCost(step=1, forward=9, row=0, branch=0)
    world = Simulation(graph_of("autoregressive"), cost, "fcfs")
    served = world.run([Arrival(0.5, 10, (4,)), Arrival(2.0, 10, (1,))])
    assert served.steps == 7, "a prompt and three rounds, a prompt, and two answers"
    assert max(served.time_to_first_token) == pytest.approx(0.010)
    assert max(served.time_to_answer) == pytest.approx(0.041)
    assert served.seconds == pytest.approx(2.011)


def test_arrivals_come_at_their_rate_and_are_the_same_again() -> None:
    for spec in ("poisson:5", "bursts:5:20"):
        made = list(arrivals(spec, 2000, WORK, 7))
        assert made == list(arrivals(spec, 2000, WORK, 7)) != list(arrivals(spec, 2000, WORK, 8))
        assert 2000 / made[-1].at == pytest.approx(5, rel=0.25)
        assert all(one.at <= two.at for one, two in pairwise(made))
    assert len({one.at for one in made}) == 100


def test_a_recorded_file(tmp_path: Path) -> None:
    path, made = tmp_path / "came.jsonl", list(arrivals("poisson:5", 20, PARTS, 7))
    path.write_text("\n".join(json.dumps(asdict(one)) for one in made))
    assert list(arrivals(str(path), 1, WORK, 0)) == made
    for line, said in (
        ("{}", "not an arrival"),
        ('{"at": 1, "prompt": 3, "texts": []}', "invalid arrival"),
        ('{"at": -1, "prompt": 3, "texts": [4]}', "invalid arrival"),
        ("[]", "not an arrival"),
        ('{"at": 0, "prompt": 3, "texts": [4], "more": 1}', "not an arrival"),
    ):
        path.write_text(f"\n{line}\n")
        with pytest.raises(UsageError, match=rf"came.jsonl:2: .*{said}"):
            list(arrivals(str(path), 1, WORK, 0))
    for spec in ("poisson:0", "poisson:x", "bursts:3", "bursts:3:0", "nothing"):
        with pytest.raises(UsageError, match="--arrivals"):
            arrivals(spec, 1, WORK, 0)


def test_costs_are_found_again_and_saved(tmp_path: Path) -> None:
    records, at = list[dict[str, Any]](), 0.0
    for number in range(60):
        rows, live, kv = 5 + number * 7 % 23, 1 + number % 5, 100 + number * 37 % 300
        records.append({"kind": "step", "t": round(at)})
        accepted = [1] * live + [-1]
        told = {"accepted": accepted, "committed": [2] * live + [1]}
        records.append({"kind": "round", "t": round(at), "rows": rows, "kv": kv, **told})
        at += 1e6 * (3 + 0.25 * rows + 0.5 * live + 0.01 * kv)
    cost = fit(records)
    found = (cost.forward, cost.row, cost.branch, cost.slot)
    assert found == pytest.approx((3, 0.25, 0.5, 0.01), rel=1e-3)
    assert cost.tokens == {"2": 60 * 3} or set(cost.tokens) == {"2"}
    assert cost.error < 1e-3 and cost.steps == 59
    cost.save(tmp_path / "costs.json")
    assert StepCost.load(tmp_path / "costs.json") == cost
    with pytest.raises(UsageError, match="a fit needs"):
        fit(records[:6])
    for wrong in ("{", "[]", '{"row": -1}', '{"tokens": {}}', '{"tokens": {"0": 1}}', '{"a": 1}'):
        (tmp_path / "costs.json").write_text(wrong)
        with pytest.raises(UsageError, match="invalid costs of steps"):
            StepCost.load(tmp_path / "costs.json")


def test_quantiles_are_durations_that_occurred() -> None:
    assert quantiles([number / 100 for number in range(1000, 0, -1)]) == {
        "p50": 5.0,
        "p95": 9.5,
        "p99": 9.9,
    }
    assert set(quantiles([]).values()) == {0.0}


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from helpers.commands import call

    words = ("simulate", "autoregressive", "--requests", "30", "--arrivals", "poisson:50")
    assert call(*words, "--policies", "fcfs,max_throughput", "--json") == 0
    found = json.loads(capfd.readouterr().out)["policies"]
    assert found.keys() == {"fcfs", "max_throughput"} and found["fcfs"]["requests"] == 30
    assert call(*words, "--policies", "sot_priority") == 0
    assert "note: sot_priority ranks plain answers as fcfs" in capfd.readouterr().err
    assert call(*words, "--policies", "sot_priority", "--parts", "0-2") == 0
    assert "note:" not in capfd.readouterr().err
    assert call(*words, "--prompt", "9-3") == 2
    assert call(*words, "--set", "layout.kind=batching") == 2
    assert "layout.kind bim" in capfd.readouterr().err

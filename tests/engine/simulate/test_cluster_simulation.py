"""A simulated cluster answers everything, and its figures add up."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from helpers.commands import call

from specsot.engine.prepare.files import open_graph
from specsot.engine.simulate.cluster import (
    WHOLE_ANSWER,
    ClusterJob,
    ClusterSetup,
    ClusterSimulation,
    SimulatedWorker,
)
from specsot.engine.simulate.costs import (
    LINKS,
    SHAPES,
    GroupCost,
    Link,
    ModelShape,
    StepCost,
)
from specsot.engine.simulate.world import Arrival, Workload, arrivals

PARTS = Workload(prompt=(5, 15), answer=(5, 60), parts=(0, 6), stems=3, shared=130)
SETS = ("layout.max_num_branches=16", "layout.kv_slots=4000", "limits.max_new_tokens=64")
SLOW = Link("slow", 0.0, 0.01, 1e6)
SHAPE = ModelShape(4, 100, 1000, 500)


def cluster(
    workers: int, tp: int, link: Link = LINKS["nvlink"], together: bool = False, **cost: Any
) -> ClusterSimulation:
    setup = ClusterSetup(workers, tp, link, SHAPE, together)
    graph = open_graph("bim_plain", sets=(*SETS, "skeleton.max_tokens=60")).graph
    return ClusterSimulation(graph, StepCost(**cost), "sot_priority", setup, seed=2)


@pytest.mark.parametrize(
    ("workers", "tp", "link", "together"),
    [
        (1, 1, "nvlink", False),
        (6, 1, "nvlink", True),
        (6, 1, "loopback", False),
        (6, 2, "100gbe", False),
        (6, 3, "loopback", False),
        (6, 6, "nvlink", False),
    ],
)
def test_everything_is_answered(workers: int, tp: int, link: str, together: bool) -> None:
    made = list(arrivals("bursts:30:8", 80, PARTS, 1))
    world = cluster(workers, tp, LINKS[link], together)
    served = world.run(made)
    assert served.requests == 80 and served.refused == 0
    assert len(served.time_to_first_token) == len(served.time_to_answer) == 80
    assert served.tokens == sum(one.outline + sum(one.texts) for one in made)
    every = [*world.workers, *world.groups]
    assert all(not one.live and one.pool.needed_length == 0 for one in every)
    for one in every:
        one.pool.check_integrity()
    assert not any([*world.loads.tokens, *world.group_loads.tokens])
    assert 0 < served.busy <= 1 + 1e-9
    outlined = [one for one in made if one.outline]
    assert served.regroups == (len(outlined) if tp > 1 else 0)
    sizes = sum(1000 * (one.prompt + one.outline) for one in outlined)
    assert served.regroup_bytes == (sizes if tp > 1 else 0)
    assert served.sent == 0 if together or tp == workers else served.sent > 0


def test_seconds_of_a_request_by_hand() -> None:
    cost = {"step": 1.0, "forward": 9.0, "row": 0.0, "branch": 0.0}
    world = cluster(2, 2, SLOW, **cost)
    served = world.run([Arrival(0.0, 10, (3, 3), outline=2)])
    talk = [8 * (2 * 0.01 + rows * 400 / 1e6) + 0.01 + 2000 / 2 / 1e6 for rows in (10, 1)]
    outline = 2 * (1 + 9 / 2) / 1e3 + sum(talk) + 1e-3  # a prompt, a round, and it is told
    regroup = 0.01 + 12 * 1000 / 2 / 1e6
    parts = 3 * 10e-3 + 1e-3  # a prompt of its own, two rounds, and it is told
    assert max(served.time_to_first_token) == pytest.approx(5.5e-3 + talk[0])
    assert served.regroup_seconds == pytest.approx(regroup)
    assert served.seconds == pytest.approx(outline + regroup + parts)
    rows = [one.served.rows for one in world.workers]
    assert rows == [12 + 2, 12 + 2], "of a prefix that is brought nobody computes a row"


def test_parts_stand_before_requests_that_came_later() -> None:
    many = [Arrival(0.0, 10, (20, 20), outline=5) for _ in range(60)]
    world = cluster(1, 1)
    ended = list[tuple[int, int]]()
    hear = world._collect

    def hear_(worker: SimulatedWorker) -> list[ClusterJob]:
        ended.extend((live.job.number, live.part) for live in worker.ended)
        return hear(worker)

    world._collect = hear_  # type: ignore[method-assign]
    world.run(many)
    assert len(ended) == 180 and ended.index((0, 1)) < ended.index((59, WHOLE_ANSWER))


def test_a_prefix_is_sent_where_it_pays() -> None:
    burst = [Arrival(0.0, 10, (40,) * 6, outline=5)]
    fast = cluster(3, 1, LINKS["nvlink"]).run(burst)
    assert fast.sent == 2, "to both of the others, and once to each"
    far = cluster(3, 1, Link("far", 0.0, 30.0, 1e6)).run(burst)
    assert far.sent == 0, "half a minute for a prefix is longer than to write it all"
    assert max(fast.time_to_answer) < max(far.time_to_answer) < 30


def test_links_as_written_down() -> None:
    link = Link("", 1.0, 0.1, 100.0)
    assert link.all_reduce(40, 4) == pytest.approx(1 + 6 * 0.1 + 1.5 * 0.4)
    assert link.all_gather(40, 4) == pytest.approx(1 + 3 * 0.1 + 0.3)
    assert link.send(40) == pytest.approx(1.5)
    assert link.all_reduce(40, 1) == link.all_gather(40, 1) == 0
    measured = LINKS["loopback"]
    assert measured.all_reduce(576 * 4, 2) == pytest.approx(1.8e-3, rel=0.1)
    assert measured.all_gather(2 * 16_000_000, 2) == pytest.approx(50e-3, rel=0.1)


def test_shapes_and_steps_of_a_group() -> None:
    assert SHAPES["llama-8b"].kv_bytes == 131_072
    cost = StepCost(step=1, forward=8, row=2, branch=4, slot=0)
    link = Link("none", 0.0, 0.0, 1e30)
    group = GroupCost(**asdict(cost), ranks=4, link=link, shape=SHAPE, tree=3)
    assert group.seconds(8, 2, 0) == pytest.approx((1 + (8 + 16) / 4 + 8) / 1e3)
    assert group.seconds(0, 0, 0) == cost.seconds(0, 0, 0)
    slow = replace(group, link=Link("", 0.0, 0.0, 1e6))
    collectives = (8 * 6 / 4 * 8 * 400 + 6 * 500 * 4 * 3 / 4) / 1e6
    assert slow.seconds(8, 2, 0) == pytest.approx(group.seconds(8, 2, 0) + collectives)


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "bim_plain", "--requests", "20", "--arrivals", "poisson:50"]
    words += ["--parts", "2-4", "--answer", "4-20", "--policies", "fcfs"]
    each = ("--cluster", "2,4", "--tp", "1,2", "--link", "nvlink,10gbe")
    assert call(*words, *each, "--json") == 0
    found = json.loads(capfd.readouterr().out)["clusters"]
    assert len(found) == 8 and found["4 workers, tp 2, 10gbe"]["regroups"] == 20
    assert len({one["tokens"] for one in found.values()}) == 1
    assert call(*words, "--cluster", "2", "--together") == 0
    assert "2 workers, together" in capfd.readouterr().out
    for wrong, said in (
        (["--cluster", "3", "--tp", "2"], "groups of 2"),
        (["--cluster", "2", "--tp", "2", "--together"], "--tp 1"),
        (["--cluster", "x"], "--cluster x"),
        (["--cluster", "2", "--tp", "0"], "--tp 0"),
        (["--cluster", "2", "--link", "nvlink,rope"], "--link nvlink,rope"),
        (["--cluster", "2", "--shape", "nothing"], "'nothing' is not one of 'llama-8b'"),
        (["--cluster", "2", "--policies", "fcfs,max_throughput"], "one policy"),
    ):
        assert call(*words, *wrong) == 2
        assert said in capfd.readouterr().err

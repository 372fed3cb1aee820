"""Workers that have a part of the weights each, and what takes the place of one that is lost."""

import pytest
from helpers.clusters import BEES, CAMPING, Chaos, Ran, alone, on_workers, session_of
from helpers.thread_hosts import ThreadWorkers
from helpers.together import last, outline_begun

from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import ClusterBlock, GroupSize, RunOptions
from specsot.engine.workers.director import Director
from specsot.engine.workers.worker_loop import job_values, load_job, parts_of

SAMPLED = "sampling.temperature=0.8"
PAIRS = ClusterBlock(skeleton=GroupSize(tp=2), branches=GroupSize(tp=2))


def in_halves(
    graph: str, *sets: str, workers: int = 2, skeleton: int = 2, chaos: Chaos | None = None
) -> Ran:
    """A run, equal to one with the whole target, on workers that have a half of it each."""
    asked = {"budget": 16, "packed": False}
    whole, prompts = session_of(graph, *sets, **asked), [CAMPING, BEES]
    halves = ThreadWorkers(*(session_of(graph, *sets, **asked, part=(i, 2)) for i in range(2)))
    sizes = {"workers": workers, "skeleton": skeleton, "branches": 2}
    ran = on_workers(whole, prompts, hosts=halves, chaos=chaos, **sizes)
    assert ran.digest == alone(whole, prompts)
    assert not ran.told("group_lost") or chaos is not None
    return ran


def parts_in_units(director: Director) -> list[list[int]]:
    units = director.workers.groups(2)
    return [[member.part for member in unit.workers] for unit in units]


@pytest.mark.parametrize(
    ("graph", "workers", "skeleton", "units"),
    [
        (("bim_eagle", SAMPLED), 2, 2, 1),
        (("bim_dflash", "layout.kind=paged"), 4, 2, 2),
        (("bim_vanilla",), 4, 4, 2),
        (("bim_plain",), 3, 2, 1),
    ],
)
def test_halves_write_what_the_whole_writes(
    graph: tuple[str, ...], workers: int, skeleton: int, units: int
) -> None:
    """A worker too many waits, in case that another one is lost."""
    ran = in_halves(*graph, workers=workers, skeleton=skeleton)
    assert parts_in_units(ran.director) == [[0, 1]] * units
    weighs = {one["weights"] for one in ran.figures["cluster"]["workers"]}
    whole = sum(
        one.nbytes for one in session_of("bim_plain", packed=False).models.target.parameters()
    )
    assert max(weighs) < 0.7 * whole, "the embedding is on both, and is the head"


def test_who_takes_the_place_of_a_lost_one_has_its_part() -> None:
    ran = in_halves("bim_eagle", SAMPLED, chaos=Chaos(outline_begun, last))
    assert ran.director.workers.losses == 1 and ran.told("again")
    assert parts_in_units(ran.director) == [[0, 1]]


def test_a_part_is_loaded_where_no_worker_computes_more() -> None:
    job = prepare(RunOptions("bim_dflash", threads=1))
    sizes = [(1, 1, 1), (2, 1, 1), (2, 2, 2), (4, 2, 2), (1, 2, 1)]
    for skeleton, branches, parts in sizes:
        groups = {"skeleton": GroupSize(tp=skeleton), "branches": GroupSize(tp=branches)}
        assert parts_of(job, ClusterBlock(**groups)) == parts
    values = [job_values(job, PAIRS, 0, part) for part in range(2)]
    assert [one["part"] for one in values] == [[0, 2], [1, 2]]
    target = load_job(values[1]).models.target
    assert target.share.kv_heads == range(1, 2) and not target.whole
    coded = prepare(RunOptions("bim_dflash", threads=1, weights="int8"))
    assert parts_of(coded, PAIRS) == 1, "a part of a row has other codes than the row"

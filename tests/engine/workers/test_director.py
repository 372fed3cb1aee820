"""Workers write what one engine writes, each by itself, as ranks of one decoder, and with a part of
the weights each: every drafter, layout, number of branches, coin."""

import pytest
from helpers.clusters import (
    BEES,
    CAMPING,
    Chaos,
    Ran,
    ThreadWorkers,
    checked_run,
    last,
    outline_begun,
    session_of,
)
from helpers.support import outline_of

from specsot.engine.prepare.inputs import Prompt, RequestSettings
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import ClusterBlock, GroupSize, RunOptions
from specsot.engine.workers.director import Director, RequestState
from specsot.engine.workers.worker_loop import load_job, load_message, parts_of
from specsot.states.request_table import RequestTable

SAMPLED = "sampling.temperature=0.8"
GRAPHS = (
    ("bim_eagle",),
    ("paged_eagle", SAMPLED),
    ("batching_eagle", SAMPLED),
    ("bim_dflash",),
    ("bim_dflash", SAMPLED, "layout.kind=paged"),
    ("bim_vanilla", SAMPLED),
    ("bim_ngram", SAMPLED, "layout.kind=paged"),
    ("bim_plain", "skeleton.share=prompt"),
    ("bim_eagle", SAMPLED, "skeleton.share=prompt"),
)
PAIRS = ClusterBlock(skeleton=GroupSize(tp=2), branches=GroupSize(tp=2))


@pytest.mark.parametrize("graph", GRAPHS, ids=" ".join)
def test_workers_write_what_one_engine_writes(graph: tuple[str, ...]) -> None:
    ran = checked_run(session_of(*graph, budget=12), [CAMPING, BEES])
    assert len(ran.director.tokens) == 2, "both workers have written"
    assert not ran.director.workers.losses


@pytest.mark.parametrize("count", [1, 2, 8])
def test_any_number_of_branches(count: int) -> None:
    kind = f"layout.kind={'paged' if count % 2 else 'bim'}"
    checked_run(session_of("bim_eagle", SAMPLED, kind, budget=8, outline=outline_of(count)))


def test_an_answer_without_an_outline_and_several_samples() -> None:
    prompts = [Prompt(str(number), f"What is {number}?") for number in range(6)]
    ran = checked_run(session_of("eagle", SAMPLED, "limits.n=2", budget=12), prompts, workers=3)
    assert len(ran.director.tokens) == 3


def test_a_pool_that_is_too_small_for_the_prefix_that_arrives() -> None:
    """What has no room is read when its turn comes; nothing waits for it."""
    small = ("layout.kv_slots=640", "layout.max_num_branches=2")
    checked_run(session_of("bim_eagle", *small, budget=12), [CAMPING, BEES])


def test_a_prompt_that_never_fits_is_refused_as_alone() -> None:
    small = ("layout.kv_slots=450", "layout.max_num_branches=2")
    session = session_of("bim_eagle", *small, budget=12)
    ran = checked_run(session, [Prompt("3", "Tell me about tea. " * 60), CAMPING])
    assert ran.answers[0].sections[0].finish == "refused"
    assert "slots" in ran.answers[0].sections[0].note


def test_parts_that_depend_on_others() -> None:
    outline = outline_of(4, deps={2: (1,), 3: (1,), 4: (2, 3)})
    ran = checked_run(session_of("bim_eagle", SAMPLED, budget=12, outline=outline))
    assert len(ran.told("placed")) == 3, "each wave once the one before has ended"


def test_branches_that_nobody_has_room_for_go_to_whoever_is_free_first() -> None:
    single = "layout.max_num_branches=1"
    ran = checked_run(session_of("bim_plain", single, budget=12, outline=outline_of(4)))
    first, *later = [one["branches"] for one in ran.told("placed")]
    assert len(set(first.values())) == len(first) == 2, "one for each"
    assert sum(map(len, later)) == 2 and all(len(one) <= 2 for one in later)


def test_parts_keep_the_arrival_of_their_request() -> None:
    session = session_of("bim_plain", outline=outline_of(2))
    driver: RequestTable = session.board()["branches"].table
    RequestState(session, driver, CAMPING)
    course = RequestState(session, driver, CAMPING)
    course.parse_()
    worker: RequestTable = session.board()["branches"].table
    for handed in (course.part(course.request.branches), course.part([])):
        part = session.request(CAMPING, RequestSettings(handed=handed))
        worker.add(part)
        assert part.arrival == course.request.arrival == 1, "though it came first here"


# -- workers that compute together ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "workers", "skeleton", "branches"),
    [
        (("bim_eagle", SAMPLED), 2, 2, 1),
        (("bim_dflash", "layout.kind=paged"), 2, 2, 2),
        (("bim_vanilla", SAMPLED), 2, 1, 2),
    ],
)
def test_ranks_write_what_one_engine_writes(
    graph: tuple[str, ...], workers: int, skeleton: int, branches: int
) -> None:
    session = session_of(*graph, budget=10, packed=False)
    ran = checked_run(session, workers=workers, skeleton=skeleton, branches=branches)
    assert not ran.director.workers.losses and not ran.told("group_lost")
    placed = {name for one in ran.told("placed") for name in one["branches"].values()}
    assert {name.count("+") for name in placed} == {branches - 1}
    assert len(placed) == workers // branches, "every unit has decoded branches"


def test_a_lost_rank_changes_nothing() -> None:
    session = session_of("bim_eagle", SAMPLED, budget=10, packed=False)
    ran = checked_run(session, [BEES], skeleton=2, chaos=Chaos(outline_begun, last))
    assert ran.director.workers.losses == 1 and ran.told("again")


# -- workers with a part of the weights -----------------------------------------------------------


def in_halves(
    graph: str, *sets: str, workers: int = 2, skeleton: int = 2, chaos: Chaos | None = None
) -> Ran:
    asked = {"budget": 10, "packed": False}
    halves = [session_of(graph, *sets, **asked, part=(i, 2)) for i in range(2)]
    source = ThreadWorkers(*halves).source
    sizes = {"workers": workers, "skeleton": skeleton, "branches": 2}
    whole = session_of(graph, *sets, **asked)
    ran = checked_run(whole, [BEES], source=source, chaos=chaos, **sizes)
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
    ran = in_halves(*graph, workers=workers, skeleton=skeleton)
    assert parts_in_units(ran.director) == [[0, 1]] * units
    weighs = {one["weights"] for one in ran.figures["cluster"]["workers"]}
    target = session_of("bim_plain", packed=False).models.target
    whole = sum(one.nbytes for one in target.parameters())
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
    values = [load_message(job, PAIRS, 0, part) for part in range(2)]
    assert [one.part for one in values] == [(0, 2), (1, 2)]
    target = load_job(values[1]).models.target
    assert target.share.kv_heads == range(1, 2) and not target.whole
    coded = prepare(RunOptions("bim_dflash", threads=1, weights="int8"))
    assert parts_of(coded, PAIRS) == 1, "a part of a row has other codes than the row"

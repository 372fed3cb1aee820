"""Workers that compute together: the outline by ranks, then its branches by each or by some."""

import pytest
from helpers.clusters import BEES, CAMPING, Chaos, alone, on_workers, session_of
from helpers.together import last, outline_begun

from specsot.engine.run.session import Session
from specsot.states.migration import CAUSE

SAMPLED = "sampling.temperature=0.8"
TARGET, EAGLE = 8192, 1024  # layers x 2 x kv heads x head_dim x 4 bytes of the embedded models


def together(graph: str, *sets: str, budget: int = 10) -> Session:
    return session_of(graph, *sets, budget=budget, packed=False)


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
    session = together(*graph)
    sizes = {"skeleton": skeleton, "branches": branches}
    ran = on_workers(session, [CAMPING], workers=workers, **sizes)
    assert ran.digest == alone(session, [CAMPING])
    assert not ran.director.workers.losses and not ran.told("group_lost")
    placed = {name for one in ran.told("placed") for name in one["branches"].values()}
    assert {name.count("+") for name in placed} == {branches - 1}
    assert len(placed) == workers // branches, "every unit has decoded branches"


def test_the_prefix_moves_once_and_weighs_what_the_formula_says() -> None:
    """From two ranks with half of the heads each, to two workers with all of them."""
    ran = on_workers(together("bim_eagle"), [BEES], workers=2, skeleton=2)
    (told,) = ran.told("regroup")
    rows, drafted = told["rows"]
    assert rows >= 90 and told["bytes"] == 2 * (rows * TARGET + drafted * EAGLE)
    moved = [pool["moved_bytes"].get(CAUSE, 0) for pool in ran.figures["kv"].values() if pool]
    assert sum(moved) == told["bytes"], "the pools' ledgers say the same"
    reused = [one["prefix_cache"]["reused"] for one in ran.recorder.memory]
    assert sorted(reused)[-2] >= rows - 1, "and nobody computes them again"


def test_a_lost_rank_changes_nothing() -> None:
    """The others notice, and all go on with another one from the last committed tokens."""
    session = together("bim_eagle", SAMPLED, budget=20)
    sizes = {"workers": 2, "skeleton": 2}
    ran = on_workers(session, [BEES], **sizes, chaos=Chaos(outline_begun, last))
    assert ran.digest == alone(session, [BEES])
    assert ran.director.workers.losses == 1 and ran.told("again")

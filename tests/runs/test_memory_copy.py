"""What a fork moves: in a shared pool nothing, under ``batching`` the shared slots for each row.

Shown twice without the ledger: by watching every op that reads a pool, and by comparing what the
pools hold before and after.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pools import GATHER, PoolWatch, branching, pools_of, watched
from helpers.support import Graphs, Make, PlanBook, check_rows, drive, requests_of, start

from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.ops.kv.pool import KVCache
from specsot.states.request import Request, Stage

SHARED = ("bim_plain", "bim_eagle", "paged_plain", "paged_eagle")
BATCHING = ("batching_plain", "batching_eagle")
SHARES = pytest.mark.parametrize("share", ["outline", "prompt"])


@pytest.fixture
def session(tiny: Make, graphs: Graphs) -> Callable[..., Session]:
    """session(graph, share, parts): the model writes the outline; the last branch needs the first.

    So the drafter too holds shared rows when the branches start. Nothing is kept of what has ended.
    """

    def make(graph: str, share: str, parts: int = 4, *sets: str) -> Session:
        book = PlanBook(130, share, ())
        lines = [f"{i}|50|-|{1 if i == parts > 1 else '-'}|Part {i}" for i in range(1, parts + 1)]
        book.text = "\n".join(["PLAN", *lines, "END"])
        sets = (*sets, "scheduler.prefix_cache=false")
        return graphs.session(graph, tiny("llama").models, book, budget=14, sets=sets)

    return make


def to_fork(made: Session) -> tuple[EngineCore, list[torch.Tensor], list[np.ndarray]]:
    """A run right before its branches start, what its pools hold, and the slots in use."""
    run = drive(start(made, ["hello"]), until=lambda run: run.state == "parse")
    pools = pools_of(run)
    return run, [p.data.clone() for p in pools], [np.flatnonzero(p.owner >= 0) for p in pools]


def fork(run: EngineCore) -> PoolWatch:
    return watched(run, until=lambda run: run.state == "parallel_prefill")


def prompt_rows(request: Request) -> int:
    return sum(len(b.prompt) for b in request.branches if b.stage is Stage.RUNNING)


@pytest.mark.parametrize("graph", SHARED)
@SHARES
def test_a_fork_in_a_shared_pool_moves_no_byte(graph: str, share: str, session: Any) -> None:
    """From one prefix to three branches: only the rows of their prompts are written."""
    run, before, used = to_fork(session(graph, share))
    pool, owner = run.manager.kv, run.manager.kv.owner.copy()
    watch = fork(run)
    assert not watch.copied and not any(p.ledger.bytes for p in pools_of(run))
    for one, data, slots in zip(pools_of(run), before, used, strict=True):
        assert torch.equal(one.data[:, :, :, slots], data[:, :, :, slots]), "shared rows stay"
    assert (pool.owner[used[0]] == owner[used[0]]).all()
    (request,) = requests_of(run)
    assert sum(b.stage is Stage.RUNNING for b in request.branches) == 3, "the fourth waits"
    hoist = request.prefix_length - len(used[0])
    assert pool.current_length - len(used[0]) == hoist + prompt_rows(request)
    layers = pool.data.shape[0]
    assert watch.written == {"aten.index_copy_.default": 2 * layers}, "one write per layer, K and V"


@pytest.mark.parametrize("graph", BATCHING)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@SHARES
def test_a_batching_fork_copies_the_shared_slots_into_every_row_but_the_first(
    graph: str, share: str, parts: int, session: Any
) -> None:
    run, before, used = to_fork(session(graph, share, parts=parts))
    watch = fork(run)
    (request,) = requests_of(run)
    running = [b for b in request.branches if b.stage is Stage.RUNNING]
    rows = [row for b in running for row in run.manager.layout.rows_of(b.owner)]
    assert len(set(rows)) == len(rows) == max(parts - 1, 1)
    for i, (pool, data, shared) in enumerate(zip(pools_of(run), before, used, strict=True)):
        expected = (len(rows) - 1) * len(shared) * pool.slot_bytes
        assert expected > 0 or len(rows) == 1
        assert watch.by_pool[i] == expected == pool.ledger.bytes["fork"]
        assert pool.ledger.moves["fork"] == len(rows) - 1
        assert pool.ledger.bytes.total() == expected
        compare_copies(pool, data, shared, rows, request)
    assert set(watch.copied) <= {GATHER}


def compare_copies(
    pool: KVCache, before: torch.Tensor, shared: np.ndarray, rows: list[int], request: Request
) -> None:
    """Every row holds the shared slots bit by bit; nothing else but new prompt rows has changed."""
    assert torch.equal(pool.data[:, :, :, shared], before[:, :, :, shared]), "the first row stays"
    by_position = shared[np.argsort(pool.position[shared])]
    for row in rows:
        own = pool.slots_of(request.prefix_owner, row)[: len(shared)]
        assert (own // pool.capacity == row).all()
        assert pool.position[own].tolist() == pool.position[by_position].tolist()
        assert torch.equal(pool.data[:, :, :, own], before[:, :, :, by_position]), row
    changed = (pool.data[:, :, :, : pool.slots] != before[:, :, :, : pool.slots]).any(4)
    touched = np.flatnonzero(changed.flatten(0, 2).any(0).numpy())
    assert (pool.owner[touched] >= 0).all(), "no slot was written that nobody has"
    grown = pool.current_length - len(shared) * len(rows)
    assert len(touched) == grown + len(shared) * (len(rows) - 1)


@pytest.mark.parametrize("graph", BATCHING)
@SHARES
def test_a_row_that_is_used_again_by_its_request_copies_nothing(
    graph: str, share: str, session: Any
) -> None:
    """Six branches, two rows: one copy is made, at the fork, and none when others follow."""
    made = session(graph, share, 6, "layout.max_num_branches=2")
    run, before, used = to_fork(made)
    address = [p.data.data_ptr() for p in pools_of(run)]
    first = fork(run)
    moved = [len(s) * p.slot_bytes for p, s in zip(pools_of(run), used, strict=True)]
    assert [first.by_pool[i] for i, _ in enumerate(before)] == moved
    rest = watched(run)
    assert not rest.copied, "whoever came later found the prefix in the row"
    assert [p.ledger.bytes for p in pools_of(run)] == [{"fork": count} for count in moved]
    assert [p.data.data_ptr() for p in pools_of(run)] == address
    assert all(len(b.tokens) == 14 for b in requests_of(run)[0].branches)


@pytest.mark.parametrize("graph", BATCHING)
def test_copies_are_given_back_when_nobody_waits_for_them(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """Branches end at different times; the rows of those that ended are free while others run."""
    made = branching(tiny, graphs)(graph, parts=6, budget=40, stop_ids=(2,))
    run = start(made, ["hello", "a second question"])
    layout, fewer = run.manager.layout, 0
    while not run.finished:
        run.advance()
        check_rows(run)
        if run.state in ("verify", "continuous_decode"):
            for request in requests_of(run):
                if request.stage is Stage.RUNNING:
                    fewer += check_copies(request, layout)
    assert fewer > 5, "rows were meant to be given back while others run"
    assert all(p.needed_length == 0 for p in pools_of(run))


def check_copies(request: Request, layout: Any) -> bool:
    """Whether fewer rows hold the prefix than the request has had branches."""
    stages = [b.stage for b in request.branches]
    running = [b for b in request.branches if b.stage is Stage.RUNNING]
    rows = {row for b in running for row in layout.rows_of(b.owner)}
    copies = set(layout.rows_of(request.prefix_owner))
    assert rows <= copies and len(rows) == len(running)
    if Stage.WAITING not in stages and running:
        assert copies == rows, "only rows of running branches hold the prefix"
    return len(copies) < len(request.branches) - 1

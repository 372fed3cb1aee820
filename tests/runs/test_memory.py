"""Memory: what a fork moves, and that nothing else is copied or reallocated.

In a shared pool nothing moves; under ``batching`` the shared slots do, for each row. Where a row
lies never matters. Shown without the ledger too: by watching every op that reads a pool, and by
comparing what the pools hold before and after."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import support
from helpers.pools import GATHER, PoolWatch, branching, permute_, pools_of, watched
from helpers.support import GRAPHS

from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.ops.attention import backends
from specsot.ops.kv.pool import KVCache
from specsot.states.request import Request, Stage

QUESTIONS = ("hello", "a second question")


@pytest.fixture
def session(tiny: support.Make) -> Callable[..., Session]:
    return branching(tiny)


@pytest.mark.parametrize(("graph", "share"), support.taking_turns(GRAPHS, ("prompt", "outline")))
def test_no_op_of_a_whole_run_copies_rows_out_of_a_pool(
    graph: str, share: str, session: Any
) -> None:
    run = support.start(session(graph, share, sets=("layout.max_num_branches=3",)), QUESTIONS)
    watch = watched(run)
    moved = [pool.ledger.bytes.total() for pool in pools_of(run)]
    assert [watch.by_pool[i] for i, _ in enumerate(moved)] == moved, "the ledger agrees"
    assert set(watch.copied) <= {GATHER}, watch.copied
    for pool in pools_of(run):
        assert set(pool.ledger.bytes) == ({"fork", "keep"} if "batching" in graph else set())
    assert set(watch.written) == {"aten.index_copy_.default"}, watch.written
    assert watch.attended > 8 * 10, "the watch sees the pools being read"


@pytest.mark.parametrize("graph", ["bim_eagle", "batching_eagle"])
def test_rows_that_lie_scattered_are_read_where_they_are_and_not_moved(
    graph: str, session: Any
) -> None:
    made = session(graph, budget=24)
    plain = support.drive(support.start(made, QUESTIONS))
    run, where = support.start(made, QUESTIONS), dict[tuple[int, int, int], int]()

    def scatter(run: EngineCore) -> bool:
        if run.state == "verify" and not where:
            for pool in pools_of(run):
                permute_(pool, 3)
        if where or run.state == "verify":
            check_places(run, where)
        return False

    watch = watched(run, until=scatter)
    assert support.tokens_of(run) == support.tokens_of(plain)
    moved = sum(pool.ledger.bytes.total() for pool in pools_of(run))
    permuted = watch.copied.pop("aten.index.Tensor")
    assert set(watch.copied) == {GATHER} and permuted > 0
    gathered = watch.copied[GATHER] - moved
    assert gathered > 0 if graph == "bim_eagle" else gathered == 0, "rows of a pool are runs"
    assert all(set(p.ledger.bytes) <= {"fork", "keep"} for p in pools_of(run))


def check_places(run: EngineCore, where: dict[tuple[int, int, int], int]) -> None:
    """What is committed lies where it lay before: pool, owner and position -> slot; of a prefix
    with copies, where the first one lies."""
    for number, pool in enumerate(pools_of(run)):
        for slot in pool.committed.nonzero()[0].tolist():
            key = number, int(pool.owner[slot]), int(pool.position[slot])
            copied = pool.rows > 1 and int(pool.home[slot]) == int(pool.owner[slot])
            assert where.setdefault(key, slot) == slot or copied


def test_the_watch_notices_a_copy(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    views = backends.slots_of

    def copies(*where: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = views(*where)
        return keys.clone(), values.contiguous()

    monkeypatch.setattr(backends, "slots_of", copies)
    assert sum(watched(support.start(session("bim_eagle"), QUESTIONS)).copied.values())


@pytest.mark.parametrize(("graph", "share"), support.taking_turns(GRAPHS, ("outline", "prompt")))
def test_the_order_of_slots_never_matters(graph: str, share: str, session: Any) -> None:
    made = session(graph, share, sets=("layout.max_num_branches=3",))
    plain = support.drive(support.start(made, QUESTIONS))
    for every in (1, 7):
        run = support.start(made, QUESTIONS)
        while not run.finished:
            run.advance()
            support.check_rows(run)
            if run.steps % every == every - 1:
                for seed, pool in enumerate(pools_of(run)):
                    permute_(pool, run.steps * 2 + seed)
        assert support.tokens_of(run) == support.tokens_of(plain), f"shuffled every {every} steps"


BATCHING = ("batching_plain", "batching_eagle")
SHARES = pytest.mark.parametrize("share", ["outline", "prompt"])


@pytest.fixture
def written(made: support.Tiny) -> Callable[..., Session]:
    """written(graph, share, parts): the model writes the outline; the last branch needs the first.

    So the drafter too holds shared rows when the branches start. Nothing is kept of what has ended.
    """

    def make(graph: str, share: str, parts: int = 4, *sets: str) -> Session:
        book = support.PlanBook(130, share, ())
        lines = [f"{i}|50|-|{1 if i == parts > 1 else '-'}|Part {i}" for i in range(1, parts + 1)]
        book.text = "\n".join(["PLAN", *lines, "END"])
        sets = (*sets, "scheduler.prefix_cache=false")
        return support.graphs.session(graph, made.models, book, budget=14, sets=sets)

    return make


def to_fork(made: Session) -> tuple[EngineCore, list[torch.Tensor], list[np.ndarray]]:
    run = support.drive(support.start(made, ["hello"]), until=lambda run: run.state == "parse")
    pools = pools_of(run)
    return run, [p.data.clone() for p in pools], [np.flatnonzero(p.owner >= 0) for p in pools]


def fork(run: EngineCore) -> PoolWatch:
    return watched(run, until=lambda run: run.state == "parallel_prefill")


@pytest.mark.parametrize("graph", BATCHING)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@SHARES
def test_a_batching_fork_copies_the_shared_slots_into_every_row_but_the_first(
    graph: str, share: str, parts: int, written: Any
) -> None:
    run, before, used = to_fork(written(graph, share, parts=parts))
    watch = fork(run)
    (request,) = support.requests_of(run)
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
    graph: str, share: str, written: Any
) -> None:
    made = written(graph, share, 6, "layout.max_num_branches=2")
    run, before, used = to_fork(made)
    address = [p.data.data_ptr() for p in pools_of(run)]
    first = fork(run)
    moved = [len(s) * p.slot_bytes for p, s in zip(pools_of(run), used, strict=True)]
    assert [first.by_pool[i] for i, _ in enumerate(before)] == moved
    rest = watched(run)
    assert not rest.copied, "whoever came later found the prefix in the row"
    assert [p.ledger.bytes for p in pools_of(run)] == [{"fork": count} for count in moved]
    assert [p.data.data_ptr() for p in pools_of(run)] == address
    assert all(len(b.tokens) == 14 for b in support.requests_of(run)[0].branches)


@pytest.mark.parametrize("graph", BATCHING)
def test_copies_are_given_back_when_nobody_waits_for_them(graph: str, tiny: support.Make) -> None:
    made = branching(tiny)(graph, parts=6, budget=40, stop_ids=(2,))
    run = support.start(made, ["hello", "a second question"])
    layout, fewer = run.manager.layout, 0
    while not run.finished:
        run.advance()
        support.check_rows(run)
        if run.state in ("verify", "continuous_decode"):
            for request in support.requests_of(run):
                if request.stage is Stage.RUNNING:
                    fewer += check_copies(request, layout)
    assert fewer > 5, "rows were meant to be given back while others run"
    assert all(p.needed_length == 0 for p in pools_of(run))


def check_copies(request: Request, layout: Any) -> bool:
    stages = [b.stage for b in request.branches]
    running = [b for b in request.branches if b.stage is Stage.RUNNING]
    rows = {row for b in running for row in layout.rows_of(b.owner)}
    copies = set(layout.rows_of(request.prefix_owner))
    assert rows <= copies and len(rows) == len(running)
    if Stage.WAITING not in stages and running:
        assert copies == rows, "only rows of running branches hold the prefix"
    return len(copies) < len(request.branches) - 1

"""Memory: nothing is copied but prefixes under batching, nothing is reallocated, and where a row
lies never matters."""

from collections.abc import Callable
from dataclasses import replace
from operator import le
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pools import GATHER, branching, permute_, pools_of, watched
from helpers.support import (
    FULL,
    GRAPHS,
    Graphs,
    Make,
    PlanBook,
    check_rows,
    drive,
    requests_of,
    start,
    taking_turns,
    tokens_of,
)

from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.ops.attention import backends
from specsot.ops.attention.backends import MAX_WASTE, MAX_WASTED_ENTRIES
from specsot.ops.kv.pool import SPREAD
from specsot.states.request import Stage

QUESTIONS = ("hello", "a second question")


@pytest.fixture
def session(tiny: Make, graphs: Graphs) -> Callable[..., Session]:
    """A session with four branches of which one waits for another."""
    return branching(tiny, graphs)


@pytest.mark.parametrize(("graph", "share"), taking_turns(GRAPHS, ("prompt", "outline")))
def test_no_op_of_a_whole_run_copies_rows_out_of_a_pool(
    graph: str, share: str, session: Any
) -> None:
    """Only a fork under batching does, and what stays there; the ledger names every byte."""
    run = start(session(graph, share, sets=("layout.max_num_branches=3",)), QUESTIONS)
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
    """A request whose slots lie far apart is gathered for attention, layer by layer; its rows stay,
    and so does all that the ledger names."""
    made = session(graph, budget=40)
    plain = drive(start(made, QUESTIONS))
    run, where = start(made, QUESTIONS), dict[tuple[int, int, int], int]()

    def scatter(run: EngineCore) -> bool:
        if run.state == "verify" and not where:
            for pool in pools_of(run):
                permute_(pool, 3)
        if where or run.state == "verify":
            check_places(run, where)
        return False

    watch = watched(run, until=scatter)
    assert tokens_of(run) == tokens_of(plain)
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


class Reads:
    """A target that counts what its attention reads: mask entries, and those of own rows alone."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.entries, self.bounds = inner, list[int](), list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(
        self, tokens: Any, positions: Any, slots: Any, told: Any, kv: Any, *more: Any
    ) -> Any:
        self.entries.append(sum(group.mask_GqK.numel() for group in told.groups))
        roots, rows = np.unique(kv.home[slots.flatten().numpy()], return_counts=True)
        own = [2 * int((kv.home == root).sum()) + SPREAD for root in roots]
        self.bounds.append(MAX_WASTE * float(rows @ own) + MAX_WASTED_ENTRIES * len(told.groups))
        return self.inner.forward(tokens, positions, slots, told, kv, *more)


@pytest.mark.parametrize("graph", ["autoregressive", "eagle"])
def test_what_attention_reads_is_little_more_than_each_requests_own_rows(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """However many run beside it; a mask over the whole pool costs everybody everybody's rows."""
    made, found = tiny("llama"), dict[str, tuple[int, Any]]()
    for backend in ("grouped", "dense"):
        reads = Reads(made.models.target)
        models = replace(made.models, target=reads)
        sets = (f"attention={backend}", "layout.max_num_branches=8")
        opened = graphs.session(graph, models, made.book(stop_ids=()), budget=40, sets=sets)
        run = drive(start(opened, [*"abcdefghijkl"]))
        found[backend] = sum(reads.entries), tokens_of(run)
        if backend == "grouped":
            assert all(map(le, reads.entries, reads.bounds))
    assert found["dense"][0] > 4 * found["grouped"][0]
    assert found["dense"][1] == found["grouped"][1]


def test_the_watch_notices_a_copy(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: a cache that hands out copies is caught."""
    views = backends.slots_of

    def copies(*where: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = views(*where)
        return keys.clone(), values.contiguous()

    monkeypatch.setattr(backends, "slots_of", copies)
    assert sum(watched(start(session("bim_eagle"), QUESTIONS)).copied.values())


@pytest.mark.parametrize("graph", GRAPHS)
def test_pools_keep_their_address_and_their_size_over_a_run(graph: str, session: Any) -> None:
    run = start(session(graph), QUESTIONS)
    before, places = _places(run), set()
    drive(run, until=lambda run: bool(places.add(_places(run))))
    assert places == {before}
    assert run.manager.kv is run.manager.kv


def _places(run: EngineCore) -> tuple[Any, ...]:
    return tuple((p.data.data_ptr(), p.data.untyped_storage().nbytes()) for p in pools_of(run))


@pytest.mark.parametrize(("graph", "share"), taking_turns(GRAPHS, ("outline", "prompt")))
def test_the_order_of_slots_never_matters(graph: str, share: str, session: Any) -> None:
    """Both pools are shuffled, every row by its own map, in the middle of a run and again later."""
    made = session(graph, share, sets=("layout.max_num_branches=3",))
    plain = drive(start(made, QUESTIONS))
    for every in (1, 7):
        run = start(made, QUESTIONS)
        while not run.finished:
            run.advance()
            check_rows(run)
            if run.steps % every == every - 1:
                for seed, pool in enumerate(pools_of(run)):
                    permute_(pool, run.steps * 2 + seed)
        assert tokens_of(run) == tokens_of(plain), f"shuffled every {every} steps"


@pytest.mark.parametrize("graph", FULL)
def test_finished_branches_give_their_rows_back(graph: str, session: Any, tiny: Make) -> None:
    """Branches end at different times; after each round only the living hold rows."""
    sets = ("scheduler.prefix_cache=false",)
    run = start(session(graph, budget=40, stop_ids=(2,), sets=sets), QUESTIONS)
    lengths, ended = [], 0
    while not run.finished:
        before = {b.owner for b in run.branches}
        run.advance()
        check_rows(run)
        alive = {b.owner for b in run.branches}
        if gone := before - alive:
            ended += len(gone)
            for pool in pools_of(run):
                kept = {r.prefix_owner for r in requests_of(run)} | {
                    r.root.owner for r in requests_of(run) if r.stage is Stage.OUTLINE and r.root
                }
                assert not (gone - kept) & set(pool.owner.tolist())
        lengths.append(run.manager.kv.current_length)
    assert ended >= 5
    assert lengths[-1] == 0 and max(lengths) > 60
    assert all(p.needed_length == 0 for p in pools_of(run))


@pytest.mark.parametrize("graph", ["bim_eagle", "batching_eagle"])
def test_bytes_held_are_slots_in_use_times_bytes_per_slot(graph: str, session: Any) -> None:
    run = drive(start(session(graph), QUESTIONS), until=lambda run: run.steps == 12)
    for pool in pools_of(run):
        layers, _, heads, slots, dim = pool.data.shape
        assert pool.slot_bytes == layers * 2 * heads * dim * 4
        assert slots == pool.rows * pool.capacity + 1, "one scratch slot"
        assert pool.rows == (8 if graph == "batching_eagle" else 1)
        assert pool.current_length * pool.slot_bytes <= pool.data.untyped_storage().nbytes()


@pytest.mark.parametrize("graph", ["bim_eagle", "batching_eagle"])
def test_a_retired_outline_leaves_no_rows_when_branches_share_the_prompt(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """share: prompt gives the outline's rows back; share: outline makes them the prefix."""
    made = tiny("llama")
    for share in ("prompt", "outline"):
        book = PlanBook(130, share, ())
        book.text = "PLAN\n1|50|-|-|One\n2|50|-|-|Two\nEND"
        run = start(graphs.session(graph, made.models, book), ["hello"])
        drive(run, until=lambda run: run.state == "parse")
        (request,) = requests_of(run)
        pool, prefix = run.manager.kv, len(request.prefix)
        rows = len(request.tail) + request.root.num_cached_tokens
        expected = prefix if share == "prompt" else prefix + rows
        assert len(pool.slots_of(request.prefix_owner)) == expected == pool.current_length
        assert pool.slots_of(request.root.owner).size == 0

"""Memory: nothing is copied, nothing is reallocated, and where a row lies never matters."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    FULL,
    GRAPHS,
    Graphs,
    PlanBook,
    Tiny,
    check_rows,
    drive,
    outline_of,
    requests_of,
    start,
    tokens_of,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specsot.engine.session import Session
from specsot.ops.kv import KVCache
from specsot.states.branches import Stage
from specsot.states.machine import Run

Make = Callable[..., Tiny]
QUESTIONS = ("hello", "a second question")
# Reads of a pool whose results are no copies of its rows: attention, and its matrix products.
ATTENTION = ("aten._scaled_dot_product", "aten.bmm", "aten.mm", "aten.baddbmm")


@pytest.fixture
def session(tiny: Make, graphs: Graphs) -> Callable[..., Session]:
    """A session with four branches of which one waits for another."""

    def make(graph: str, share: str = "outline", budget: int = 14, **more: Any) -> Session:
        made = tiny("llama")
        outline = outline_of(4, {4: (1,)})
        book = made.book(share, more.pop("stop_ids", ()))
        return graphs.session(graph, made.models, book, outline=outline, budget=budget, **more)

    return make


def pools_of(run: Run) -> list[KVCache]:
    return [run.board[key] for key in ("kv", "kv_draft") if run.board[key] is not None]


class PoolWatch(TorchDispatchMode):
    """Every op that reads a pool and gives back memory of its own: name -> bytes given back.

    It knows nothing of the ledger: it sees the storages of all tensors of all ops.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.storages = {p.data.untyped_storage().data_ptr() for p in pools_of(run)}
        self.copied: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.attended = 0

    def _in_pool(self, value: Any) -> bool:
        is_tensor = isinstance(value, torch.Tensor)
        return is_tensor and value.untyped_storage().data_ptr() in self.storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(map(self._in_pool, tree_leaves((args, kwargs)))):
            name = str(func)
            fresh = [v for v in tree_leaves(out) if isinstance(v, torch.Tensor)]
            size = sum(v.numel() * v.element_size() for v in fresh if not self._in_pool(v))
            if name.startswith(ATTENTION):
                self.attended += 1
            elif size:
                self.copied[name] += size
            elif name.split(".")[1].endswith("_"):
                self.written[name] += 1
        return out


def watched(run: Run, until: Callable[[Run], bool] | None = None) -> PoolWatch:
    with PoolWatch(run) as watch:
        drive(run, check=False, until=until)
    return watch


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_no_op_of_a_whole_run_copies_rows_out_of_a_pool(
    graph: str, share: str, session: Any
) -> None:
    run = start(session(graph, share, sets=("layout.max_active=2",)), QUESTIONS)
    watch = watched(run)
    assert not watch.copied, watch.copied
    assert all(not pool.ledger.bytes for pool in pools_of(run)), "and the ledger agrees"
    assert set(watch.written) == {"aten.index_copy_.default"}, watch.written
    assert watch.attended > 8 * 10, "the watch sees the pools being read"


def test_what_a_compaction_moves_is_what_the_ledger_names(session: Any) -> None:
    """The only copies out of a pool; the run is long enough and its holes are large enough."""
    run = start(session("bim_eagle", budget=40), QUESTIONS)
    scattered = False

    def scatter(run: Run) -> bool:
        nonlocal scattered
        if run.state == "verify" and not scattered:
            scattered = True
            for pool in pools_of(run):
                permute_(pool, 3)
        return False

    watch = watched(run, until=scatter)
    moved = sum(pool.ledger.bytes["compact"] for pool in pools_of(run))
    assert moved > 0
    index = watch.copied.pop("aten.index_select.default")
    permuted = watch.copied.pop("aten.index.Tensor")
    assert index == moved and permuted > 0
    assert not watch.copied, watch.copied
    assert all(set(pool.ledger.bytes) <= {"compact"} for pool in pools_of(run))


def test_the_watch_notices_a_copy(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: a cache that hands out copies is caught."""
    views = KVCache.get_valid

    def copies(kv: KVCache, layer: int, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = views(kv, layer, extent)
        return keys.clone(), values.contiguous()

    monkeypatch.setattr(KVCache, "get_valid", copies)
    assert sum(watched(start(session("bim_eagle"), QUESTIONS)).copied.values())


@pytest.mark.parametrize("graph", FULL)
@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_a_fork_moves_nothing(graph: str, share: str, session: Any) -> None:
    """From one prefix to four branches: only the rows of their prompts are written."""
    run = start(session(graph, share), QUESTIONS[:1])
    drive(run, until=lambda run: run.state == "parse")
    pool, before = run.board["kv"], run.board["kv"].data.clone()
    used, owner = np.flatnonzero(pool.owner >= 0), pool.owner.copy()
    watch = watched(run, until=lambda run: run.state == "parallel_prefill")
    assert not watch.copied and not pool.ledger.bytes
    assert torch.equal(pool.data[:, :, :, used], before[:, :, :, used]), "shared rows stay"
    assert (pool.owner[used] == owner[used]).all()
    (request,) = requests_of(run)
    started = [b for b in request.branches if b.stage is Stage.RUNNING]
    assert len(started) == 3, "the fourth waits for the first"
    grown = int((pool.owner >= 0).sum()) - len(used)
    hoist = request.prefix_length - len(used)
    assert grown == hoist + sum(len(b.prompt) for b in started)
    layers = pool.data.shape[0]
    assert watch.written == {"aten.index_copy_.default": 2 * layers}, "one write per layer, K and V"


@pytest.mark.parametrize("graph", GRAPHS)
def test_pools_keep_their_address_and_their_size_over_a_run(graph: str, session: Any) -> None:
    run = start(session(graph), QUESTIONS)
    before, places = _places(run), set()
    drive(run, until=lambda run: bool(places.add(_places(run))))
    assert places == {before}
    assert run.board["kv"] is run.board["branches"].kv


def _places(run: Run) -> tuple[Any, ...]:
    return tuple((p.data.data_ptr(), p.data.untyped_storage().nbytes()) for p in pools_of(run))


def permute_(pool: KVCache, seed: int) -> None:
    """One random slot map: rows, owners, positions and flags move together."""
    order = np.random.default_rng(seed).permutation(pool.capacity)
    pool.data[:, :, :, : pool.capacity] = pool.data[:, :, :, order]
    pool.owner, pool.position = pool.owner[order], pool.position[order]
    pool.committed = pool.committed[order]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_the_order_of_slots_never_matters(graph: str, share: str, session: Any) -> None:
    """Both pools are shuffled, each by its own map, in the middle of a run and again later."""
    made = session(graph, share, sets=("layout.max_active=3",))
    plain = drive(start(made, QUESTIONS))
    for every in (1, 4, 11):
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
    run = start(session(graph, budget=40, stop_ids=(2,)), QUESTIONS)
    lengths, ended = [], 0
    while not run.finished:
        before = {b.owner for b in run.board["branches"].active}
        run.advance()
        check_rows(run)
        alive = {b.owner for b in run.board["branches"].active}
        if gone := before - alive:
            ended += len(gone)
            for pool in pools_of(run):
                kept = {r.prefix_owner for r in requests_of(run)} | {
                    r.root.owner for r in requests_of(run) if r.stage is Stage.OUTLINE and r.root
                }
                assert not (gone - kept) & set(pool.owner.tolist())
        lengths.append(run.board["kv"].current_length)
    assert ended >= 5
    assert lengths[-1] == 0 and max(lengths) > 60
    assert all(p.current_length == 0 for p in pools_of(run))


def test_bytes_held_are_slots_in_use_times_bytes_per_slot(session: Any) -> None:
    run = drive(start(session("bim_eagle"), QUESTIONS), until=lambda run: run.steps == 12)
    for pool in pools_of(run):
        layers, _, heads, slots, dim = pool.data.shape
        assert pool.slot_bytes == layers * 2 * heads * dim * 4
        assert slots == pool.capacity + 1, "one scratch slot"
        assert pool.current_length * pool.slot_bytes <= pool.data.untyped_storage().nbytes()


def test_a_retired_outline_leaves_no_rows_when_branches_share_the_prompt(
    tiny: Make, graphs: Graphs
) -> None:
    """share: prompt gives the outline's rows back; share: outline makes them the prefix."""
    made = tiny("llama")
    for share in ("prompt", "outline"):
        book = PlanBook(130, share, ())
        book.text = "PLAN\n1|50|-|-|One\n2|50|-|-|Two\nEND"
        run = start(graphs.session("bim_eagle", made.models, book), ["hello"])
        drive(run, until=lambda run: run.state == "parse")
        (request,) = requests_of(run)
        pool, prefix = run.board["kv"], len(request.prefix)
        rows = len(request.tail) + request.root.kept
        expected = prefix if share == "prompt" else prefix + rows
        assert len(pool.rows_of(request.prefix_owner)) == expected == pool.current_length
        assert pool.rows_of(request.root.owner).size == 0

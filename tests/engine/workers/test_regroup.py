"""Prefixes on their way: the bytes that the formula says, one collective, no weights, no leaks."""

import gc
from collections.abc import Iterator
from contextlib import closing
from threading import Thread
from time import monotonic

import pytest
import torch
from helpers.clusters import BEES, Together, listeners, on_workers, open_files, session_of

from specsot.engine.errors import UsageError
from specsot.engine.prepare.options import ClusterBlock
from specsot.engine.workers.protocol import FormGroup
from specsot.engine.workers.worker_loop import GroupMembership, connect, open_store
from specsot.states.prefix_cache import MOVED

SLOT = {"bim_eagle": (8192, 1024), "bim_dflash": (8192, 2048), "bim_plain": (8192,)}
"""layers x 2 x kv heads x head_dim x 4 bytes of each pool of the embedded models."""


@pytest.mark.parametrize(
    ("graph", "workers", "skeleton"), [*((one, 3, 1) for one in SLOT), ("bim_eagle", 2, 2)]
)
def test_a_prefix_moves_once_and_weighs_what_the_formula_says(
    graph: str, workers: int, skeleton: int
) -> None:
    """To two workers that lack it: from a third, or from themselves with half of the heads each."""
    session = session_of(graph, budget=10, packed=skeleton == 1)
    ran = on_workers(session, [BEES], workers=workers, skeleton=skeleton)
    (told,) = ran.told("regroup")
    weight = sum(rows * slot for rows, slot in zip(told["rows"], SLOT[graph], strict=True))
    assert told["rows"][0] >= 90 and told["bytes"] == 2 * weight
    figures = ran.director.figures
    assert (figures["count"], figures["bytes"], figures["failed"]) == (1, 2 * weight, 0)
    ledgers = [pool["moved_bytes"].get(MOVED, 0) for pool in ran.figures["kv"].values() if pool]
    assert sum(ledgers) == told["bytes"], "the pools' ledgers say the same"
    reused = [one["prefix_cache"]["reused"] for one in ran.memory]
    assert sorted(reused)[-2] >= told["rows"][0] - 1, "all but a row are not computed again"


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Together]:
    with closing(Together("bim_eagle", request.param)) as made:
        yield made


@pytest.mark.parametrize("pair", [1, 2], indirect=True)
def test_many_regroups_leave_nothing_behind(pair: Together) -> None:
    """In a new group each time, and the outline in new engines where two write it."""
    pair.outlined()
    weights = pair.weights()
    files = held = 0
    for number in range(11):
        ids, rows = pair.outlined()
        replies = pair.regroup(number, ids, rows)
        stored = [one.bytes for one in replies if one.stored and not one.error]
        assert stored == [rows[0] * 8192 + rows[1] * 1024] * pair.tp
        pair.forget(*range(2 - pair.tp, 2))
        if number == 2:
            files, held = open_files(), _held()
    assert open_files() <= files + 2 and _held() - held < 4 << 20, "eight of 0.8 MB are 6"
    assert pair.weights() == weights, "weights have moved"


def _held() -> int:
    gc.collect()
    # The type: objects may be proxies of what is gone, which `isinstance` would ask.
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    plain = [one for one in tensors if not (one.is_mkldnn or one.is_meta)]
    stores = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in plain}
    return sum(stores.values())


@pytest.mark.parametrize("pair", [1], indirect=True)
def test_a_prefix_continues_what_the_receiver_has(pair: Together) -> None:
    """Its beginning was received before: only the other rows are written, and all are the sender's.
    Other holdings: tests/states/cache/test_received_rows.py."""
    ids, rows = pair.outlined()
    caches = [pair.engine(worker, 1).engine.manager.prefixes for worker in range(2)]
    for number, first in enumerate(((70, 69), rows)):
        replies = pair.regroup(number, ids[: first[0]], first)
        assert sorted(one.stored for one in replies) == [False, True]
        sent, received = (one.take_out(ids, first) for one in caches if one is not None)
        assert all(map(torch.equal, sent, received))
        pools = [pool for one in caches if one is not None for pool in one.pools]
        again = number  # a row of the target, because the drafter pairs
        moved = (first[0] + again) * 8192 + first[1] * 1024
        assert sum(pool.ledger.bytes[MOVED] for pool in pools) == moved
    # a source that has evicted the rows says so
    replies = pair.regroup(2, tuple(range(100, 200)), (100, 99))
    assert [(one.bytes, one.stored, one.error) for one in replies] == [(0, False, "")] * 2
    assert sorted(one.rows is None for one in replies) == [False, True]


def test_a_rank_that_does_not_come_is_a_failure_within_the_deadline() -> None:
    store = open_store("127.0.0.1", 1.0)
    groups: dict[int, GroupMembership] = {}
    block = ClusterBlock(deadline=1.0)

    def form(rank: int) -> None:
        told = FormGroup(0, rank, 2, store.port, block)
        groups[rank] = GroupMembership(told, connect(told), "127.0.0.1")

    threads = [Thread(target=form, args=(rank,)) for rank in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    began = monotonic()
    with pytest.raises(RuntimeError):
        groups[0].world.group.broadcast(torch.zeros(100_000), 1).wait()
    assert monotonic() - began < 3
    with pytest.raises(RuntimeError):
        told = FormGroup(1, 0, 2, store.port, block)
        GroupMembership(told, connect(told), "127.0.0.1")
    assert monotonic() - began < 6


def test_a_store_listens_where_it_is_told_and_nowhere_else() -> None:
    store = open_store("127.0.0.1", 1.0)
    assert listeners(store.port) == {"0100007F"}
    with pytest.raises(UsageError, match=r"cluster.interface 203.0.113.7: Cannot assign"):
        open_store("203.0.113.7", 1.0)

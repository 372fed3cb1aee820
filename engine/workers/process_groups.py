"""Process groups that change while workers stay, and the collective that moves a prefix.

The store listens at one interface; gloo connects the workers. No group is the process's default
group, so that a worker can leave a group for another at any time, and several workers can share a
process. Neither the store nor gloo authenticates: this is for networks that can be trusted.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from ...models.decoder import part
from ...models.sharded import Ranks, place
from ...states.prefix_cache import PrefixCache
from ..errors import UsageError
from ..run.engine import Engine
from ..run.session import Session
from .protocol import FormGroup, Regroup, Regrouped

BACKLOG = 128
MAX_TRIES = 3  # connections to a store, each with its part of the deadline


def ranks_of_groups(size: int, tp: int, largest: int) -> list[tuple[int, ...]]:
    """The worker groups of `tp` ranks each, by number; the same for drivers and workers. Groups of
    several sizes are nested (`place`): only as many ranks as fill groups of the largest size, a
    multiple of `tp`, form groups; the others decode with tp 1, or not at all."""
    if tp == 1:
        return [(rank,) for rank in range(size)]
    whole = size // largest * largest
    return [tuple(place(rank, whole, tp).members) for rank in range(whole // tp)]


def open_store(address: str, deadline: float) -> TCPStore:
    """The driver's store, where the members of groups meet; listens at one address of this machine.
    Raises UsageError: this machine does not have the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(f"cluster.interface {address}: {reason}") from None
    return TCPStore(
        address,
        int(listener.getsockname()[1]),
        is_master=True,
        timeout=timedelta(seconds=deadline),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(order: FormGroup) -> Any:
    """The store of a group; raises RuntimeError if it is not reached before the deadline."""
    deadline = timedelta(seconds=order.block.deadline)
    address = (order.block.interface, order.port)
    for tries in reversed(range(MAX_TRIES)):
        try:  # one connection in some thousands is not answered: then another one is made
            store = TCPStore(*address, timeout=deadline / MAX_TRIES, wait_for_workers=False)
            store.set_timeout(deadline)
            break
        except RuntimeError:
            if not tries:
                raise
    return store


class GroupMembership:
    """All process groups of a worker, by one `FormGroup`.

    world: all workers. groups: the worker groups of this worker, by tp: number, and ranks (None for
    tp 1). store: of `connect`. address: of this worker. Raises RuntimeError: not all members came
    before the deadline.
    """

    def __init__(self, order: FormGroup, store: Any, address: str) -> None:
        self.order = order
        self._store = store
        self._address = address
        self.world = self._join("all", range(order.size))
        self.groups: dict[int, tuple[int, Ranks | None]] = {}
        for tp in sorted({order.block.skeleton.tp, order.block.branches.tp}, reverse=True):
            for number, members in enumerate(self.ranks_of(tp)):
                if order.rank in members:
                    ranks = self._join(f"{tp}/{number}", members) if tp > 1 else None
                    self.groups[tp] = (number, ranks)

    def _join(self, name: str, members: Sequence[int]) -> Ranks:
        """This worker in a group of these ranks; the name is the same for all of them."""
        index = members.index(self.order.rank)
        group: Any = None  # torch declares no collectives of such a group
        if len(members) > 1:
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=self.order.block.deadline)
            options._devices = [gloo.create_device(hostname=self._address)]
            store = PrefixStore(f"group/{self.order.number}/{name}", self._store)
            group = gloo(store, index, len(members), options)
        return Ranks(group, index, len(members))

    def ranks_of(self, tp: int) -> list[tuple[int, ...]]:
        return ranks_of_groups(self.order.size, tp, self.order.block.together)


def exchange_prefix(
    order: Regroup,
    groups: GroupMembership,
    session: Session,
    *,
    source: Engine | None,
    destination: Engine | None,
) -> Regrouped:
    """One worker's part in a `Regroup`; its `seconds` are left to the caller.

    Workers that wrote an outline together have its target rows each with its own heads, and the
    drafters' rows whole. A worker keeps the heads that it decodes branches with.

    source: has the rows, if this worker is among the sources. destination: decodes branches. Raises
    RuntimeError: the collective did not end before the deadline, or a worker is lost.
    """
    present = None
    parts = list[Tensor]()  # of each pool
    if source is not None:
        cache = _cache(source)
        try:
            parts = cache.take_out(order.ids, order.rows, order.cache_salt)
        except LookupError:  # evicted since
            present = cache.movable_rows(order.ids, order.cache_salt)
    start = perf_counter()
    received = _broadcast(order, groups, session, parts)
    seconds = perf_counter() - start
    num_bytes = 0
    stored = False
    if received and destination is not None and destination is not source:
        claimed = destination.manager.claimed_slots
        salt = order.cache_salt
        share = destination.session.models.target.share.kv_heads
        received[0] = received[0][:, :, share.start : share.stop]
        cache = _cache(destination)
        stored = cache.put_in_(order.ids, order.rows, received, salt=salt, claimed=claimed)
        pairs = zip(order.rows, cache.pools, strict=True)
        num_bytes = sum(count * pool.slot_bytes for count, pool in pairs)
    return Regrouped(order.number, num_bytes, stored, collective=seconds, rows=present)


def _cache(engine: Engine) -> PrefixCache:
    cache = engine.manager.prefixes
    assert cache is not None, "only cached rows are moved"
    return cache


def _broadcast(
    order: Regroup, groups: GroupMembership, session: Session, parts: Sequence[Tensor]
) -> list[Tensor]:
    """Broadcasts of all sources at once: of each one the target's rows with its heads, of the first
    the drafters' rows as well. The rows of each pool with all heads; none if a source has none."""
    target = session.models.target
    drafter = session.models.drafter if session.program.graph.drafter.has_model else None
    drafters = [one for one in (drafter, session.outline_drafter) if one is not None]
    sources = groups.ranks_of(order.tp)[order.group]
    sent = []  # of each source its shapes, and the tensor that it fills
    works = []
    for number, rank in enumerate(sources):
        kv_heads = len(part(target.config.kv_heads, number, len(sources)))
        shapes = [(target.num_layers, 2, kv_heads, order.rows[0], target.head_dim)]
        if number == 0:
            shapes += [
                (drafter.num_layers, 2, drafter.kv_heads, count, drafter.head_dim)
                for drafter, count in zip(drafters, order.rows[1:], strict=True)
            ]
        # The flag at the end says that the rows are valid: a source without rows takes part too.
        data_N = torch.zeros(sum(map(prod, shapes)) + 1, dtype=session.models.dtype)
        if rank == groups.order.rank and parts:
            torch.cat([rows.flatten() for rows in parts[: len(shapes)]], out=data_N[:-1])
            data_N[-1] = 1
        sent.append((shapes, data_N))
        if groups.world.count > 1:
            works.append(groups.world.group.broadcast(data_N, rank))
    for work in works:
        work.wait()
    if not all(data_N[-1] for _, data_N in sent):
        return []
    rows = [
        data.view(shape)
        for shapes, data_N in sent
        for data, shape in zip(torch.split(data_N[:-1], [*map(prod, shapes)]), shapes, strict=True)
    ]
    count = len(drafters)
    return [torch.cat([rows[0], *rows[1 + count :]], 2), *rows[1 : 1 + count]]

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
from ...models.sharded import Ranks, gather_heads, peer_heads, peers, place
from ...states import migration
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


class StoreClient:
    """A worker's connection to the store of its driver, for all groups."""

    def __init__(self) -> None:
        self._address = ("", 0)
        self._store: Any = None

    def store(self, order: FormGroup) -> Any:
        """The store of a group; raises RuntimeError if it is not reached before the deadline."""
        address = (order.block.interface, order.port)
        deadline = timedelta(seconds=order.block.deadline)
        tries = MAX_TRIES if address != self._address else 0
        while tries:
            tries -= 1
            try:  # one connection in some thousands is not answered: then another one is made
                store = TCPStore(*address, timeout=deadline / MAX_TRIES, wait_for_workers=False)
            except RuntimeError:
                if not tries:
                    raise
            else:
                store.set_timeout(deadline)
                self._store = store
                self._address = address
                break
        return self._store


class GroupMembership:
    """All process groups of a worker, by one `FormGroup`.

    world: all workers. groups: the worker groups of this worker, by tp: number, and ranks (None for
    tp 1). peers: those with the other heads of what this worker decodes branches with, where all
    workers write outlines together. Raises RuntimeError: not all members came before the deadline.
    """

    def __init__(self, order: FormGroup, client: StoreClient, address: str) -> None:
        self.order = order
        self._client = client
        self._address = address
        self.world = self._join("all", range(order.size))
        self.groups: dict[int, tuple[int, Ranks | None]] = {}
        before = order.block.skeleton.tp
        after = order.block.branches.tp
        for tp in sorted({before, after}, reverse=True):
            for number, members in enumerate(self.ranks_of(tp)):
                if order.rank in members:
                    ranks = self._join(f"{tp}/{number}", members) if tp > 1 else None
                    self.groups[tp] = (number, ranks)
        self.peers: Ranks | None = None
        self.peer_ranks = range(0)
        if after < before == order.size:
            self.peer_ranks = peers(order.rank, order.size, before, after)
            self.peers = self._join(f"peers/{self.peer_ranks.start}", self.peer_ranks)

    def _join(self, name: str, members: Sequence[int]) -> Ranks:
        """This worker in a group of these ranks; the name is the same for all of them."""
        index = members.index(self.order.rank)
        group: Any = None  # torch declares no collectives of such a group
        if len(members) > 1:
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=self.order.block.deadline)
            options._devices = [gloo.create_device(hostname=self._address)]
            prefix = f"group/{self.order.number}/{name}"
            store = PrefixStore(prefix, self._client.store(self.order))
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
    drafters' rows whole. A worker needs the heads that it decodes branches with.

    source: has the rows, if this worker is among the sources. destination: decodes branches. Raises
    RuntimeError: the collective did not end before the deadline, or a worker is lost.
    """
    present = None
    parts = list[Tensor]()  # of each pool
    if source is not None:
        try:
            parts = migration.take_out(source.manager, order.ids, order.rows, order.cache_salt)
        except LookupError:  # evicted since
            present = migration.movable_rows(source.manager, order.ids, order.cache_salt)
    if groups.peers is not None and order.tp == groups.order.size:
        # All are sources with some heads each, and have the drafters' rows; they have done the
        # same, so that all of them have the rows or none has.
        received = list[Tensor]()
        start = perf_counter()
        if parts:
            kv_heads = session.models.target.config.kv_heads
            size = groups.order.size
            heads = peer_heads(kv_heads, size, size, groups.peer_ranks)
            received = [gather_heads(parts[0], groups.peers, heads), *parts[1:]]
        seconds = perf_counter() - start
    else:
        received, seconds = _broadcast(order, groups, session, parts)
        if received and destination is not None:
            share = destination.session.models.target.share.kv_heads
            received[0] = received[0][:, :, share.start : share.stop]
    num_bytes = 0
    stored = False
    if received and destination is not None and destination is not source:
        manager = destination.manager
        salt = order.cache_salt
        stored = migration.put_in_(manager, order.ids, order.rows, received, salt=salt)
        num_bytes = migration.bytes_of(manager, order.rows)
    return Regrouped(order.number, num_bytes, stored, collective=seconds, rows=present)


def _broadcast(
    order: Regroup, groups: GroupMembership, session: Session, parts: Sequence[Tensor]
) -> tuple[list[Tensor], float]:
    """Some are sources: their heads one after the other, with the first the drafters' rows; the
    rows with all heads, none if a source has none, and the seconds of the collectives."""
    target = session.models.target
    drafter = session.models.drafter if session.program.graph.drafter.has_model else None
    drafters = [one for one in (drafter, session.outline_drafter) if one is not None]
    sources = groups.ranks_of(order.tp)[order.group]
    target_rows = list[Tensor]()
    drafter_rows = list[Tensor]()
    seconds = 0.0
    for number, rank in enumerate(sources):
        kv_heads = len(part(target.config.kv_heads, number, len(sources)))
        shapes = [(target.num_layers, 2, kv_heads, order.rows[0], target.head_dim)]
        if number == 0:
            shapes += [
                (drafter.num_layers, 2, drafter.kv_heads, count, drafter.head_dim)
                for drafter, count in zip(drafters, order.rows[1:], strict=True)
            ]
        sizes = [prod(shape) for shape in shapes]
        # The flag at the end says that the rows are valid: a source without rows takes part too.
        data_N = torch.zeros(sum(sizes) + 1, dtype=session.models.dtype)
        if rank == groups.order.rank and parts:
            torch.cat([rows.flatten() for rows in parts[: len(shapes)]], out=data_N[:-1])
            data_N[-1] = 1
        start = perf_counter()
        if groups.world.count > 1:
            groups.world.group.broadcast(data_N, rank).wait()
        seconds += perf_counter() - start
        if not bool(data_N[-1]):
            return [], seconds
        tensors = torch.split(data_N[:-1], sizes)
        rows, *drafted = [data.view(size) for data, size in zip(tensors, shapes, strict=True)]
        target_rows.append(rows)
        drafter_rows += drafted
    return [torch.cat(target_rows, 2), *drafter_rows], seconds

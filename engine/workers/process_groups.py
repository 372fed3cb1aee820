"""Process groups that change while workers stay, and the collective that moves a prefix.

The store listens at one interface; gloo connects the workers. No group is the process's default
group, so that a worker can leave a group for another at any time, and several workers can share a
process. Neither the store nor gloo authenticates: this is for networks that can be trusted.
"""

import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

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
    """The worker groups of `tp` ranks each, by number; the same for drivers and workers.

    Groups of several sizes are nested: as many ranks as fill groups of the largest size form
    groups, as `models.shares.place` says; the others decode with tp 1, or not at all.

    size: of the process group. largest: size of the largest groups, a multiple of `tp`.
    """
    if tp == 1:
        return [(rank,) for rank in range(size)]
    whole = size // largest * largest
    return [tuple(place(rank, whole, tp).members) for rank in range(whole // tp)]


class Store:
    """The driver's store, where the members of groups meet; listens at one address of this machine.
    Raises UsageError: this machine does not have the address."""

    def __init__(self, address: str, deadline: float) -> None:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family) as listener:
            try:
                listener.bind((address, 0))
            except OSError as error:
                raise UsageError(f"cluster.interface {address}: {error.strerror}") from None
            listener.listen(BACKLOG)
            self.address = address
            self.port = int(listener.getsockname()[1])
            self._store = TCPStore(
                address,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=deadline),
                wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
            )


class StoreClient:
    """A worker's connection to the store of its driver, for all groups."""

    def __init__(self) -> None:
        self._place = ("", 0)
        self._store: TCPStore | None = None

    def store(self, order: FormGroup) -> TCPStore:
        """The store of a group; raises RuntimeError if it is not reached before the deadline."""
        if self._store is not None and self._place == (order.host, order.port):
            return self._store
        timeout = timedelta(seconds=order.deadline / MAX_TRIES)
        for remaining in reversed(range(MAX_TRIES)):
            try:  # one connection in some thousands is not answered: then another one is made
                store = TCPStore(order.host, order.port, timeout=timeout, wait_for_workers=False)
                break
            except RuntimeError:
                if not remaining:
                    raise
        store.set_timeout(timedelta(seconds=order.deadline))
        self._store = store
        self._place = (order.host, order.port)
        return store


class ProcessGroup:
    """A worker's membership of one process group.

    address: of this worker. members: ranks of the order's group; by default all. name: of the
    group, the same for its members. Raises RuntimeError: not all members came before the deadline.
    """

    def __init__(
        self,
        order: FormGroup,
        client: StoreClient,
        address: str,
        members: Sequence[int] | None = None,
        *,
        name: str = "all",
    ) -> None:
        self.members = tuple(range(order.size) if members is None else members)
        self.rank = self.members.index(order.rank)
        self._deadline = timedelta(seconds=order.deadline)
        self._group: Any = None  # torch declares no collectives of such a group
        if len(self.members) < 2:
            return
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._deadline
        options._devices = [gloo.create_device(hostname=address)]
        store = PrefixStore(f"group/{order.epoch}/{name}", client.store(order))
        self._group = gloo(store, self.rank, len(self.members), options)

    @property
    def ranks(self) -> Ranks:
        """This worker among those that compute one decoder."""
        return Ranks(self._group, self.rank, len(self.members))

    def broadcast_(self, data_N: Tensor, source: int) -> None:
        """Copy the numbers of rank `source` to all ranks. Raises RuntimeError: it did not end
        before the deadline, or a member is lost."""
        if self._group is None:
            return
        options = BroadcastOptions()
        options.rootRank = source
        options.timeout = self._deadline
        self._group.broadcast([data_N], options).wait()


class GroupMembership:
    """All process groups of a worker, by one `FormGroup`.

    world: all workers. groups: the worker groups of this worker, by tp: number and process group
    (None for tp 1). peers: those with the other heads of what this worker decodes branches with,
    where all workers write outlines together. Raises RuntimeError: not all members came before the
    deadline.
    """

    def __init__(self, order: FormGroup, client: StoreClient, address: str) -> None:
        self.order = order
        self.world = ProcessGroup(order, client, address)
        self.groups: dict[int, tuple[int, ProcessGroup | None]] = {}
        for tp in sorted({order.skeleton, order.branches}, reverse=True):
            for number, ranks in enumerate(self.ranks_of(tp)):
                if order.rank in ranks:
                    name = f"{tp}/{number}"
                    group = (
                        ProcessGroup(order, client, address, ranks, name=name) if tp > 1 else None
                    )
                    self.groups[tp] = (number, group)
        self.peers: ProcessGroup | None = None
        if order.branches < order.skeleton == order.size:
            others = peers(order.rank, order.size, order.skeleton, order.branches)
            name = f"peers/{others.start}"
            self.peers = ProcessGroup(order, client, address, others, name=name)

    def ranks_of(self, tp: int) -> list[tuple[int, ...]]:
        """Ranks of all worker groups of a size, by number."""
        return ranks_of_groups(self.order.size, tp, max(self.order.skeleton, self.order.branches))

    def number_of(self, tp: int) -> int | None:
        """Number of this worker's group of a size."""
        return self.groups[tp][0] if tp in self.groups else None


# -- the rows of a prefix -------------------------------------------------------------------------


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
    drafters' rows whole. A worker needs the heads that it decodes branches with: all, or its
    rank's.

    session: of this worker. source: has the rows, if this worker is among the sources. destination:
    decodes branches; None for a worker that decodes none. Raises RuntimeError: the collective did
    not end before the deadline, or a worker is lost.
    """
    present = None
    parts = list[Tensor]()  # of each pool
    if source is not None:
        try:
            parts = migration.take_out(source.manager, order.ids, order.rows, order.cache_salt)
        except LookupError:  # evicted since
            present = migration.movable_rows(source.manager, order.ids, order.cache_salt)
    if groups.peers is not None and order.tp == groups.order.size:
        received, seconds = _gather(groups, groups.peers, session, parts)
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
    return Regrouped(
        number=order.number,
        bytes=num_bytes,
        stored=stored,
        collective=seconds,
        rows=present,
    )


def _gather(
    groups: GroupMembership, peers: ProcessGroup, session: Session, parts: Sequence[Tensor]
) -> tuple[list[Tensor], float]:
    """All workers are sources with some heads each, and have the drafters' rows: one gather, and
    its seconds. All of them have the same rows, or none of them has: they have done the same."""
    if not parts:
        return [], 0.0
    order = groups.order
    kv_heads = session.models.target.config.kv_heads
    heads = peer_heads(kv_heads, order.size, order.skeleton, peers.members)
    start = perf_counter()
    target_rows = gather_heads(parts[0], peers.ranks, heads)
    return [target_rows, *parts[1:]], perf_counter() - start


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
        if rank == groups.world.rank and parts:
            torch.cat([rows.flatten() for rows in parts[: len(shapes)]], out=data_N[:-1])
            data_N[-1] = 1
        start = perf_counter()
        groups.world.broadcast_(data_N, rank)
        seconds += perf_counter() - start
        if not bool(data_N[-1]):
            return [], seconds
        tensors = torch.split(data_N[:-1], sizes)
        rows, *drafted = [data.view(size) for data, size in zip(tensors, shapes, strict=True)]
        target_rows.append(rows)
        drafter_rows += drafted
    return [torch.cat(target_rows, 2), *drafter_rows], seconds

"""Process groups that change while workers stay: a store at one interface, gloo between workers.

None of them is the process's default group, so that a worker can leave a group for another at any
time, and several workers can share a process. Neither the store nor gloo authenticates: this is for
networks that can be trusted.
"""

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from ...models.sharded import Ranks, peers, place
from ..errors import UsageError
from .protocol import FormGroup

BACKLOG = 128
MAX_TRIES = 3  # connections to a store, each with its part of the deadline


def ranks_of_groups(size: int, tp: int, largest: int) -> list[tuple[int, ...]]:
    """The worker groups of `tp` ranks each, by number; the same for drivers and workers.

    Groups of several sizes are nested: as many ranks as fill groups of the largest size form
    groups, as `models.shares.place` says; the others decode with tp 1, or not at all.

    Args:
        size: of the process group. largest: size of the largest groups, a multiple of `tp`.
    """
    if tp == 1:
        return [(rank,) for rank in range(size)]
    whole = size // largest * largest
    return [tuple(place(rank, whole, tp).members) for rank in range(whole // tp)]


class Store:
    """The driver's store, where the members of groups meet; listens at one address of this machine.

    Raises:
        UsageError: this machine does not have the address.
    """

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
        place = (order.host, order.port)
        if self._store is None or self._place != place:
            self._store = _connected(order)
            self._place = place
        return self._store


def _connected(order: FormGroup) -> TCPStore:
    """One connection in some thousands is not answered: then another one is made."""
    timeout = timedelta(seconds=order.deadline / MAX_TRIES)
    for remaining in reversed(range(MAX_TRIES)):
        try:
            store = TCPStore(order.host, order.port, timeout=timeout, wait_for_workers=False)
            break
        except RuntimeError:
            if not remaining:
                raise
    store.set_timeout(timedelta(seconds=order.deadline))
    return store


class ProcessGroup:
    """A worker's membership of one process group.

    Args:
        address: of this worker. members: ranks of the order's group; by default all. name: of the
            group, the same for its members.

    Raises:
        RuntimeError: not all members came before the deadline.
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
        self.size = len(self.members)
        self._deadline = timedelta(seconds=order.deadline)
        self._group: Any = None  # torch declares no collectives of such a group
        if self.size < 2:
            return
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._deadline
        options._devices = [gloo.create_device(hostname=address)]
        store = PrefixStore(f"group/{order.epoch}/{name}", client.store(order))
        self._group = gloo(store, self.rank, self.size, options)

    @property
    def ranks(self) -> Ranks:
        """This worker among those that compute one decoder."""
        return Ranks(self._group, self.rank, self.size)

    def broadcast_(self, data_N: Tensor, source: int) -> None:
        """Copy the numbers of rank `source` to all ranks.

        Raises:
            RuntimeError: it did not end before the deadline, or a member is lost.
        """
        if self._group is None:
            return
        options = BroadcastOptions()
        options.rootRank = source
        options.timeout = self._deadline
        self._group.broadcast([data_N], options).wait()


class GroupMembership:
    """All process groups of a worker, by one `FormGroup`.

    Attributes:
        world: all workers. groups: the worker groups of this worker, by tp: number and process
            group (None for tp 1). peers: those with the other heads of what this worker decodes
            branches with, where all workers write outlines together.

    Raises:
        RuntimeError: not all members came before the deadline.
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


def timed(action: Callable[[], None]) -> float:
    """Seconds that an action takes."""
    start = perf_counter()
    action()
    return perf_counter() - start

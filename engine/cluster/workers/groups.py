"""Process groups that come and go while workers stay: a store on one interface, gloo between them.

Nothing of it is the process's default group, so that a worker can leave one group for another at
any time, and several workers can live in one process. Neither the store nor gloo asks who connects:
this is for networks that can be trusted.
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

from ....models.sharded import Ranks, peers
from ...errors import UsageError
from .messages import FormGroup
from .units import unit_of, units_of

BACKLOG = 128
TRIES = 3  # connections to a store, of which each may take its part of the deadline


class Store:
    """Where the members of groups find each other; listens at one address of this machine.

    Raises:
        UsageError: this machine does not have the address.
    """

    def __init__(self, address: str, deadline: float) -> None:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family) as listening:
            try:
                listening.bind((address, 0))
            except OSError as error:
                raise UsageError(f"cluster.interface {address}: {error.strerror}") from None
            listening.listen(BACKLOG)
            self.address = address
            self.port = int(listening.getsockname()[1])
            self._store = TCPStore(
                address,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=deadline),
                wait_for_workers=False,
                master_listen_fd=os.dup(listening.fileno()),
            )


class StoreClient:
    """A worker's way to the store of its driver: one connection for all groups of its life."""

    def __init__(self) -> None:
        self._where = ("", 0)
        self._store: TCPStore | None = None

    def store(self, told: FormGroup) -> TCPStore:
        """The store of a group.

        Raises:
            RuntimeError: it cannot be reached before the deadline.
        """
        where = told.host, told.port
        if self._store is None or self._where != where:
            self._store = _connected(told)
            self._where = where
        return self._store


def _connected(told: FormGroup) -> TCPStore:
    """Once in some thousand times nobody answers a connection: then another one is made."""
    patience = timedelta(seconds=told.deadline / TRIES)
    for left in reversed(range(TRIES)):
        try:
            store = TCPStore(told.host, told.port, timeout=patience, wait_for_workers=False)
            break
        except RuntimeError:
            if not left:
                raise
    store.set_timeout(timedelta(seconds=told.deadline))
    return store


class Group:
    """One worker's place in a process group.

    Args:
        members: ranks of those who are told of it; by default all. name: of the group, the same
            for its members.

    Raises:
        RuntimeError: not all members came before the deadline.
    """

    def __init__(
        self,
        told: FormGroup,
        client: StoreClient,
        members: Sequence[int] | None = None,
        name: str = "all",
    ) -> None:
        self.members = tuple(range(told.size) if members is None else members)
        self.rank = self.members.index(told.rank)
        self.size = len(self.members)
        self._deadline = timedelta(seconds=told.deadline)
        self._group: Any = None  # torch declares no collectives of a group of its own
        if self.size < 2:
            return
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._deadline
        options._devices = [gloo.create_device(hostname=told.address)]
        own = PrefixStore(f"group/{told.epoch}/{name}", client.store(told))
        self._group = gloo(own, self.rank, self.size, options)

    @property
    def ranks(self) -> Ranks:
        """This worker among those who compute one decoder."""
        return Ranks(self._group, self.rank, self.size)

    def broadcast_(self, data_N: Tensor, source: int) -> None:
        """The numbers of one rank become everybody's.

        Raises:
            RuntimeError: it did not end before the deadline, or a member is gone.
        """
        if self._group is None:
            return
        options = BroadcastOptions()
        options.rootRank = source
        options.timeout = self._deadline
        self._group.broadcast([data_N], options).wait()


class Grouping:
    """All groups that a worker is in at a time.

    Attributes:
        world: everybody. units: those who decode together with this worker, by how many they are:
            their number among all such units, and their group, of several. peers: those who have
            the other heads of what this worker decodes branches with, where outlines are written
            by everybody together.

    Raises:
        RuntimeError: not all members came before the deadline.
    """

    def __init__(self, told: FormGroup, client: StoreClient) -> None:
        self.told = told
        self.epoch = told.epoch
        self.world = Group(told, client)
        self.units: dict[int, tuple[int, Group | None]] = {}
        for tp in sorted({told.skeleton, told.branches}, reverse=True):
            own = unit_of(told.rank, self.all_units(tp))
            if own is not None:
                members = self.all_units(tp)[own]
                several = Group(told, client, members, f"{tp}/{own}") if tp > 1 else None
                self.units[tp] = own, several
        self.peers: Group | None = None
        if told.branches < told.skeleton == told.size:
            others = peers(told.rank, told.size, told.skeleton, told.branches)
            self.peers = Group(told, client, others, f"peers/{others.start}")

    def all_units(self, tp: int) -> list[tuple[int, ...]]:
        """Ranks of all units of so many workers, by number."""
        largest = max(self.told.skeleton, self.told.branches)
        return units_of(self.told.size, tp, largest)


def timed(action: Callable[[], None]) -> float:
    """Seconds that it takes."""
    began = perf_counter()
    action()
    return perf_counter() - began

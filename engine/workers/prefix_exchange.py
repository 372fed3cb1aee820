"""The rows of a prefix between the engines of workers, in one collective.

Workers that wrote an outline together have its target rows each with its own heads, and the
drafters' rows whole. A worker needs the heads that it decodes branches with: all, or its rank's.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ...models.decoder import part
from ...models.sharded import gather_heads, peer_heads
from ...states import migration
from ..run.session import Session
from .process_groups import GroupMembership, ProcessGroup, timed
from .protocol import Regroup, Regrouped
from .tensor_parallel import TensorParallelEngine

Shape = tuple[int, int, int, int, int]


class PrefixExchange:
    """One worker's side of a `Regroup`.

    Args:
        source: its engine that has the rows, if it is among the sources. destination: the engine
            that it decodes branches with; None for a worker that decodes none.
    """

    def __init__(
        self,
        order: Regroup,
        session: Session,
        groups: GroupMembership,
        *,
        source: TensorParallelEngine | None,
        destination: TensorParallelEngine | None,
    ) -> None:
        self.order = order
        self.groups = groups
        self.source = source
        self.destination = destination
        self.target = session.models.target
        self.dtype = session.models.dtype
        drafter = session.models.drafter if session.program.graph.drafter.has_model else None
        drafters = (drafter, session.outline_drafter)
        self._drafters = [drafter for drafter in drafters if drafter is not None]
        self._seconds = 0.0

    def perform(self) -> Regrouped:
        """Take part in the collective, and store what was received.

        Raises:
            RuntimeError: it did not end before the deadline, or a worker is lost.
        """
        order = self.order
        present = None
        parts = list[Tensor]()
        if self.source is not None:
            manager = self.source.manager
            try:
                parts = migration.take_out(manager, order.ids, order.rows, order.cache_salt)
            except LookupError:  # evicted since
                present = migration.movable_rows(manager, order.ids, order.cache_salt)
        peers = self.groups.peers
        if peers is not None and order.tp == self.groups.world.size:
            received = self._from_peers(parts, peers) if parts else []
        else:
            received = self._from_some(parts)
        reply = Regrouped(
            number=order.number,
            bytes=0,
            stored=False,
            seconds=0.0,
            collective=self._seconds,
            rows=present,
        )
        if not received or self.destination is None or self.destination is self.source:
            return reply
        manager = self.destination.manager
        stored = migration.put_in_(manager, order.ids, order.rows, received, salt=order.cache_salt)
        return replace(reply, bytes=migration.bytes_of(manager, order.rows), stored=stored)

    def _from_peers(self, parts: Sequence[Tensor], peers: ProcessGroup) -> list[Tensor]:
        """All workers are sources with some heads each, and have the drafters' rows: one gather.

        All of them have the same rows, or none of them has: they have done the same.
        """
        form = self.groups.order
        heads = self.target.config.kv_heads
        each = peer_heads(heads, form.size, form.skeleton, peers.members)
        received = list[Tensor]()
        self._seconds = timed(lambda: received.append(gather_heads(parts[0], peers.ranks, each)))
        return [*received, *parts[1:]]

    def _from_some(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Some are sources: their heads one after the other, with the first the drafters' rows."""
        sources = self.groups.ranks_of(self.order.tp)[self.order.group]
        heads = list[Tensor]()
        drafted = list[Tensor]()
        rows = self.order.rows
        draft_shapes = [
            (drafter.num_layers, 2, drafter.kv_heads, count, drafter.head_dim)
            for drafter, count in zip(self._drafters, rows[1:], strict=True)
        ]
        target = self.target
        for number, rank in enumerate(sources):
            kv_heads = len(part(target.config.kv_heads, number, len(sources)))
            shapes = [(target.num_layers, 2, kv_heads, rows[0], target.head_dim)]
            shapes += draft_shapes if number == 0 else []
            received = self._broadcast(parts, shapes, rank)
            if received is None:
                return []
            heads.append(received[0])
            drafted += received[1:]
        share = range(0)
        if self.destination is not None:
            share = self.destination.session.models.target.share.kv_heads
        return [torch.cat(heads, 2)[:, :, share.start : share.stop], *drafted]

    def _broadcast(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], rank: int
    ) -> list[Tensor] | None:
        """The rows of one source; None if it has none.

        A flag after the rows says whether they are valid: a source without rows takes part too.
        """
        world = self.groups.world
        sizes = [prod(shape) for shape in shapes]
        data_N = torch.zeros(sum(sizes) + 1, dtype=self.dtype)
        if rank == world.rank and parts:
            torch.cat([rows.flatten() for rows in parts[: len(shapes)]], out=data_N[:-1])
            data_N[-1] = 1
        self._seconds += timed(lambda: world.broadcast_(data_N, rank))
        if not bool(data_N[-1]):
            return None
        tensors = torch.split(data_N[:-1], sizes)
        return [rows.view(shape) for rows, shape in zip(tensors, shapes, strict=True)]

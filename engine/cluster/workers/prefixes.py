"""The rows of a prefix between the engines of workers: in one collective, whoever has which heads.

Those who wrote an outline together have its target rows each with its own heads, and the drafters'
rows whole. Whoever decodes branches needs the heads that it decodes with: all, or those of a rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ....models.decoder import part
from ....models.sharded import gather_heads, peer_heads
from ....states import migration as regroup
from ...run.session import Session
from .groups import Group, Grouping, timed
from .messages import Regroup, Regrouped
from .team import Team

Shape = tuple[int, int, int, int, int]


class PrefixExchange:
    """One worker's part in bringing a prefix to those who lack it.

    Args:
        source: its engine, if it is among those who have the rows. own: the engine that it decodes
            branches with; None for a worker that decodes none.
    """

    def __init__(
        self,
        order: Regroup,
        session: Session,
        groups: Grouping,
        source: Team | None,
        own: Team | None,
    ) -> None:
        self.order = order
        self.groups = groups
        self.source = source
        self.own = own
        self.target = session.models.target
        self.dtype = session.models.dtype
        drafter = session.models.drafter if session.program.graph.drafter.has_model else None
        self._drafters = [one for one in (drafter, session.outline_drafter) if one is not None]
        self._seconds = 0.0

    def perform(self) -> Regrouped:
        """Take part in the collective, and keep what came.

        Raises:
            RuntimeError: it did not end before the deadline, or somebody is gone.
        """
        order = self.order
        has = None
        parts = list[Tensor]()
        if self.source is not None:
            branches = self.source.branches
            about = (order.ids, order.rows, order.cache_salt)
            try:
                parts = regroup.take_out(branches, *about)
            except LookupError:  # evicted since
                has = regroup.kept_rows(branches, order.ids, order.cache_salt)
        peers = self.groups.peers
        if peers is not None and order.tp == self.groups.world.size:
            came = self._from_peers(parts, peers) if parts else []
        else:
            came = self._from_some(parts)
        told = Regrouped(order.number, 0, False, 0.0, self._seconds, rows=has)
        if not came or self.own is None or self.own is self.source:
            return told
        count = regroup.bytes_of(self.own.branches, order.rows)
        kept = regroup.put_in_(self.own.branches, order.ids, order.rows, came, order.cache_salt)
        return replace(told, bytes=count, kept=kept)

    def _from_peers(self, parts: Sequence[Tensor], peers: Group) -> list[Tensor]:
        """Everybody has some heads, and the drafters' rows already: one gather of the heads.

        All of them have the same rows, or none of them has: they have done the same.
        """
        told = self.groups.told
        heads = self.target.config.kv_heads
        each = peer_heads(heads, told.size, told.skeleton, peers.members)
        ranks = peers.ranks
        came = list[Tensor]()
        self._seconds = timed(lambda: came.append(gather_heads(parts[0], ranks, each)))
        return [*came, *parts[1:]]

    def _from_some(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """From some to all: their heads one after the other, with the first the drafters' rows."""
        sources = self.groups.all_units(self.order.tp)[self.order.unit]
        heads = list[Tensor]()
        rest = list[Tensor]()
        rows = self.order.rows
        drafted = [
            (one.num_layers, 2, one.kv_heads, count, one.head_dim)
            for one, count in zip(self._drafters, rows[1:], strict=True)
        ]
        target = self.target
        for number, rank in enumerate(sources):
            own = len(part(target.config.kv_heads, number, len(sources)))
            shapes = [(target.num_layers, 2, own, rows[0], target.head_dim)]
            shapes += drafted if number == 0 else []
            found = self._broadcast(parts, shapes, rank)
            if found is None:
                return []
            heads.append(found[0])
            rest += found[1:]
        share = range(0) if self.own is None else self.own.session.models.target.share.kv_heads
        return [torch.cat(heads, 2)[:, :, share.start : share.stop], *rest]

    def _broadcast(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], rank: int
    ) -> list[Tensor] | None:
        """What one of them has; None if it has nothing.

        Behind the rows stands whether they are any: those who wait for them must not wait in vain.
        """
        world = self.groups.world
        sizes = [prod(shape) for shape in shapes]
        data_N = torch.zeros(sum(sizes) + 1, dtype=self.dtype)
        if rank == world.rank and parts:
            torch.cat([one.flatten() for one in parts[: len(shapes)]], out=data_N[:-1])
            data_N[-1] = 1
        self._seconds += timed(lambda: world.broadcast_(data_N, rank))
        if not bool(data_N[-1]):
            return None
        found = torch.split(data_N[:-1], sizes)
        return [one.view(shape) for one, shape in zip(found, shapes, strict=True)]

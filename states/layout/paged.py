"""The layout ``paged``: a tensor row per branch, all rows of KV in one pool.

Branches share what lies in front of them by reference: a fork is an entry in the tree of segments,
0 bytes. A branch's queries are a row as under ``batching``, and attend to the slots of the segments
on the way to their root, wherever these lie.
"""

from collections.abc import Iterable, Sequence

from ...ops.kv.pool import KVCache
from .row_per_branch import RowPerBranch


class PagedLayout(RowPerBranch):
    """Which tensor row a branch has; pools have one row, whose slots everybody shares.

    A prefix is read in the row of a branch that starts behind it. Until there is one, while its
    prompt is read in chunks, it has a row of its own.
    """

    def tensor_rows_of(self, owner: int) -> Sequence[int]:
        return (self._row[owner],)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache], least: int = 0) -> None:
        super().open_(prefix, size, pools, least)
        self._row[prefix] = self._free_row()

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> bool:
        """A branch gets a row, and takes its slots near those of its prefix."""
        shared = self._row[prefix] in (self._row[one] for one in self._row if one != prefix)
        self._row[owner] = self._free_row() if shared else self._row[prefix]
        self._row[prefix] = self._row[owner]
        for pool in pools:
            pool.near_(owner, prefix)
        return False

    def _free_row(self) -> int:
        taken = {*self._row.values()}
        return next(row for row in range(len(taken) + 1) if row not in taken)

    def leave_(self, owners: Iterable[int]) -> None:
        """Branches and requests that ended have no rows any more."""
        for owner in owners:
            self._row.pop(owner, None)

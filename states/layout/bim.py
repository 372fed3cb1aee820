"""The layout ``bim``: all branches of all requests in one sequence, rows told apart by owner."""

from collections.abc import Iterable, Sequence

from ...ops.kv.pool import KVCache
from .layout import Layout


class BimLayout(Layout):
    """Everything lies in the pools' only row; nothing is ever copied."""

    packed = True

    def rows_of(self, owner: int) -> Sequence[int]:
        return (0,)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache]) -> None:
        """A request's slots lie near each other, if there is room."""
        for pool in pools:
            pool.open_(prefix, size)

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> None:
        """Nor does a branch: a fork copies 0 bytes."""

    def leave_(self, owners: Iterable[int]) -> None:
        """There is no row to give back."""

    def prune_(self, prefix: int, pools: Sequence[KVCache]) -> None:
        """There are no copies of a prefix."""

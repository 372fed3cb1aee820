"""Keys and values from ranks with a part of the heads to ranks with more of them, or all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.kv.pool import KVCache
from ..ops.kv.slots import Ints
from .ranks import Ranks
from .shares import part, place

CAUSE = "regroup"  # in the ledgers of both pools


def gather_kv_(
    own: KVCache,
    slots: Ints,
    whole: KVCache,
    into: Ints,
    peers: Ranks,
    heads: Sequence[int],
) -> None:
    """Rows of every peer's pool, each with other heads, into a pool with the heads of all: in one
    collective over all layers. Every peer gives the same rows in the same order.

    Both ledgers count them, `own` with its heads and `whole` with all: over all peers `own` adds
    up to `regroup_bytes`. Where peers have different numbers of heads, all send as many as the
    one with the most.

    Args:
        slots, into: where the rows lie, and where they shall lie; owners are the caller's to set.
        heads: how many KV heads each peer has, in the order of the peers.

    Raises:
        RankLost: not all peers came.
    """
    mine_L2hRd = own.take_out(slots, CAUSE)
    index_R = torch.as_tensor(into, dtype=torch.int64, device=whole.data.device)
    whole.data.index_copy_(3, index_R, gather_heads(mine_L2hRd, peers, heads))
    whole.ledger.add(CAUSE, len(index_R) * whole.slot_bytes)


def gather_heads(mine_L2hRd: Tensor, peers: Ranks, heads: Sequence[int]) -> Tensor:
    """The same rows of every peer, each with other heads -> [L, 2, all their heads, R, head_dim].

    Args:
        heads: how many KV heads each peer has, in the order of the peers.

    Raises:
        RankLost: not all peers came.
    """
    mine = mine_L2hRd.permute(2, 0, 1, 3, 4)
    padded = mine.new_zeros(max(heads), *mine.shape[1:])
    padded[: len(mine)] = mine
    parts = zip(peers.gather(padded), heads, strict=True)
    return torch.cat([rows[:count] for rows, count in parts]).permute(1, 2, 0, 3, 4)


def peer_heads(kv_heads: int, ranks: int, before: int, peers: Sequence[int]) -> list[int]:
    """KV heads that each of these peers has in groups of `before`."""
    numbers = [place(one, ranks, before).number for one in peers]
    return [len(part(kv_heads, number, before)) for number in numbers]


def regroup_bytes(layers: int, kv_heads: int, head_dim: int, rows: int, itemsize: int) -> int:
    """Keys and values of so many rows: all that a rank has after a regroup."""
    return layers * 2 * kv_heads * head_dim * rows * itemsize

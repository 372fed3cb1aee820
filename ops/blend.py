"""What a forward on a blended cache is told: which rows are cached, and how many are recomputed.

A row is of the suffix (always computed), protected (cached exactly: computed up to the check
layer, never picked), reused (cached approximately: the check layer picks some) or padding. How
many rows are picked is known on the host, which ones on the device alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .layer_plan import BlendSettings, Budget, LayerPlan, Metric

Ints = npt.NDArray[np.int32]
Pair = tuple[Tensor, Tensor]  # K before RoPE and V of one layer, each [rows, kv_heads, head_dim]


class RowRole(IntEnum):
    """What a row of a blended forward is."""

    PADDING = 0
    SUFFIX = 1
    PROTECTED = 2
    REUSED = 3


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Cached rows, wherever they will stand: K is that before RoPE. Never changed in place.

    keys_LRgd, values_LRgd: [layers, rows, kv_heads, head_dim] in the model's dtype; keys after a
        k_norm. features_RF: the target's tapped hidden states, joined; None if nobody asked.
    """

    keys_LRgd: Tensor
    values_LRgd: Tensor
    features_RF: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.keys_LRgd.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes held, features included."""
        parts = (self.keys_LRgd, self.values_LRgd, self.features_RF)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def join(chunks: Sequence[ChunkKV]) -> ChunkKV:
    """Chunks one after another; features only if all of them have some."""
    features = [chunk.features_RF for chunk in chunks if chunk.features_RF is not None]
    return ChunkKV(
        torch.cat([chunk.keys_LRgd for chunk in chunks], 1),
        torch.cat([chunk.values_LRgd for chunk in chunks], 1),
        torch.cat(features) if len(features) == len(chunks) else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class BlendRows:
    """What each row of a forward is, on the host; all int32 [B, Q].

    role_BQ: `RowRole`. prompt_BQ, branch_BQ: the request and the owner of a row. chunk_BQ: for
        reused rows the number of their chunk in its branch; a chunk that occurs twice has two.
    """

    role_BQ: Ints
    prompt_BQ: Ints
    branch_BQ: Ints
    chunk_BQ: Ints

    def check(self) -> None:
        """Raise ValueError unless something is cached and every prompt has a suffix."""
        if not np.isin(self.role_BQ, (RowRole.PROTECTED, RowRole.REUSED)).any():
            raise ValueError("nothing to blend: 0 of the forward's rows are cached")
        used = np.unique(self.prompt_BQ[self.role_BQ != RowRole.PADDING])
        ends = np.unique(self.prompt_BQ[self.role_BQ == RowRole.SUFFIX])
        for prompt in np.setdiff1d(used, ends):
            raise ValueError(
                f"the suffix of prompt {prompt} has 0 rows, but its last row must be computed"
            )

    def groups(self, budget: Budget) -> tuple[Ints, int]:
        """int32 [B, Q], the budget that a reused row counts in, -1 for other rows; and how many."""
        keys = {
            "per_prompt": (self.prompt_BQ,),
            "per_branch": (self.prompt_BQ, self.branch_BQ),
            "per_chunk": (self.prompt_BQ, self.branch_BQ, self.chunk_BQ),
        }[budget]
        reused_BQ = self.role_BQ == RowRole.REUSED
        group_BQ = np.full(self.role_BQ.shape, -1, np.int32)
        key_XR = np.stack([key[reused_BQ] for key in keys])
        budgets, inverse = np.unique(key_XR, axis=1, return_inverse=True)
        group_BQ[reused_BQ] = inverse.reshape(-1)
        return group_BQ, budgets.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Blend:
    """Cached rows of one forward. Build it with `Blend.of`.

    rows: what each row is. cached: its R cached rows, protected and reused ones.
    index_R: int64, their flat indices (b * Q + q), increasing. group_R: int64, the budget each
        counts in; protected rows have the last one, which is always empty.
    counts_CG: for each check layer and budget how many rows are picked (host ints);
        quota_CG, start_G: int64, the same, and how many rows the budgets before have.
    suffix_M: bool [B * Q], the rows that every layer computes.
    budget_M: int32 on the host, the budget that each row counts in, -1 for rows without one.
    """

    settings: BlendSettings
    rows: BlendRows
    cached: ChunkKV
    index_R: Tensor
    group_R: Tensor
    counts_CG: tuple[tuple[int, ...], ...]
    quota_CG: Tensor
    start_G: Tensor
    suffix_M: Tensor
    budget_M: Ints

    @classmethod
    def of(cls, rows: BlendRows, cached: ChunkKV, settings: BlendSettings) -> "Blend":
        """Cached rows `cached`, in the order of the flat indices of `rows` that have one.

        Of a budget of n rows a check layer picks int(ratio * n): the product in float64, cut.

        Raises:
            ValueError: nothing is cached, a prompt has no suffix, or the numbers of cached rows
                differ.
        """
        rows.check()
        is_cached_BQ = np.isin(rows.role_BQ, (RowRole.PROTECTED, RowRole.REUSED))
        index_R = np.flatnonzero(is_cached_BQ)
        if index_R.size != cached.rows:
            raise ValueError(f"{index_R.size} rows are cached, but the cache holds {cached.rows}")
        group_BQ, groups = rows.groups(settings.budget)
        group_R = group_BQ.reshape(-1)[index_R]
        group_R = np.where(group_R < 0, groups, group_R)
        sizes_G = np.bincount(group_R, minlength=groups + 1)
        counts_CG = tuple(
            (*(int(ratio * int(size)) for size in sizes_G[:-1]), 0) for ratio in settings.ratios
        )
        suffix_BQ = rows.role_BQ == RowRole.SUFFIX
        device = cached.keys_LRgd.device
        return cls(
            settings,
            rows,
            cached,
            torch.tensor(index_R, device=device),
            torch.tensor(group_R, dtype=torch.int64, device=device),
            counts_CG,
            torch.tensor(counts_CG, dtype=torch.int64, device=device),
            torch.tensor(np.cumsum(sizes_G) - sizes_G, device=device),
            torch.tensor(suffix_BQ.reshape(-1), device=device),
            group_BQ.reshape(-1),
        )

    def width(self, rows_Gq: npt.NDArray[np.int64], check: int | None) -> int:
        """Most rows that one of these sequences can have left: its suffix and, behind check layer
        number `check`, what is picked. A budget may lie in several sequences; which of them gets
        how much of it is known on the device only, so each has room for all of it."""
        suffix_G = (self.rows.role_BQ.reshape(-1)[rows_Gq] == RowRole.SUFFIX).sum(1)
        if check is None:
            return int(suffix_G.max())
        counts_G = self.counts_CG[check]
        most = 0
        for suffix, budget_q in zip(suffix_G.tolist(), self.budget_M[rows_Gq], strict=True):
            there_G = np.bincount(budget_q[budget_q >= 0], minlength=len(counts_G))
            most = max(most, suffix + int(np.minimum(there_G, counts_G).sum()))
        return most

    def count(self, role: RowRole) -> int:
        """Rows of one kind."""
        return int((self.rows.role_BQ == role).sum())


@dataclass(frozen=True, slots=True, eq=False)
class BlendReport:
    """What a blended forward did.

    live_L: for each layer the rows whose new K and V went into the cache (host ints).
    picked: for each check layer the flat indices (b * Q + q) of the rows picked there, int64 on
        the device, increasing; the suffix is not among them.
    reused, protected, suffix: rows of each kind (host ints).
    """

    plan: LayerPlan
    live_L: tuple[int, ...]
    picked: dict[int, Tensor]
    reused: int
    protected: int
    suffix: int


def deviation(new: Pair, old: Pair, metric: Metric) -> Tensor:
    """[R], squared distance of K and V as computed from those cached, over all heads of a layer.

    K before RoPE deviates as much as K after it: both turn by the same angle. In float32 at least.
    """
    found_R = new[0].new_zeros(len(new[0]), dtype=torch.promote_types(new[0].dtype, torch.float32))
    for name, new_Rgd, old_Rgd in zip("kv", new, old, strict=True):
        if name in metric:
            gap_Rgd = new_Rgd.to(found_R.dtype) - old_Rgd.to(found_R.dtype)
            found_R += gap_Rgd.square().sum((1, 2))
    return found_R


def pick(deviation_R: Tensor, blend: Blend, check: int) -> Tensor:
    """bool [R], the rows that deviate most in each budget; of equals the one with a lower index.

    Args:
        check: the number of the check layer (0 for the first).
    """
    order_R = deviation_R.sort(descending=True, stable=True).indices
    order_R = order_R[blend.group_R[order_R].sort(stable=True).indices]
    group_R = blend.group_R[order_R]
    rank_R = torch.arange(len(order_R), device=order_R.device) - blend.start_G[group_R]
    wins_R = rank_R < blend.quota_CG[check][group_R]
    return torch.zeros_like(wins_R).scatter(0, order_R, wins_R)


def where_true(mask_R: Tensor, count: int) -> Tensor:
    """int64 [count], the indices of the `count` true entries, increasing; nothing is read back."""
    return (~mask_R).to(torch.int8).argsort(stable=True)[:count]

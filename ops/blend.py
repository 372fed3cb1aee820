"""Cached rows of a forward (CacheBlend): their roles, budgets, and which are recomputed.

The host knows the number of picked rows; only the device knows which rows they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .layer_plan import BlendSettings, LayerPlan, Metric

Ints = npt.NDArray[np.int32]
Pair = tuple[Tensor, Tensor]  # K before RoPE and V of one layer, each [rows, kv_heads, head_dim]


class RowRole(IntEnum):
    """A row of a blended forward is padding, of the suffix (always computed), protected (cached
    exactly: never picked), or reused (cached approximately: the check layer picks some)."""

    PADDING = 0
    SUFFIX = 1
    PROTECTED = 2
    REUSED = 3


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Cached rows, independent of their positions: K before RoPE, after a k_norm, and V, [layers,
    rows, kv_heads, head_dim]; the target's tapped hidden states for a drafter that reads them."""

    keys_LRgd: Tensor
    values_LRgd: Tensor
    features_RF: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.keys_LRgd.shape[1]

    @property
    def bytes(self) -> int:
        parts = (self.keys_LRgd, self.values_LRgd, self.features_RF)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def join(chunks: Sequence[ChunkKV]) -> ChunkKV:
    """Chunks concatenated; features only if all chunks have them."""
    features = [chunk.features_RF for chunk in chunks if chunk.features_RF is not None]
    return ChunkKV(
        torch.cat([chunk.keys_LRgd for chunk in chunks], 1),
        torch.cat([chunk.values_LRgd for chunk in chunks], 1),
        torch.cat(features) if len(features) == len(chunks) else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class BlendRows:
    """The roles of a forward's rows, int32 [B, Q] on the host; prompt_BQ, branch_BQ: request and
    owner of a row. chunk_BQ: for reused rows the number of their chunk in its branch."""

    role_BQ: Ints
    prompt_BQ: Ints
    branch_BQ: Ints
    chunk_BQ: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Blend:
    """Cached rows of one forward.

    cached, index_R, group_R: the R cached rows, int64, their increasing flat indices, and the
        budget of each: of protected rows the last, empty one.
    counts_CG, quota_CG: for each check layer and budget the number of picked rows, on the host and
        the device. start_G: int64, the number of rows in the budgets before each.
    suffix_M: bool [B * Q], the rows that every layer computes. budget_M: int32, host; or -1."""

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
        """Cached rows `cached`, in the order of their flat indices in `rows`. Of a budget of n rows
        a check layer picks int(ratio * n), computed in float64."""
        index_R = np.flatnonzero(np.isin(rows.role_BQ, (RowRole.PROTECTED, RowRole.REUSED)))
        depth = {"per_prompt": 1, "per_branch": 2, "per_chunk": 3}[settings.budget]
        keys = (rows.prompt_BQ, rows.branch_BQ, rows.chunk_BQ)[:depth]
        is_reused_BQ = rows.role_BQ == RowRole.REUSED
        budget_BQ = np.full(rows.role_BQ.shape, -1, np.int32)
        key_XR = np.stack([key[is_reused_BQ] for key in keys])
        budgets, inverse = np.unique(key_XR, axis=1, return_inverse=True)
        budget_BQ[is_reused_BQ] = inverse.reshape(-1)
        groups = budgets.shape[1]
        group_R = budget_BQ.reshape(-1)[index_R]
        group_R = np.where(group_R < 0, groups, group_R)
        sizes_G = np.bincount(group_R, minlength=groups + 1)
        counts_CG = tuple(
            (*(int(ratio * int(size)) for size in sizes_G[:-1]), 0) for ratio in settings.ratios
        )
        device = cached.keys_LRgd.device
        return cls(
            settings,
            rows,
            cached,
            torch.tensor(index_R, device=device),
            group_R=torch.tensor(group_R, dtype=torch.int64, device=device),
            counts_CG=counts_CG,
            quota_CG=torch.tensor(counts_CG, dtype=torch.int64, device=device),
            start_G=torch.tensor(np.cumsum(sizes_G) - sizes_G, device=device),
            suffix_M=torch.tensor((rows.role_BQ == RowRole.SUFFIX).reshape(-1), device=device),
            budget_M=budget_BQ.reshape(-1),
        )

    def width(self, rows_Gq: npt.NDArray[np.int64], check: int | None) -> int:
        """Most live rows of these sequences: the suffix and, after check layer number `check`, the
        picked rows. Only the device knows how sequences share a budget: each has room for it."""
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
        return int((self.rows.role_BQ == role).sum())


@dataclass(frozen=True, slots=True, eq=False)
class BlendReport:
    """The result of a blended forward: for each layer the number of rows with new K and V; for each
    check layer the increasing flat indices of its picked rows, int64 on the device; host ints."""

    plan: LayerPlan
    live_L: tuple[int, ...]
    picked: dict[int, Tensor]
    reused: int
    protected: int
    suffix: int


def deviation(new: Pair, old: Pair, metric: Metric) -> Tensor:
    """[R], squared distance of new K and V from the cached ones, over all heads of a layer, in
    float32 at least. K before RoPE deviates as much as after: both turn by the same angle."""
    wide = torch.promote_types(new[0].dtype, torch.float32)
    distance_R = new[0].new_zeros(len(new[0]), dtype=wide)
    for name, new_Rgd, old_Rgd in zip("kv", new, old, strict=True):
        if name in metric:
            distance_R += (new_Rgd.to(wide) - old_Rgd.to(wide)).square().sum((1, 2))
    return distance_R


def pick(deviation_R: Tensor, blend: Blend, check: int) -> Tensor:
    """bool [R], the rows of each budget that deviate most at a check layer, of equals the first."""
    order_R = deviation_R.sort(descending=True, stable=True).indices
    order_R = order_R[blend.group_R[order_R].sort(stable=True).indices]
    group_R = blend.group_R[order_R]
    rank_R = torch.arange(len(order_R), device=order_R.device) - blend.start_G[group_R]
    wins_R = rank_R < blend.quota_CG[check][group_R]
    return torch.zeros_like(wins_R).scatter(0, order_R, wins_R)


def where_true(mask_R: Tensor, count: int) -> Tensor:
    """int64 [count], the indices of the true entries, increasing, without a host read."""
    return (~mask_R).to(torch.int8).argsort(stable=True)[:count]

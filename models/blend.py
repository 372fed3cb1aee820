"""A forward on a blended cache (CacheBlend): what the plan says of each layer, as a layer hook.

Up to the first check layer all rows are computed. A check layer computes K and V of the remaining
rows, keeps the suffix and the cached rows that deviate most, and continues with those. Later layers
first put the cached rows into the pool, each key turned to its position, then compute the remaining
rows, over the cached ones where they are the same. Attention is the dense forward's, cut to these
rows. (The original code aligns them at the sequence's end: the mask `bottom_right`.)"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.attention.backends import AttentionPlan
from ..ops.attention.metadata import AttentionGroup
from ..ops.blend import Blend, BlendReport, RowRole, deviation, pick, where_true
from ..ops.kv.pool import KVCache
from ..ops.layer_plan import LayerPlan, LayerStatus
from .layers import AttentionInputs, LayerHook, PoolModel, rotate


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The N rows that a layer computes, group by group, each sequence's after padding.

    row_N: int64, which row of the forward each is (padding: one that is no longer computed).
    query_GW: for each group which of its q rows they are, int64 [G, W]. at_M: int64, for each of
    the forward's M = B * Q rows its index here; N if it was dropped. count: rows without padding
    (host int). whole: no row was dropped."""

    row_N: Tensor
    query_GW: tuple[Tensor, ...]
    at_M: Tensor
    count: int
    whole: bool


@dataclass(eq=False)
class Blender(LayerHook):
    """One blended forward; its arguments are those of `Decoder.forward`, for whose rows the chunk
    store has cached ones; live_L and picked are those of `BlendReport` for the layers so far."""

    model: PoolModel
    plan: LayerPlan
    positions_BQ: Tensor
    slots_BQ: Tensor
    attention: AttentionPlan
    kv: KVCache
    blend: Blend

    def __post_init__(self) -> None:
        self.positions_N = self.positions_BQ.flatten()
        self.slots_N = self.slots_BQ.flatten()
        self.angles = self.model.every_angles(self.positions_N[self.blend.index_R])
        self.slots_R = self.slots_N[self.blend.index_R]
        self.inputs = self.model.attention_inputs(self.positions_BQ, self.slots_BQ, self.attention)
        row_M = torch.arange(len(self.slots_N), device=self.slots_N.device)
        shapes = [group.mask_GqK.shape[:2] for group in self.attention.groups]
        queries = tuple(torch.arange(q, device=row_M.device).expand(g, q) for g, q in shapes)
        count = len(row_M) - self.blend.count(RowRole.PADDING)
        self.live = LiveRows(row_M, queries, row_M, count, whole=True)
        self.live_L: list[int] = []
        self.picked: dict[int, Tensor] = {}

    def first_rows(self, x_NH: Tensor) -> Tensor:
        """The rows that the first layer computes: of a plan that only reuses, the suffix."""
        if self.plan[0] != LayerStatus.REUSE:
            return x_NH
        return x_NH[self._narrow_(self.blend.suffix_M, None, self.blend.count(RowRole.SUFFIX))]

    def before_attention(
        self, index: int, x_NH: Tensor, qk_Nhd: Tensor, v_Ngd: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor, Tensor, AttentionInputs]:
        """Put the cached rows of a layer into the pool; a check layer drops rows."""
        live = self.live
        blend = self.blend
        if self.plan[index] != LayerStatus.CHECK:
            if not live.whole:
                self._write_cached_(index)
            self.live_L.append(live.count)
            return x_NH, qk_Nhd, v_Ngd, inputs
        keep_all = blend.settings.check_update == "full"
        if not (keep_all and live.whole):
            self._write_cached_(index)
        k_Ngd = qk_Nhd[:, -v_Ngd.shape[1] :]
        if keep_all:
            turned_Ngd = rotate(k_Ngd, inputs.cos_N1d, inputs.sin_N1d)
            self.kv.write_(index, inputs.slots_N, turned_Ngd.transpose(0, 1), v_Ngd.transpose(0, 1))
        number = len(self.picked)
        at_R, dropped_R1 = self.live_rows(blend.index_R)  # only live rows are picked
        old = blend.cached.keys_LRgd[index], blend.cached.values_LRgd[index]
        deviation_R = deviation((k_Ngd[at_R], v_Ngd[at_R]), old, blend.settings.metric)
        picked_R = pick(deviation_R.masked_fill(dropped_R1[:, 0], -1), blend, number)
        quota = sum(blend.counts_CG[number])
        keep_M = blend.suffix_M.scatter(0, blend.index_R, picked_R)
        count = blend.count(RowRole.SUFFIX) + quota
        kept_N = self._narrow_(keep_M, number, count)
        self.live_L.append(live.count if keep_all else count)
        self.picked[index] = blend.index_R[where_true(picked_R, quota)]
        inputs = self.inputs[self.model.kinds[index]]
        return x_NH[kept_N], qk_Nhd[kept_N], v_Ngd[kept_N], inputs

    def tap(self, x_NH: Tensor, number: int) -> Tensor:
        """Of live rows what they have, of others what is cached."""
        live = self.live
        if live.whole:
            return x_NH
        features_RF = self.blend.cached.features_RF
        assert features_RF is not None
        rows, width = x_NH.shape
        part_RH = features_RF[:, number * width : (number + 1) * width]
        cached_MH = x_NH.new_zeros(len(live.at_M), width).index_copy(0, self.blend.index_R, part_RH)
        fresh_MH = x_NH[live.at_M.clamp(max=rows - 1)]
        return torch.where((live.at_M < rows)[:, None], fresh_MH, cached_MH)

    def live_rows(self, index_R: Tensor) -> tuple[Tensor, Tensor]:
        """For rows of the forward their indices among the live ones, and bool [R, 1]: dropped."""
        at_R = self.live.at_M[index_R]
        rows = len(self.live.row_N)
        return at_R.clamp(max=rows - 1), (at_R == rows)[:, None]

    def report(self) -> BlendReport:
        counts = map(self.blend.count, (RowRole.REUSED, RowRole.PROTECTED, RowRole.SUFFIX))
        return BlendReport(self.plan, tuple(self.live_L), self.picked, *counts)

    def _narrow_(self, keep_M: Tensor, check: int | None, count: int) -> Tensor:
        """Only the `count` rows of `keep_M` stay -> their indices among the live rows before, int64
        [N]. check: number of the check layer that kept them, None for the suffix alone."""
        live = self.live
        rows: list[Tensor] = []
        queries: list[Tensor] = []
        valid: list[Tensor] = []
        groups: list[AttentionGroup] = []
        first = 0
        here_M = torch.arange(len(keep_M), device=keep_M.device)
        for group, query_GV in zip(self.attention.groups, live.query_GW, strict=True):
            row_GV = group.of_rows(here_M).gather(1, query_GV)
            keep_GV = keep_M[row_GV]
            width = self.blend.width(group.host_rows_Gq, check)
            order_GW = keep_GV.to(torch.int8).argsort(dim=1, stable=True)[:, -width:]
            query_GW = query_GV.gather(1, order_GW)
            rows.append(row_GV.gather(1, order_GW).flatten())
            queries.append(query_GW)
            valid.append(keep_GV.gather(1, order_GW).flatten())
            mask_GWK = group.mask_GqK.take_along_dim(query_GW[..., None], 1)
            if self.blend.settings.mask == "bottom_right":
                # row i of n sees all that the last row sees, up to n-1-i positions before it
                back_W1 = torch.arange(1 - query_GW.shape[1], 1, device=here_M.device)[:, None]
                limit_1W1 = self.positions_BQ[:, -1:, None] + back_W1
                mask_GWK = group.mask_GqK[:, -1:] & (group.positions_GK[:, None] <= limit_1W1)
            rows_N = torch.arange(first, first + query_GW.numel(), device=query_GW.device)
            rows_GW = None if len(self.attention.groups) == 1 else rows_N.view(query_GW.shape)
            groups.append(replace(group, rows_Gq=rows_GW, mask_GqK=mask_GWK))
            first += query_GW.numel()
        row_N = torch.cat(rows)
        valid_N = torch.cat(valid)
        here_N = torch.arange(len(row_N), device=row_N.device).where(valid_N, len(row_N))
        at_M = torch.full_like(live.at_M, len(row_N)).scatter(0, row_N, here_N)
        slots_N = self.slots_N[row_N].where(valid_N, self.kv.scratch)
        attention = replace(self.attention, groups=tuple(groups))
        self.inputs = self.model.attention_inputs(self.positions_N[row_N], slots_N, attention)
        self.live = LiveRows(row_N, tuple(queries), at_M, count, whole=False)
        return live.at_M[row_N].clamp(max=len(live.row_N) - 1)

    def _write_cached_(self, layer: int) -> None:
        """All cached rows of a layer into the pool, keys turned to their positions."""
        angles = self.angles[self.model.kinds[layer].rope]
        turned_Rgd = rotate(self.blend.cached.keys_LRgd[layer], *angles)
        values_gRd = self.blend.cached.values_LRgd[layer].transpose(0, 1)
        self.kv.write_(layer, self.slots_R, turned_Rgd.transpose(0, 1), values_gRd)

"""A forward on a blended cache (CacheBlend): layer by layer, what the plan says.

Up to the first check layer all rows are computed. A check layer computes K and V of the rows that
are left, keeps the suffix and the cached rows that deviate most, and goes on with those. Later
layers first put the cached rows into the pool, each key turned to its position, and then compute
their own rows as ever, over the cached ones where they are the same.

Attention is that of the dense forward cut to the rows that are left: what a row sees goes by true
positions. (The original code aligns the rows at the sequence's end, by which picked rows see later
ones: the mask `bottom_right`.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.metadata import AttentionGroup, AttentionMetadata
from ..ops.blend import Blend, BlendReport, RowRole, deviation, pick, where_true
from ..ops.forward import TargetOutput
from ..ops.kv.pool import KVCache
from ..ops.layer_plan import LayerPlan, LayerStatus, compile_layer_plan
from .layers import AttentionInputs, DecoderLayer
from .rope import rotate
from .stack import DecoderStack


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows that a layer computes, group by group; each sequence of a group has its rows at the
    right end, behind padding. N of all groups.

    row_N: int64, which row of the forward each is (padding: one that nobody computes any more).
    query_GW: for each group which of its q rows they are, int64 [G, W].
    at_M: int64, for each of the forward's M = B * Q rows where it is among these; N if it is not.
    count: rows that are no padding (host int). whole: nobody was dropped yet.
    """

    row_N: Tensor
    query_GW: tuple[Tensor, ...]
    at_M: Tensor
    count: int
    whole: bool
    inputs: dict[bool, AttentionInputs]


class Blender:
    """One blended forward: what its layers share, and the rows between two of them.

    Its arguments are those of `Target.forward`, checked by `check_blend`.
    x_NH: the live rows, [N, H]. live_L, picked: of the layers so far, as in `BlendReport`.
    """

    def __init__(
        self,
        decoder: DecoderStack,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionMetadata,
        kv: KVCache,
        blend: Blend,
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.kv = kv
        self.blend = blend
        self.positions_BQ = positions_BQ
        self.slots_BQ = slots_BQ
        self.angles_R = decoder.angles(positions_BQ.flatten()[blend.index_R])
        self.slots_R = slots_BQ.flatten()[blend.index_R]
        self.x_NH, self.live = F.embedding(tokens_BQ.flatten(), decoder.embed), self._everything()
        self.live_L = list[int]()
        self.picked = dict[int, Tensor]()

    def forward(self, plan: LayerPlan, logit_rows_R: Tensor, taps: tuple[int, ...]) -> TargetOutput:
        """See `Target.forward`."""
        decoder = self.decoder
        blend = self.blend
        taps_MH = list[Tensor]()
        if plan[0] == LayerStatus.REUSE:  # nothing but the suffix is computed
            count = blend.count(RowRole.SUFFIX)
            self.x_NH = self.x_NH[self._narrow_(blend.suffix_M, None, count)]
        for index, status in enumerate(plan):
            if index in taps:
                taps_MH.append(self._tap(self.x_NH, len(taps_MH)))
            layer_ = self._check_ if status == LayerStatus.CHECK else self._compute_
            layer_(index)
        if decoder.num_layers in taps:
            taps_MH.append(self._tap(decoder.norm(self.x_NH), len(taps_MH)))
        roles = RowRole.REUSED, RowRole.PROTECTED, RowRole.SUFFIX
        return TargetOutput(
            self._logits(logit_rows_R),
            torch.cat(taps_MH, -1) if taps_MH else None,
            BlendReport(plan, tuple(self.live_L), self.picked, *map(blend.count, roles)),
        )

    def _everything(self) -> LiveRows:
        """All rows of the forward, in their order."""
        device = self.slots_BQ.device
        row_M = torch.arange(self.slots_BQ.numel(), device=device)
        queries = tuple(
            torch.arange(group.mask_GqK.shape[1], device=device).expand(group.mask_GqK.shape[:2])
            for group in self.attention.groups
        )
        inputs = self.decoder.attention_inputs(self.positions_BQ, self.slots_BQ, self.attention)
        count = len(row_M) - self.blend.count(RowRole.PADDING)
        return LiveRows(row_M, queries, row_M, count, True, inputs)

    def _narrow_(self, keep_M: Tensor, check: int | None, count: int) -> Tensor:
        """The rows of `keep_M` alone live on -> where these were among the rows before (int64 [N]).

        Args:
            check: number of the check layer that kept them, None for the suffix alone.
            count: kept rows over all.
        """
        live = self.live
        rows = list[Tensor]()
        queries = list[Tensor]()
        valid = list[Tensor]()
        here_M = torch.arange(len(keep_M), device=keep_M.device)
        for group, query_GV in zip(self.attention.groups, live.query_GW, strict=True):
            row_GV = group.of_rows(here_M).gather(1, query_GV)
            keep_GV = keep_M[row_GV]
            width = self.blend.width(group.host_rows_Gq, check)
            order_GW = keep_GV.to(torch.int8).argsort(dim=1, stable=True)[:, -width:]
            rows.append(row_GV.gather(1, order_GW))
            queries.append(query_GV.gather(1, order_GW))
            valid.append(keep_GV.gather(1, order_GW).flatten())
        row_N = torch.cat([part.flatten() for part in rows])
        valid_N = torch.cat(valid)
        here_N = torch.arange(len(row_N), device=row_N.device).where(valid_N, len(row_N))
        at_M = torch.full_like(live.at_M, len(row_N)).scatter(0, row_N, here_N)
        inputs = self._inputs(row_N, valid_N, queries)
        self.live = LiveRows(row_N, tuple(queries), at_M, count, False, inputs)
        return live.at_M[row_N].clamp(max=len(live.row_N) - 1)

    def _inputs(
        self, row_N: Tensor, valid_N: Tensor, queries: Sequence[Tensor]
    ) -> dict[bool, AttentionInputs]:
        """What these rows see: their part of the forward's masks."""
        groups = list[AttentionGroup]()
        first = 0
        for group, query_GW in zip(self.attention.groups, queries, strict=True):
            mask_GWK = group.mask_GqK.take_along_dim(query_GW[..., None], 1)
            if self.blend.settings.mask == "bottom_right":
                mask_GWK = self._bottom_right(query_GW.shape[1])
            rows_GW = torch.arange(first, first + query_GW.numel(), device=row_N.device)
            rows_GW = rows_GW.view(query_GW.shape)
            first = first + query_GW.numel()
            alone = None if len(queries) == 1 else rows_GW
            groups.append(replace(group, rows_Gq=alone, mask_GqK=mask_GWK))
        positions_N = self.positions_BQ.flatten()[row_N]
        slots_N = self.slots_BQ.flatten()[row_N].where(valid_N, self.kv.scratch)
        attention = AttentionMetadata(tuple(groups))
        return self.decoder.attention_inputs(positions_N, slots_N, attention)

    def _bottom_right(self, width: int) -> Tensor:
        """bool [1, W, K]: row i of n sees all that the last row of the sequence sees, up to n-1-i
        positions before it."""
        (group,) = self.attention.groups
        back_W1 = torch.arange(1 - width, 1, device=self.positions_BQ.device)[:, None]
        limit_1W1 = self.positions_BQ[:, -1:, None] + back_W1
        return group.mask_GqK[:, -1:] & (group.positions_GK[:, None] <= limit_1W1)

    def _write_cached_(self, layer: int) -> None:
        """All cached rows of a layer into the pool, keys turned to their positions."""
        cached = self.blend.cached
        keys_Rgd = rotate(cached.keys_LRgd[layer], *self.angles_R)
        values_gRd = cached.values_LRgd[layer].transpose(0, 1)
        self.kv.write_(layer, self.slots_R, keys_Rgd.transpose(0, 1), values_gRd)

    def _compute_(self, index: int) -> None:
        """A layer that computes the rows there are and leaves it at that."""
        live = self.live
        layer = self.decoder.layers[index]
        if not live.whole:
            self._write_cached_(index)
        slides = self.decoder.config.sliding[index]
        self.x_NH = layer(self.x_NH, index, live.inputs[slides], self.kv)
        self.live_L.append(live.count)

    def _check_(self, index: int) -> None:
        """A check layer: K and V of the rows there are; only some of these go on."""
        layer = self.decoder.layers[index]
        blend = self.blend
        kv = self.kv
        assert isinstance(layer, DecoderLayer)
        live = self.live
        number = len(self.picked)
        keep_all = blend.settings.check_update == "full"
        slides = self.decoder.config.sliding[index]
        if not (keep_all and live.whole):
            self._write_cached_(index)
        qk_Nhd, v_Ngd = layer.project(self.x_NH)
        if keep_all:
            layer.write_(qk_Nhd, v_Ngd, index, live.inputs[slides], kv)
        picked_R = self._pick(qk_Nhd[:, layer.heads :], v_Ngd, index, number)
        quota = sum(blend.counts_CG[number])
        keep_M = blend.suffix_M.scatter(0, blend.index_R, picked_R)
        count = blend.count(RowRole.SUFFIX) + quota
        kept_N = self._narrow_(keep_M, number, count)
        seen_NI = layer.see(qk_Nhd[kept_N], v_Ngd[kept_N], index, self.live.inputs[slides], kv)
        self.x_NH = layer.finish(self.x_NH[kept_N], seen_NI)
        self.live_L.append(live.count if keep_all else count)
        self.picked[index] = blend.index_R[where_true(picked_R, quota)]

    def _pick(self, k_Ngd: Tensor, v_Ngd: Tensor, index: int, number: int) -> Tensor:
        """bool [R], the cached rows that are computed further; only among those computed now."""
        blend = self.blend
        cached = self.blend.cached
        at_R = self.live.at_M[blend.index_R]
        gone_R = at_R == len(k_Ngd)
        at_R = at_R.where(~gone_R, 0)
        old = cached.keys_LRgd[index], cached.values_LRgd[index]
        deviation_R = deviation((k_Ngd[at_R], v_Ngd[at_R]), old, blend.settings.metric)
        return pick(deviation_R.masked_fill(gone_R, -1), blend, number)

    def _tap(self, x_NH: Tensor, number: int) -> Tensor:
        """[M, H], the `number`-th tap: of live rows what they have, of others what is cached."""
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

    def _logits(self, logit_rows_R: Tensor) -> Tensor:
        """NaN for rows that were not computed to the end: nobody can use them by mistake."""
        at_R = self.live.at_M[logit_rows_R]
        rows = len(self.x_NH)
        logits_RV = self.decoder.logits(self.x_NH[at_R.clamp(max=rows - 1)])
        return logits_RV.masked_fill((at_R == rows)[:, None], float("nan"))


def check_blend(
    decoder: DecoderStack, tokens_BQ: Tensor, plan: LayerPlan, taps: tuple[int, ...], blend: Blend
) -> None:
    """Raise ValueError if the cached rows, the plan and the model do not fit together."""
    settings = blend.settings
    cached = blend.cached
    compiled = compile_layer_plan(settings, decoder.num_layers)
    if plan != compiled:
        ours, theirs = (list(map(int, one)) for one in (plan, compiled))
        raise ValueError(f"the layer plan {ours} is not the blend's {theirs}")
    if blend.rows.role_BQ.shape != tokens_BQ.shape:
        raise ValueError(
            f"the blend is for {blend.rows.role_BQ.shape} rows, not for {tuple(tokens_BQ.shape)}"
        )
    shape = (decoder.num_layers, cached.rows, decoder.kv_heads, decoder.head_dim)
    model = decoder.embed
    for name, value in (("keys", cached.keys_LRgd), ("values", cached.values_LRgd)):
        if (value.shape, value.dtype, value.device) != (shape, model.dtype, model.device):
            raise ValueError(
                f"the cached {name} are {tuple(value.shape)} in {value.dtype} on {value.device}, "
                f"the model has {shape} in {model.dtype} on {model.device}"
            )
    if settings.mask == "bottom_right" and any(decoder.config.sliding):
        raise ValueError(
            f"`mask: bottom_right` cannot have the model's sliding window {decoder.config.window}"
        )
    features = None if cached.features_RF is None else tuple(cached.features_RF.shape)
    needed = cached.rows, len(set(taps)) * decoder.hidden_size
    if taps and features != needed:
        raise ValueError(f"the cached features are {features}, the drafter needs {needed}")

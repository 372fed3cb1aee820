"""The target's forward as ops, the counted read of its results, and the best of many scores."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .attention.backends import AttentionPlan, backend
from .attention.metadata import AttentionMetadata, TreeMask
from .blend import BlendReport
from .kv.pool import KVCache
from .layer_plan import LayerPlan, LayerStatus, compile_layer_plan
from .registry import op
from .types import Rows

# Models, which ops call and do not import; the classes in `models` document their methods.
Target = Any  # `decoder.Decoder`: the model whose output counts, and a drafter of chains
HiddenDrafter = Any  # `drafters.eagle.EagleHead`: it continues on its own hidden states
BlockDrafter = Any  # `drafters.dflash.DFlashDraftModel`: it fills a block in one forward


BLOCK = 64  # scores whose highest is compared first
FEW = 1 << 15  # scores that torch compares as fast


@dataclass(slots=True)
class HostReader:
    """The only way to the host for device values: `reads`, one per round; `full_reads` of rows."""

    reads: int = 0
    full_reads: int = 0

    def read(self, values: Tensor) -> npt.NDArray[np.int64]:
        """A device tensor of integers as a host array (one synchronisation)."""
        self.reads += 1
        host: npt.NDArray[np.int64] = values.cpu().numpy()
        return host

    def read_all(self, values: Iterable[Tensor]) -> list[npt.NDArray[np.int64]]:
        """The integers of several device tensors as host arrays of their shapes, in one read."""
        parts = list(values)
        filled = [part.reshape(-1).long() for part in parts if part.numel()]
        flat = self.read(torch.cat(filled or [parts[0].reshape(-1)]))
        arrays = []
        start = 0
        for part in parts:
            arrays.append(flat[start : start + part.numel()].reshape(part.shape))
            start += part.numel()
        return arrays

    def read_order(self, scores_V: Tensor) -> npt.NDArray[np.int64]:
        """All token ids of one score row, best first: only when a grammar forbids the best ones."""
        self.full_reads += 1
        host: npt.NDArray[np.int64] = scores_V.argsort(descending=True, stable=True).cpu().numpy()
        return host


class TargetOutput(NamedTuple):
    """Logits of the requested rows in float32 (of float64 models float64), taps of every row."""

    logits_RV: Tensor
    taps_QF: Tensor | None
    blend: BlendReport | None = None


@op("mask.build", writes="attention")
def plan_attention(rows: Rows, kv: KVCache, *, attention: str = "auto") -> AttentionPlan:
    """Plan the attention of a forward; `attention` is the backend's name."""
    readable = kv.committed.copy()
    readable[rows.prompt_slots] = True
    tree = None
    if rows.packed_trees is not None:
        tree = TreeMask(
            rows_ST=rows.node_rows_ST.reshape(1, -1),
            slots_ST=rows.node_slots_ST.reshape(1, -1),
            visible_STT=rows.packed_trees.visible(rows.ancestors_STT)[None],
            positions_ST=rows.positions_BQ[:1, : rows.node_rows_ST.size],
            segment_R=rows.tree_segment_R,
        )
    elif not readable[rows.node_slots_ST].all():
        tree = TreeMask(
            rows_ST=rows.node_rows_ST,
            slots_ST=rows.node_slots_ST,
            visible_STT=rows.ancestors_STT,
            positions_ST=rows.of_trees(rows.positions_BQ),
            roots_shared=rows.live is not None,
        )
    metadata = AttentionMetadata(
        kv=kv,
        sequences=rows.sequences,
        visibility=rows.visibility,
        segment_N=rows.segment_N,
        positions_N=rows.positions_BQ.view(-1),
        readable=readable,
        tree=tree,
        equal_lengths=rows.blend is not None,
    )
    return backend(attention).plan(metadata)


@op("plan.compile", writes="plan")
def compile_plan(target: Target, rows: Rows) -> LayerPlan:
    """One status per layer: DECODE with trees, else FULL; with cached rows, by their settings."""
    layers: int = target.num_layers
    if rows.blend is not None:
        return compile_layer_plan(rows.blend.settings, layers)
    return (LayerStatus.DECODE if rows.trees else LayerStatus.FULL,) * layers


@op("target.forward_", writes="logits features blended", drops="attention plan")
def forward_(
    target: Target,
    rows: Rows,
    attention: AttentionPlan,
    plan: LayerPlan,
    kv: KVCache,
    taps: tuple[int, ...],
) -> tuple[Tensor, Tensor | None, BlendReport | None]:
    """All rows through the target once; K and V go into the pool.

    Returns logits_RV of the tree rows, then the prefill tips; taps_QF of all rows, if a drafter
        reads them; the report on cached rows."""
    if not rows.tokens_BQ.numel():  # every request was refused
        return torch.zeros(0, target.vocab_size, device=rows.tokens_BQ.device), None, None
    some = rows.packed_trees or rows.live
    node_rows = rows.nodes_ST.view(-1) if some is None else some.rows
    inputs = rows.tokens_BQ, rows.positions_BQ, rows.slots_BQ, attention
    rows_R = torch.cat([node_rows, rows.tips_R])
    taps = taps if rows.tapped else ()
    output = target.forward(
        *inputs, kv=kv, plan=plan, logit_rows_R=rows_R, taps=taps, blend=rows.blend
    )
    logits_RV = output.logits_RV if some is None else some.spread(output.logits_RV)
    return logits_RV, output.taps_QF, output.blend


def largest(scores_XV: Tensor) -> Tensor:
    """int64 [...]: the index of the highest score, of equals the smallest."""
    if not _in_blocks(scores_XV):
        return scores_XV.argmax(-1)
    scores_XBb = torch.unflatten(scores_XV, -1, (-1, BLOCK))
    block_X1 = scores_XBb.amax(-1).argmax(-1, keepdim=True)
    index_X1b = block_X1[..., None].expand(*block_X1.shape, BLOCK)
    inside_X1 = scores_XBb.gather(-2, index_X1b).argmax(-1)
    index_X: Tensor = (block_X1 * BLOCK + inside_X1).squeeze(-1)
    return index_X


def top(scores_XV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores, best first, and their indices, int64, [..., count] each; the
    order of equals is open."""
    size = scores_XV.shape[-1]
    if size <= count * BLOCK or not _in_blocks(scores_XV):
        best = scores_XV.topk(min(count, size), dim=-1)
        return best.values, best.indices
    scores_XBb = torch.unflatten(scores_XV, -1, (-1, BLOCK))
    block_XC = scores_XBb.amax(-1).topk(count, dim=-1).indices
    index_XCb = block_XC[..., None].expand(*block_XC.shape, BLOCK)
    best = scores_XBb.gather(-2, index_XCb).flatten(-2).topk(count, dim=-1)
    index_XC = block_XC.gather(-1, best.indices // BLOCK) * BLOCK + best.indices % BLOCK
    return best.values, index_XC


def _in_blocks(scores_XV: Tensor) -> bool:
    """Whether it is faster to find the blocks with the highest scores first."""
    whole = scores_XV.shape[-1] % BLOCK == 0
    return whole and scores_XV.is_cpu and scores_XV.numel() >= FEW

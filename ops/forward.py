"""The target's forward as ops: the plan of its layers, and the forward itself."""

import torch
from torch import Tensor

from .attention.metadata import AttentionMetadata
from .blend.blend import BlendReport
from .blend.layer_plan import compile_layer_plan
from .kv.pool import KVCache
from .model_types import Target
from .registry import op
from .types import LayerPlan, LayerStatus, Rows


@op("plan.compile", writes="plan")
def compile_plan(target: Target, rows: Rows) -> LayerPlan:
    """One status per layer: DECODE when trees are verified, FULL for a prefill alone; with cached
    rows, that of the settings they are reused by."""
    if rows.blend is not None:
        return compile_layer_plan(rows.blend.settings, target.num_layers)
    status = LayerStatus.DECODE if rows.trees else LayerStatus.FULL
    return (status,) * target.num_layers


@op("target.forward_", writes="logits features blended", drops="attention plan")
def forward_(
    target: Target,
    rows: Rows,
    attention: AttentionMetadata,
    plan: LayerPlan,
    kv: KVCache,
    taps: tuple[int, ...],
) -> tuple[Tensor, Tensor | None, BlendReport | None]:
    """All rows through the target once; K and V go into the pool.

    Returns:
        logits_RV for the tree rows and then the prefill tips; taps_QF for all rows (None without
        a drafter that asks for features); what was reused of cached rows.
    """
    if not rows.tokens_BQ.numel():  # nobody could start: everyone was refused
        return torch.zeros(0, target.vocab_size, device=rows.tokens_BQ.device), None, None
    some = rows.live if rows.forest is None else rows.forest
    node_rows = rows.nodes_ST.view(-1) if some is None else some.rows
    output = target.forward(
        rows.tokens_BQ,
        rows.positions_BQ,
        rows.slots_BQ,
        attention,
        kv,
        plan,
        torch.cat([node_rows, rows.tips_R]),
        taps,
        rows.blend,
    )
    logits_RV = output.logits_RV if some is None else some.spread(output.logits_RV)
    return logits_RV, output.taps_QF, output.blend

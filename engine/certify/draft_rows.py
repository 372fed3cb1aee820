"""Whether a drafter knows the text that it drafts for.

A stale or misplaced row in the drafter's pool changes no token, it only makes drafts worse, so no
comparison of answers can find it. Here a branch's rows are computed again, by target and drafter
over the branch's ids alone, and held against what the pool has.
"""

import torch
from torch import Tensor

from ...ops.attention.metadata import AttentionMetadata
from ...ops.types import LayerStatus
from ...states.machine import Run
from ...states.requests.branch import Branch
from ..bench.sides import Side
from ..models import Models, new_pool
from ..run.contexts import contexts, full_prefill


def off_by(side: Side, run: Run, branch: Branch) -> float | None:
    """The largest difference of any number, as a share of the largest number; inf if rows are
    missing or too many, None if the drafter keeps none.

    Asked right after the drafter took in what was committed.
    """
    pool, book = run.board["kv_draft"], run.board["branches"]
    if pool is None:
        return None
    context = dict(contexts(branch.request, side.session.prompts))[branch]
    takes = book.limits.drafter.takes
    rows = branch.length + (takes == "text")  # such a drafter has read the root token too
    (row,) = book.layout.rows_of(branch.owner)
    owners = (branch.request.prefix_owner, branch.owner)
    slots = [slot for owner in owners for slot in pool.slots_of(owner, row).tolist()]
    if pool.position[slots].tolist() != list(range(rows)):
        return float("inf")
    stored = pool.data[:, :, :, slots]
    with torch.inference_mode():
        fresh = fresh_rows(side.session.models, takes, [*context, *branch.tokens], rows)
    off = ((stored - fresh).abs().max() / fresh.abs().max()).nan_to_num(nan=torch.inf)
    return float(off)


def fresh_rows(models: Models, takes: str, ids: list[int], rows: int) -> Tensor:
    """[layers, 2, kv_heads, rows, head_dim]: what the drafter keeps of the first rows of a text.

    Args:
        takes: of the drafter (`drafter_spec.Drafter`). ids: one more than rows, if it pairs.
    """
    drafter, device = models.drafter, models.device
    kv = new_pool(drafter, rows, 1, models)
    ids_1Q = torch.tensor([ids[:rows]], device=device)
    steps_1Q = torch.arange(rows, device=device)[None]
    attention = AttentionMetadata.causal(rows, device)
    if takes == "text":
        plan = (LayerStatus.FULL,) * drafter.num_layers
        drafter.forward(ids_1Q, steps_1Q, steps_1Q, attention, kv, plan, steps_1Q[0, -1:], ())
        return kv.data[:, :, :, :rows]
    output, _ = full_prefill(models.target, ids[:rows], models.dtype, device, drafter.tap_ids)
    fused_QH = drafter.fuse(output.taps_QF)
    if takes == "features":
        drafter.write_context_(fused_QH, steps_1Q[0], steps_1Q[0], kv)
    else:
        following_1Q = torch.tensor([ids[1 : rows + 1]], device=device)
        drafter.forward(following_1Q, fused_QH[None], steps_1Q, steps_1Q, attention, kv)
    return kv.data[:, :, :, :rows]

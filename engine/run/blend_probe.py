"""`--probe-blend`: compare blended prompts with full prefills, in pools of their own."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...ops.blend import RowRole
from ...ops.kv.pool import Ints, KVCache
from ...ops.types import Rows
from ...states.machine import Event, OpRan
from ...states.request import Request
from ..record.metrics import ProbeFigures
from .core import EngineCore
from .scoring import full_prefill


def probe_blends(core: EngineCore) -> ProbeFigures:
    """Compare each forward of this run with cached rows; the returned figures grow with the run."""
    figures = ProbeFigures()
    before = core.sink

    def sink(event: Event) -> None:
        before(event)
        # Before the commit: a branch that ends with its first token releases its rows there.
        forward = isinstance(event, OpRan) and event.op == "target.forward_"
        if forward and core.board["rows"].blend is not None:
            _compare(figures, core)

    core.sink = sink
    return figures


def _compare(figures: ProbeFigures, core: EngineCore) -> None:
    rows = core.board["rows"]
    kv = core.board["kv"]
    cached = _cached(rows)
    # [V] logits of each branch that draws its first token; they follow the rows of the trees.
    owners = rows.owner_N[rows.tips_R.cpu().numpy()].tolist()
    logits_RV = core.board["logits"]
    tips = dict(zip(owners, logits_RV[logits_RV.shape[0] - len(owners) :], strict=True))
    for owner, prefix, ids in _prompts(core.requests):
        draws = owner in tips and (owner in cached or prefix in cached)
        if not (draws or owner in cached):
            continue
        output, full = full_prefill(core.board["target"], ids, kv.data.dtype, kv.data.device)
        if owner in cached:
            slots, positions = cached[owner]
            full_L2x = _rows(full, positions)
            error_L2x = _rows(kv, slots) - full_L2x
            figures.errors.append(error_L2x.norm(dim=-1) / full_L2x.norm(dim=-1))
            figures.rows += slots.size
        if draws:
            logs_V = output.logits_RV[0].double().log_softmax(-1)
            blended_V = tips[owner].double().log_softmax(-1)
            # Ids without a token (-inf) count 0.
            terms_V = torch.where(logs_V > -torch.inf, logs_V.exp() * (logs_V - blended_V), 0.0)
            figures.kl.append(float(terms_V.sum().clamp(min=0)))


def _cached(rows: Rows) -> dict[int, tuple[Ints, Ints]]:
    """Slots and positions of each owner's reused rows; of the first copy if there are several."""
    assert rows.blend is not None
    role_M, branch_M = (a.reshape(-1) for a in (rows.blend.rows.role_BQ, rows.blend.rows.branch_BQ))
    slot_M, position_M = (
        values_BQ.reshape(-1).cpu().numpy() for values_BQ in (rows.slots_BQ, rows.positions_BQ)
    )
    reused: dict[int, tuple[Ints, Ints]] = {}
    for branch in np.unique(branch_M[role_M == RowRole.REUSED]):
        index = np.flatnonzero((branch_M == branch) & (role_M == RowRole.REUSED))
        reused.setdefault(int(rows.owner_N[index[0]]), (slot_M[index], position_M[index]))
    return reused


def _prompts(requests: Sequence[Request]) -> Iterator[tuple[int, int, list[int]]]:
    for request in requests:
        prefix = request.prefix_owner
        yield prefix, prefix, request.context
        for branch in request.all_branches():
            yield branch.owner, prefix, branch.context()


def _rows(pool: KVCache, slots: Ints) -> Tensor:
    slots_R = torch.as_tensor(slots.astype(np.int64), device=pool.data.device)
    return pool.data.index_select(3, slots_R).flatten(2).double()

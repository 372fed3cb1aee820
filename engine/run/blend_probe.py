"""`--probe-blend`: what was blended is also computed in full, and the two are compared.

The full prefills have pools of their own and draw nothing, so the run is the same with a probe and
without. It reads values off the device and takes as long as these prefills do.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ops.blend import RowRole
from ...ops.kv.pool import KVCache
from ...ops.kv.slots import Ints
from ...ops.types import Rows
from ...states.machine import Run
from ...states.request import Request
from ...states.trace import Event, OpRan
from ..record.metrics import ProbeFigures, divergence, relative_errors
from .contexts import full_prefill


def probe_blends(run: Run) -> ProbeFigures:
    """Let this run's forwards with cached rows be compared with full prefills.

    What is found is returned at once, and grows with the run.
    """
    probed = ProbeFigures()
    before = run.sink

    def sink(event: Event) -> None:
        before(event)
        # Before the commit: branches that end with their first token lose their rows there.
        forward = isinstance(event, OpRan) and event.op == "target.forward_"
        if forward and run.board["rows"].blend is not None:
            _compare(probed, run.board)

    run.sink = sink
    return probed


def _compare(probed: ProbeFigures, board: Mapping[str, Any]) -> None:
    rows = board["rows"]
    kv = board["kv"]
    cached = _cached(rows)
    tips = _tips(rows, board["logits"])
    for owner, prefix, ids in _prompts(board["branches"].requests):
        draws = owner in tips and (owner in cached or prefix in cached)
        if not (draws or owner in cached):
            continue
        output, full = full_prefill(board["target"], ids, kv.data.dtype, kv.data.device)
        if owner in cached:
            slots, positions = cached[owner]
            probed.errors.append(relative_errors(_rows(kv, slots), _rows(full, positions)))
            probed.rows += slots.size
        if draws:
            probed.kl.append(divergence(_log(output.logits_RV[0]), _log(tips[owner])))


def _cached(rows: Rows) -> dict[int, tuple[Ints, Ints]]:
    """Slots and positions of every owner's reused rows; of several copies those of the first."""
    assert rows.blend is not None
    role_M, branch_M = (a.reshape(-1) for a in (rows.blend.rows.role_BQ, rows.blend.rows.branch_BQ))
    slot_M, position_M = (
        values_BQ.reshape(-1).cpu().numpy() for values_BQ in (rows.slots_BQ, rows.positions_BQ)
    )
    reused: dict[int, tuple[Ints, Ints]] = {}
    for branch in np.unique(branch_M[role_M == RowRole.REUSED]):
        mine = np.flatnonzero((branch_M == branch) & (role_M == RowRole.REUSED))
        reused.setdefault(int(rows.owner_N[mine[0]]), (slot_M[mine], position_M[mine]))
    return reused


def _tips(rows: Rows, logits_RV: Tensor) -> dict[int, Tensor]:
    """[V] of every branch that draws its first token; they stand behind the trees' rows."""
    owners = rows.owner_N[rows.tips_R.cpu().numpy()].tolist()
    return dict(zip(owners, logits_RV[logits_RV.shape[0] - len(owners) :], strict=True))


def _prompts(requests: Sequence[Request]) -> Iterator[tuple[int, int, list[int]]]:
    """(owner, owner of its prefix, all token ids so far) of everybody there is."""
    for request in requests:
        prefix = request.prefix_owner
        yield prefix, prefix, request.context
        for branch in request.all_branches():
            yield branch.owner, prefix, branch.context()


def _rows(pool: KVCache, slots: Ints) -> Tensor:
    """[L, 2, x], float64."""
    slots_R = torch.as_tensor(slots.astype(np.int64), device=pool.data.device)
    return pool.data.index_select(3, slots_R).flatten(2).double()


def _log(logits_V: Tensor) -> Tensor:
    return logits_V.double().log_softmax(-1)

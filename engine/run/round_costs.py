"""What forwards of a target and its drafter cost on this machine, by their rows."""

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ...models.files import ModelError
from ...ops.draft.costs import Curve, RoundCosts
from ...ops.layer_plan import LayerStatus
from ...ops.masks import build
from ...ops.types import Rows
from ...states.graph.drafter_spec import Drafter
from ...states.layout import Layout, Span
from ...states.segments import SegmentTree
from ..models import Models
from ..pools import new_pool

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FIRST = (1, 16, 4, 64, 8, 2, 32)  # the order in which points are measured, while there is time
BEHIND = 64  # tokens that stand before the rows
SECONDS = 1.5  # for one model; two points are measured in any case
REPEATS = 5  # of each point, of which the fastest counts: others only add to it

Forward = Callable[[Rows, Any], Tensor]


def costs_of(models: Models, block: Drafter, drafter: Any) -> RoundCosts | None:
    """As the graph says, or measured; None for a drafter that does not choose by it.

    Raises:
        ModelError: several ranks would measure, each for itself, and decide differently.
    """
    if not block.chooses:
        return None
    given = getattr(block, "costs", None)
    if given is not None:
        return RoundCosts(Curve.of(given.target), Curve.of(given.drafter), given.overhead)
    if getattr(models.target, "ranks", None) is not None:
        reason = "ranks that decode together cannot measure what forwards cost: give drafter.costs"
        raise ModelError(models.target.config.path, reason)
    target = Curve.of(_measured(models, models.target, _text(models.target)))
    forward = _forward_of(block, drafter)
    if forward is None:
        return RoundCosts(target, Curve((), ()))
    return RoundCosts(target, Curve.of(_measured(models, drafter, forward)))


def _forward_of(block: Drafter, drafter: Any) -> Forward | None:
    """A forward with the logits of its rows; None for drafters without a model."""
    if drafter is None or not block.has_model:
        return None
    if block.takes == "pairs":
        return _hidden(drafter)
    return _block(drafter) if block.takes == "features" else _text(drafter)


def _text(model: Any) -> Forward:
    def forward(rows: Rows, kv: Any) -> Tensor:
        count = rows.tokens_BQ.numel()
        logits_RV: Tensor = model.forward(
            rows.tokens_BQ,
            rows.positions_BQ,
            rows.slots_BQ,
            build(rows, kv),
            kv,
            (LayerStatus.DECODE,) * model.num_layers,
            torch.arange(count, device=rows.tokens_BQ.device),
            (),
        ).logits_RV
        return logits_RV.argmax(-1)

    return forward


def _hidden(drafter: Any) -> Forward:
    width = drafter.embed_tokens.weight.shape[1]

    def forward(rows: Rows, kv: Any) -> Tensor:
        hidden_BQH = drafter.embed_tokens.weight.new_zeros(*rows.tokens_BQ.shape, width)
        places = rows.positions_BQ, rows.slots_BQ, build(rows, kv), kv
        out_BQH = drafter.forward(rows.tokens_BQ, hidden_BQH.to(kv.data.dtype), *places)
        logits_RV: Tensor = drafter.logits(out_BQH.flatten(0, 1))
        return logits_RV.argmax(-1)

    return forward


def _block(drafter: Any) -> Forward:
    def forward(rows: Rows, kv: Any) -> Tensor:
        places = rows.positions_BQ, rows.slots_BQ, build(rows, kv), kv
        out_BQH = drafter.forward(rows.tokens_BQ, *places)
        logits_RV: Tensor = drafter.logits(out_BQH.flatten(0, 1))
        return logits_RV.argmax(-1)

    return forward


def _measured(models: Models, model: Any, forward: Forward) -> Mapping[int, float]:
    """Milliseconds by rows."""
    kv = new_pool(model, BEHIND + 2 * max(ROWS), 1, models)
    segments = SegmentTree()
    layout = Layout(models.device, segments)
    owner = segments.add()
    kv.open_(owner, BEHIND + max(ROWS))
    found = dict[int, float]()
    began = perf_counter()
    with torch.inference_mode():
        before = layout.place_(kv, None, [Span(owner, owner, 0, [1] * BEHIND)])
        forward(before.rows, kv)
        kv.commit_(before.spans[0].slots_Cn[0], range(BEHIND))
        for count in (*FIRST, *(one for one in ROWS if one not in FIRST)):
            if len(found) >= 2 and perf_counter() - began > SECONDS:
                break
            found[count] = _fastest(partial(_once, models, layout, kv, owner, count, forward))
    return found


def _once(
    models: Models, layout: Layout, kv: Any, owner: int, count: int, forward: Forward
) -> None:
    placed = layout.place_(kv, None, [Span(owner, owner, BEHIND, [1] * count, draws=True)])
    forward(placed.rows, kv)
    kv.release_(placed.spans[0].slots_Cn[0])
    if models.device.type == "cuda":
        torch.cuda.synchronize(models.device)


def _fastest(run: Callable[[], None]) -> float:
    """Milliseconds of the fastest of some runs, the first one left out."""
    run()
    times = list[float]()
    began = perf_counter()
    while not times or (len(times) < REPEATS and perf_counter() - began < SECONDS / len(FIRST)):
        start = perf_counter()
        run()
        times.append(1e3 * (perf_counter() - start))
    return min(times)

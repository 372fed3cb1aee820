"""Measured durations of the target's and the drafter's forwards, by their number of rows."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ...models.files import ModelError
from ...ops.attention.backends import AttentionPlan
from ...ops.draft.sizes import Curve, RoundCosts
from ...ops.kv.pool import KVCache
from ...states.graph.drafter_settings import DrafterSettings
from ...states.graph.plugins import drafter_class
from ..models import Models
from ..pools import new_pool
from .scoring import prefill

# The points, in the order in which they are measured until the time is up.
ROWS = (1, 16, 4, 64, 8, 2, 32, 3, 6, 12, 24, 48)
MIN_POINTS = 2
CONTEXT_ROWS = 64  # tokens before the measured rows
MAX_SECONDS = 1.5  # for one model
SECONDS_PER_POINT = MAX_SECONDS / 7
REPEATS = 5  # of each point; the fastest counts, since noise only adds time

Forward = Callable[[KVCache, int, int], object]
"""A forward of `count` rows after `start` rows of a pool, with the argmax of their logits."""


def costs_of(models: Models, block: DrafterSettings, drafter: Any) -> RoundCosts | None:
    """The graph's figures, or measured ones; None for a drafter that does not choose by them.

    Raises:
        ModelError: several ranks would each measure, and decide differently.
    """
    if not block.chooses:
        return None
    costs = getattr(block, "costs", None)
    if costs is not None:
        return RoundCosts(Curve.of(costs.target), Curve.of(costs.drafter), costs.overhead)
    if getattr(models.target, "ranks", None) is not None:
        reason = "ranks that decode together cannot measure what forwards cost: give drafter.costs"
        raise ModelError(models.target.config.path, reason)
    target = _measured(models, models.target, _target_forward(models.target))
    if drafter is None or not block.has_model:
        return RoundCosts(target, Curve((), ()))
    logits = partial(drafter_class(block.kind).logits, drafter)
    return RoundCosts(target, _measured(models, drafter, _drafter_forward(logits)))


def _target_forward(model: Any) -> Forward:
    def forward(kv: KVCache, start: int, count: int) -> object:
        return prefill(model, [1] * count, kv, start=start).logits_RV.argmax(-1)

    return forward


def _drafter_forward(logits: Callable[..., Tensor]) -> Forward:
    def forward(kv: KVCache, start: int, count: int) -> object:
        end = start + count
        device = kv.data.device
        tokens_1Q = torch.ones(1, count, dtype=torch.int64, device=device)
        slots_1Q = torch.arange(start, end, device=device)[None]
        slots_1K = torch.arange(end, device=device)[None]
        attention = AttentionPlan.dense(slots_1Q[:, :, None] >= slots_1K[:, None], slots_1K)
        return logits(tokens_1Q, slots_1Q, attention, kv).argmax(-1)

    return forward


def _measured(models: Models, model: Any, forward: Forward) -> Curve:
    """Milliseconds by rows."""
    kv = new_pool(model, CONTEXT_ROWS + max(ROWS), 1, models)
    millis = dict[int, float]()
    start = perf_counter()
    with torch.inference_mode():
        forward(kv, 0, CONTEXT_ROWS)
        for rows in ROWS:
            if len(millis) >= MIN_POINTS and perf_counter() - start > MAX_SECONDS:
                break
            millis[rows] = _fastest(partial(_timed, models, forward, kv, rows))
    return Curve.of(millis)


def _timed(models: Models, forward: Forward, kv: KVCache, rows: int) -> None:
    forward(kv, CONTEXT_ROWS, rows)
    if models.device.type == "cuda":
        torch.cuda.synchronize(models.device)


def _fastest(run: Callable[[], None]) -> float:
    """Milliseconds of the fastest of some runs, after one that does not count."""
    run()
    times = list[float]()
    first = perf_counter()
    while not times or (len(times) < REPEATS and perf_counter() - first < SECONDS_PER_POINT):
        start = perf_counter()
        run()
        times.append(1e3 * (perf_counter() - start))
    return min(times)

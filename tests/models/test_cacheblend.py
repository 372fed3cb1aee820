"""What blending must and must not change, on models of every kind."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.blends import BOS, FIRST, REUSE, SIZES, SUFFIX, TAPS, Case, Sequence, blend, made, near
from helpers.decoders import CASES, LAYERS
from torch.utils._python_dispatch import TorchDispatchMode

from specsot.models.config import ModelError
from specsot.models.layers import rotate
from specsot.ops.blend import Blend, ChunkKV, RowRole, deviation, join
from specsot.ops.layer_plan import BlendSettings, LayerStatus, compile_layer_plan

SHALLOW, DEEP = (1,), (1, 2)
KINDS = {  # whatever changes what a cached row means
    name: case for name, case in CASES.items() if name not in ("mistral-no-window", "qwen2")
}


@pytest.fixture(scope="module", params=KINDS)
def every(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(tmp_path_factory.mktemp(request.param), request.param, torch.float64)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind = "qwen3-biases-layer_types"
    return made(tmp_path_factory.mktemp(kind), kind, torch.float64, TAPS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model without windows, which the mask `bottom_right` can serve."""
    return made(tmp_path_factory.mktemp("llama"), "llama", torch.float64)


def test_everything_picked_is_a_full_prefill(every: Case) -> None:
    full = every.full()
    ran = every.blended(blend(ratios=(1.0,)))
    assert ran.picked() == list(range(every.cached.rows))
    near(ran.kv, full.kv)
    near(ran.out.logits_RV, full.out.logits_RV)


@pytest.mark.parametrize("metric", ["v", "k", "kv"])
@pytest.mark.parametrize("update", ["full", "partial"])
@pytest.mark.parametrize("mask", ["exact", "bottom_right"])
@pytest.mark.parametrize("checks", [SHALLOW, DEEP])
def test_everything_picked_by_any_rule(
    plain: Case, metric: Any, update: Any, mask: Any, checks: tuple[int, ...]
) -> None:
    one = (1.0,) * len(checks)
    settings = blend(check_layers=checks, ratios=one, metric=metric, check_update=update, mask=mask)
    full, ran = plain.full(), plain.blended(settings)
    near(ran.kv, full.kv)
    near(ran.out.logits_RV, full.out.logits_RV)


def test_nothing_picked(every: Case) -> None:
    """Layers up to the check layer are fresh, later ones cached; with a partial update all are. A
    first layer and a first chunk are cached exactly."""
    full, reuse, ran = every.full(), every.blended(REUSE), every.blended(blend(ratios=(0,)))
    context = slice(0, every.cached.rows)
    assert ran.picked() == []
    near(ran.kv[:, :2], full.kv[:, :2])
    near(ran.kv[:, 2:, context], reuse.kv[:, 2:, context])
    assert (ran.kv[:, 1, context] - reuse.kv[:, 1, context]).abs().max() > 1e-3
    near(every.blended(blend(ratios=(0,), check_update="partial")).kv, reuse.kv)
    near(reuse.kv[:, 0], full.kv[:, 0])
    near(reuse.kv[:, :, :FIRST], full.kv[:, :, :FIRST])
    assert min(every.blended(blend(ratios=(0.4,))).picked()) >= FIRST


def test_keys_deviate_as_much_before_and_after_rope(case: Case) -> None:
    with torch.inference_mode():
        new = case.model.collect([int(i) for i in case.ids]).keys_LRgd[1, : case.cached.rows]
    old = case.cached.keys_LRgd[1]
    model, positions = case.model, torch.arange(100, 100 + len(old))
    cos, sin = model.angles(positions)
    before = deviation((new, new), (old, old), "k")
    pair = rotate(new, cos, sin), rotate(old, cos, sin)
    after = deviation((pair[0], new), (pair[1], old), "k")
    assert before.max() > 1e-2
    assert (before - after).abs().max() < 1e-6 * before.max()  # angles are float32


def test_using_a_cache_changes_nothing_in_it(case: Case) -> None:
    before = [part.clone() for part in (case.cached.keys_LRgd, case.cached.values_LRgd)]
    settings = blend(check_layers=DEEP, ratios=(0.5, 0.2))
    runs = [case.blended(settings, TAPS) for _ in range(2)]
    assert torch.equal(runs[0].kv, runs[1].kv)
    assert torch.equal(runs[0].out.logits_RV[-1], runs[1].out.logits_RV[-1])
    assert torch.equal(case.cached.keys_LRgd, before[0])
    assert torch.equal(case.cached.values_LRgd, before[1])


@pytest.mark.parametrize("settings", [REUSE, blend(ratios=(1.0,)), blend(ratios=(0.3,))])
def test_the_same_chunk_twice(case: Case, settings: BlendSettings) -> None:
    """One entry at two places; with everything picked it is a full prefill again."""
    chunk = case.chunks[1]
    with torch.inference_mode():
        first, entry = case.model.collect(case.chunks[0]), case.model.collect(chunk, BOS)
    cached = join([first, entry, entry])
    twice = dataclasses.replace(case, chunks=[case.chunks[0], chunk, chunk], cached=cached)
    ran, full = twice.blended(settings), twice.full()
    rows = slice(FIRST, FIRST + len(chunk)), slice(FIRST + len(chunk), FIRST + 2 * len(chunk))
    if settings is REUSE:
        near(ran.kv[1][:, rows[0]], ran.kv[1][:, rows[1]])  # V knows no position
        assert (ran.kv[0][:, rows[0]] - ran.kv[0][:, rows[1]]).abs().max() > 1e-2
    elif settings.ratios == (1.0,):
        near(ran.kv, full.kv)
    assert not ran.out.logits_RV[-1].isnan().any()


@pytest.mark.parametrize("settings", [REUSE, blend(check_layers=DEEP, ratios=(0.5, 0.2))])
def test_taps_are_fresh_where_rows_live(case: Case, settings: BlendSettings) -> None:
    ran, full = case.blended(settings, TAPS), case.full(TAPS)
    assert ran.out.taps_QF is not None and full.out.taps_QF is not None
    assert case.cached.features_RF is not None and ran.out.blend is not None
    hidden, context = case.model.hidden_size, case.cached.rows
    suffix, alive = set(range(context, len(case.ids))), set(range(context))
    for layer in range(LAYERS + 1):  # tap i is what layer i takes in
        if settings is REUSE:
            alive = set()
        elif layer - 1 in ran.out.blend.picked:
            alive = set(ran.picked(layer - 1))
        part = slice(layer * hidden, (layer + 1) * hidden)
        dead = [row for row in range(context) if row not in alive]
        assert torch.equal(ran.out.taps_QF[dead, part], case.cached.features_RF[dead, part])
        if layer <= 2 and settings is not REUSE:
            fresh = sorted(alive | suffix)
            near(ran.out.taps_QF[fresh, part], full.out.taps_QF[fresh, part])
    assert len(dead) == context - len(alive) > 0
    near(ran.out.logits_RV[-1], case.blended(settings).out.logits_RV[-1])
    some = Sequence(case.model, case.ids)
    part = torch.cat([case.cached.features_RF[:, n * hidden : (n + 1) * hidden] for n in (1, 3)], 1)
    cached = dataclasses.replace(case.cached, features_RF=part)
    out = some.blended(case.rows, cached, settings, (3, 1))
    ours = [ran.out.taps_QF[:, n * hidden : (n + 1) * hidden] for n in (1, 3)]
    assert out.taps_QF is not None
    assert torch.equal(out.taps_QF, torch.cat(ours, 1))


def test_rows_that_are_not_computed_have_no_logits(case: Case) -> None:
    ran = case.blended(blend(ratios=(0.2,)))
    computed = ~ran.out.logits_RV.isnan().any(1)
    expected = [*ran.picked(), *range(case.cached.rows, len(case.ids))]
    assert computed.nonzero().squeeze(1).tolist() == expected
    assert ran.out.logits_RV.isnan().all(1).sum() == len(case.ids) - len(expected)


def test_uncached_chunks_are_of_the_suffix(case: Case) -> None:
    missing = slice(FIRST + SIZES[0], FIRST + SIZES[0] + SIZES[1])
    rows = case.rows
    rows.role_BQ[0, missing] = RowRole.SUFFIX
    kept = [row for row in range(case.cached.rows) if not missing.start <= row < missing.stop]
    cached = ChunkKV(case.cached.keys_LRgd[:, kept], case.cached.values_LRgd[:, kept])
    prompt = case.prompt()
    out = prompt.blended(rows, cached, blend(ratios=(0.3,)))
    assert out.blend is not None
    assert out.blend.suffix == SUFFIX + SIZES[1]
    assert len(out.blend.picked[1]) == int(0.3 * len(kept))
    assert set(out.blend.picked[1].tolist()) <= set(kept)
    assert not out.logits_RV[missing].isnan().any()
    held = torch.stack(prompt.held())
    near(held[:, 0], case.full().kv[:, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs(dtype: torch.dtype, tmp_path: Path) -> None:
    half = made(tmp_path, "qwen3", dtype)
    ran = half.blended(blend(ratios=(0.3,)))
    assert ran.out.logits_RV.dtype == torch.float32
    assert not ran.out.logits_RV[-1].isnan().any()
    error = (half.blended(blend(ratios=(1.0,))).kv - half.full().kv).abs().max()
    assert error < 0.1


class NoSynchronisation(TorchDispatchMode):
    """Refuses what a host would have to wait for."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in self.NAMES), func
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("settings", [REUSE, blend(check_layers=DEEP, ratios=(0.5, 0.2))])
def test_nothing_is_read_back(case: Case, settings: BlendSettings) -> None:
    prompt, plan = case.prompt(), compile_layer_plan(settings, LAYERS)
    given = Blend.of(case.rows, case.cached, settings)
    positions, visible = torch.arange(len(case.ids))[None], prompt.visible(0, len(case.ids))
    with torch.no_grad(), NoSynchronisation():
        slots, rows = prompt.slots[None, : prompt.rows], positions[0]
        ids, kv = case.ids[None], prompt.kv
        case.model(ids, positions, slots, visible, kv, plan, rows, TAPS, given)


# -- what does not fit together is refused


def test_another_plan_and_a_window_in_the_corner_are_refused(case: Case) -> None:
    settings, deeper = blend(ratios=(0.2,)), blend(check_layers=(2,))
    corner, full = blend(ratios=(0.2,), mask="bottom_right"), (LayerStatus.FULL,) * LAYERS
    for own, plan, message in (
        (settings, compile_layer_plan(deeper, LAYERS), r"plan \[0, 0, 1\] is not the blend's"),
        (settings, full, r"plan \[0, 0, 0\] is not the blend's"),
        (corner, compile_layer_plan(corner, LAYERS), "sliding window 7"),
    ):
        prompt = case.prompt()
        before = prompt.kv.data.clone()
        with pytest.raises(ValueError, match=message):
            prompt.forward(plan, Blend.of(case.rows, case.cached, own))
        assert torch.equal(prompt.kv.data, before)


def test_statuses_of_cached_rows_need_some(case: Case) -> None:
    prompt = case.prompt()
    for settings, name in ((blend(), "CHECK .layer 1"), (REUSE, "REUSE .layer 0")):
        with pytest.raises(ValueError, match=name):
            prompt.forward(compile_layer_plan(settings, LAYERS))


def test_chunks_that_cannot_be_collected(case: Case) -> None:
    with pytest.raises(ValueError, match="at least one token, not 0"):
        case.model.collect([])
    case.model.collect([1] * 63, BOS)
    with pytest.raises(ModelError, match="65 positions requested, 64 possible"):
        case.model.collect([1] * 64, BOS)

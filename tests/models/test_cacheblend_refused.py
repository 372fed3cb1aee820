"""What does not fit together is refused before anything is computed."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.blend_cases import BOS, REUSE, TAPS, Case, made
from helpers.blends import blend
from helpers.decoders import LAYERS, save

from specsot.models.config import ModelError
from specsot.models.load.weights import load_target
from specsot.ops.blend import Blend, ChunkKV
from specsot.ops.layer_plan import BlendSettings, LayerStatus, compile_layer_plan


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model with windows on some layers."""
    kind = "qwen3-biases-layer_types"
    return made(tmp_path_factory.mktemp(kind), kind, torch.float64, TAPS)


def refused(
    case: Case, message: str, blend: Blend, settings: BlendSettings, **changes: Any
) -> None:
    prompt = case.prompt()
    plan = changes.pop("plan", None) or compile_layer_plan(settings, LAYERS)
    before = prompt.kv.data.clone()
    with pytest.raises(ValueError, match=message):
        prompt.forward(plan, blend, **changes)
    assert torch.equal(prompt.kv.data, before)


def test_cached_rows_that_do_not_fit(case: Case) -> None:
    settings = blend(ratios=(0.2,))
    good = Blend.of(case.rows, case.cached, settings)
    deeper = compile_layer_plan(blend(check_layers=(2,)), LAYERS)
    refused(case, r"plan \[0, 0, 1\] is not the blend's \[0, 1, 2\]", good, settings, plan=deeper)
    full = (LayerStatus.FULL,) * LAYERS
    refused(case, r"plan \[0, 0, 0\] is not the blend's", good, settings, plan=full)
    refused(case, r"blend is for \(1, 31\) rows, not for \(1, 30\)", good, settings, part=slice(30))
    bare = dataclasses.replace(case.cached, features_RF=None)
    refused(
        case,
        r"features are None, the drafter needs \(26, 64\)",
        Blend.of(case.rows, bare, settings),
        settings,
        taps=(0, 2),
    )
    wide = r"features are \(26, 128\), the drafter needs \(26, 32\)"
    refused(case, wide, good, settings, taps=(1,))
    short = ChunkKV(case.cached.keys_LRgd[:2], case.cached.values_LRgd[:2])
    refused(case, r"keys are \(2, 26, 2, 8\)", Blend.of(case.rows, short, settings), settings)
    half = ChunkKV(case.cached.keys_LRgd, case.cached.values_LRgd.half())
    refused(case, r"values are .* in torch.float16", Blend.of(case.rows, half, settings), settings)
    corner = blend(ratios=(0.2,), mask="bottom_right")
    refused(case, "sliding window 7", Blend.of(case.rows, case.cached, corner), corner)


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


@pytest.mark.parametrize("kind", ["mrope", "alibi"])
def test_positions_that_cannot_be_turned_are_refused_by_the_loader(
    kind: str, tmp_path: Path
) -> None:
    save(tmp_path, "llama", {})
    path = tmp_path / "config.json"
    text = path.read_text().replace('"rope_type": "default"', f'"rope_type": "{kind}"')
    path.write_text(text)
    with pytest.raises(ModelError, match=f"rope type '{kind}' is not supported"):
        load_target(tmp_path)

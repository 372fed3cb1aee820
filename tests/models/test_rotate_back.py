"""Keys turned back: for every kind of RoPE that a target may have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.decoders import LLAMA3, LONG, SHAPE, YARN

from specsot.models.config import ROPE_KINDS
from specsot.models.decoder import Decoder, KeyRecorder
from specsot.models.families import decoder_config
from specsot.models.layers import rotate, rotate_back
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.kv.pool import KVCache

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN | {"attention_factor": 1.7},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": LONG | {"attention_factor": 1.3},
}


def decoder(folder: Path, kind: str, dtype: torch.dtype) -> Decoder:
    raw = SHAPE | {"model_type": "llama", "rope_parameters": KINDS[kind] | {"rope_theta": 500.0}}
    (folder / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    found = Decoder(decoder_config(folder)).to(dtype)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return found


def test_every_kind_is_tried() -> None:
    assert set(KINDS) == set(ROPE_KINDS)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_keys_come_back_from_any_position(
    kind: str, dtype: torch.dtype, limit: float, tmp_path: Path
) -> None:
    model = decoder(tmp_path, kind, dtype)
    positions_R = torch.tensor([0, 1, 2, 7, 30, 31])
    x_RH = torch.randn(6, model.hidden_size, dtype=dtype)
    kv = KVCache(model.num_layers, model.kv_heads, model.head_dim, 6, dtype=dtype)
    visible = AttentionPlan.causal(6)
    inputs = model.attention_inputs(positions_R, torch.arange(6), visible)
    recorder = KeyRecorder(inputs, 0)
    model.run_layers(x_RH, inputs, kv, (), recorder)
    before = torch.stack(recorder.keys)
    after = kv.data[:, 0, :, :6].transpose(1, 2)
    found = model.before_rope(after, positions_R)
    assert found.dtype == dtype
    torch.testing.assert_close(found, before, rtol=limit, atol=limit)
    moved = after[:, 1:]
    assert (moved - before[:, 1:]).abs().max() > 0.1, "or nothing was tested"


def test_a_factor_on_cos_and_sin_is_divided_out(tmp_path: Path) -> None:
    """The angles negated and the factor kept would leave its square."""
    model = decoder(tmp_path, "default", torch.float64)
    x = torch.randn(4, 2, model.head_dim, dtype=torch.float64)
    for factor in (1.0, 0.3, 2.0):
        model.rope_scaling = factor
        angles = model.angles(torch.arange(4))
        torch.testing.assert_close(rotate_back(rotate(x, *angles), *angles), x)

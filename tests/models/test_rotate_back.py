"""Keys turned back: for every kind of RoPE that a target may have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.decoders import LLAMA3, LONG, SHAPE, YARN

from specsot.models.config import decoder_config
from specsot.models.decoder import Decoder
from specsot.models.layers import DecoderLayer
from specsot.models.rope import rotate, rotate_back, rotation
from specsot.models.rope_config import ROPE_KINDS

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
def test_keys_come_back_from_any_position(
    kind: str, dtype: torch.dtype, limit: float, tmp_path: Path
) -> None:
    """As a layer projects them: after RoPE at some positions, and back."""
    model = decoder(tmp_path, kind, dtype)
    positions_R = torch.tensor([0, 1, 2, 7, 30, 31])
    x_RH = torch.randn(6, model.hidden_size, dtype=dtype)
    before, after = [], []
    cos, sin = rotation(positions_R, model.frequencies, model.rope_scaling, dtype)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        qk_Rhd, _ = layer.project(x_RH)
        before.append(qk_Rhd[:, layer.heads :])
        after.append(rotate(before[-1], cos, sin))
    found = model.before_rope(torch.stack(after), positions_R)
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.stack(before), rtol=limit, atol=limit)
    moved = torch.stack(after)[:, 1:]
    assert (moved - torch.stack(before)[:, 1:]).abs().max() > 0.1, "or nothing was tested"


def test_a_factor_on_cos_and_sin_is_divided_out() -> None:
    """The angles negated and the factor kept would leave its square."""
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    frequencies = 1 / torch.arange(1.0, 5)
    for factor in (1.0, 0.3, 2.0):
        cos, sin = rotation(torch.arange(4), frequencies, factor, torch.float64)
        torch.testing.assert_close(rotate_back(rotate(x, cos, sin), cos, sin), x)

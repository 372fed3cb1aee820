"""Weights in codes: what they stand for, what multiplies with them, and what cannot be coded."""

from pathlib import Path

import pytest
import torch
from helpers.tiny import write_tiny_target
from transformers import AutoModelForCausalLM

from specsot.engine.models import prepare_
from specsot.engine.run.scoring import full_prefill
from specsot.models.files import ModelError
from specsot.models.linear import (
    GROUP_SIZE,
    Int4,
    Int8,
    Linear,
    Weights,
    can_pack,
    check_widths,
    coded,
    faster_rows,
    pack_,
    quantise_,
)
from specsot.models.load.weights import load_target

CPU = torch.device("cpu")
packs = pytest.mark.skipif(
    not can_pack(CPU, torch.bfloat16), reason="this CPU has no products in bfloat16"
)


def test_settings_are_read() -> None:
    assert Weights.of("full") == Weights() and Weights.of("int8") == Weights("int8")
    assert Weights.of("int4@16") == Weights("int4", 16) and Weights.of("int8@0").rows == 0


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_a_code_is_the_nearest_one(kind: type[Int8 | Int4]) -> None:
    weight_OI = torch.randn(64, 96)
    weight_OI[3] = 0.0
    codes = kind.of(weight_OI)
    off_OI = (codes.plain() - weight_OI).abs()
    scale = codes.scale_O[:, None] if isinstance(codes, Int8) else codes.scale_OG
    step_OI = scale.repeat_interleave(96 // scale.shape[1], 1)
    least, most = (-127, 127) if isinstance(codes, Int8) else (0, 15)
    inside_OI = (codes.codes_OI > least) & (codes.codes_OI < most)
    assert inside_OI.float().mean() > 0.8
    assert (off_OI <= 0.5001 * step_OI)[inside_OI].all() and (off_OI <= step_OI).all()
    assert torch.equal(kind.of(codes.plain()[3:4]).plain()[0], codes.plain()[3])
    assert torch.equal(scale.bfloat16().float(), scale), "what the kernels take of it is all of it"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_matrices_are_coded_alike_joined_or_not(kind: str) -> None:
    parts = torch.randn(32, 64), torch.randn(96, 64)
    whole = coded(torch.cat(parts), kind, False).plain()
    assert torch.equal(whole, torch.cat([coded(one, kind, False).plain() for one in parts]))


@packs
@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_products_with_codes_are_those_with_what_they_stand_for(
    kind: type[Int8 | Int4], rows: int
) -> None:
    codes, x_NI = kind.of(torch.randn(96, 64)), torch.randn(rows, 64).bfloat16()
    residual_NO, product = torch.randn(rows, 96).bfloat16(), codes.product()
    assert product is not None
    wide_NO = x_NI.float() @ codes.plain().T
    assert torch.allclose(product(x_NI, None).float(), wide_NO, rtol=0.01, atol=0.01)
    added_NO = product(x_NI, residual_NO).float()
    assert torch.allclose(added_NO, wide_NO + residual_NO.float(), rtol=0.02, atol=0.05)


@packs
def test_few_rows_are_multiplied_with_codes() -> None:
    layer = Linear(64, 96, bias=False).bfloat16()
    pack_(layer)
    layer.few, layer.few_rows = Int8.of(torch.zeros(96, 64)).product(), 4
    four, five = torch.ones(4, 64).bfloat16(), torch.ones(5, 64).bfloat16()
    assert not layer.forward(four).any() and layer.forward(five).any()
    assert faster_rows([]) == 0 and faster_rows([layer]) in (0, 1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_ours_is_the_model_of_transformers_with_the_same_codes(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    folder = write_tiny_target(
        tmp_path / "target", extra={"tie_word_embeddings": tied, "head_dim": 16}
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    ids = torch.arange(3, 20)[None]
    full_QV = theirs(ids).logits[0]
    quantise_(theirs, kind)
    expected_QV = theirs(ids).logits[0]
    target = load_target(folder)
    prepare_(target, Weights(kind), CPU)
    ours_QV = full_prefill(target, ids[0].tolist(), torch.float32, CPU)[0].logits_RV
    assert target.weights == kind
    assert torch.allclose(ours_QV, expected_QV[-len(ours_QV) :], atol=1e-3)
    assert not torch.allclose(full_QV, expected_QV, atol=1e-2), "codes are no full weights"


def test_rows_that_are_no_multiple_of_a_group_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential()
    model.add_module("down", Linear(GROUP_SIZE + 8, 64, bias=False))
    with pytest.raises(ModelError, match=r"multiple of 32 numbers, `down` has 40: take int8"):
        check_widths(tmp_path / "config.json", "int4", model)
    check_widths(tmp_path / "config.json", "int8", model)

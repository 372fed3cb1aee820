"""Products of integers: one model in compiled kernels, in torch and in transformers, bit by bit."""

from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.tiny import write_tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from specsot.engine.models import prepare_
from specsot.engine.run.scoring import full_prefill
from specsot.models.decoder import Decoder
from specsot.models.integer import IntegerWeight, compiled_kernels, quantised
from specsot.models.linear import Int8, Linear, Weights, as_reference
from specsot.models.load.weights import load_target

CPU = torch.device("cpu")
IDS = list(range(3, 40))
compiles = pytest.mark.skipif(compiled_kernels() is None, reason="no numba, or no AVX-512 VNNI")


def in_codes(folder: Path, dtype: torch.dtype, *, compiled: bool = True) -> Decoder:
    target = load_target(folder, dtype)
    prepare_(target, Weights("int8"), CPU)
    if not compiled:
        target.compiled = None
        full = load_target(folder, dtype)
        for name, module in target.named_modules():
            if isinstance(module, Linear):
                weight_OI = full.get_submodule(name).weight.detach().float()
                module.integer = torch_weight(Int8.of(weight_OI))
    return target


def torch_weight(codes: Int8) -> IntegerWeight:
    """A weight without compiled kernels."""
    weight = IntegerWeight(*codes)
    weight.packed = None
    weight.codes_IO = codes.codes_OI.t()
    return weight


@torch.inference_mode()
def logits(target: Decoder, dtype: torch.dtype) -> Tensor:
    return full_prefill(target, IDS, dtype, CPU)[0].logits_RV


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_quantised_model_has_the_bits_of_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    extra = {"sliding_window": 16} if family == "mistral" else {}
    folder = write_tiny_target(tmp_path / "target", family, extra=extra)
    load = partial(AutoModelForCausalLM.from_pretrained, folder)
    theirs = as_reference(lambda own: load(dtype=own).train(False), dtype, "int8")
    expected_V = theirs(torch.tensor([IDS])).logits[0, -1].float()
    ours = logits(in_codes(folder, dtype), dtype)[0]
    torch_only = logits(in_codes(folder, dtype, compiled=False), dtype)[0]
    assert torch.equal(ours, torch_only) and torch.equal(ours, expected_V)
    full = load_target(folder, dtype)
    assert not torch.allclose(logits(full, dtype)[0], ours, atol=1e-3), "codes are no full weights"


@pytest.mark.parametrize("shape", [(33, 40), (64, 96), (17, 5)])
def test_a_row_has_the_same_product_among_any_rows(shape: tuple[int, int]) -> None:
    outputs, depth = shape
    codes = Int8.of(torch.randn(outputs, depth))
    x_NI = torch.randn(21, depth, dtype=torch.float64)
    x_NI[3] = 0.0
    codes_NI, scale_N1 = quantised(x_NI)
    sums_NO = codes_NI @ codes.codes_OI.double().t()
    assert codes_NI.abs().max() == 127
    expected_NO = sums_NO * (scale_N1 * codes.scale_O.double())
    for weight in (IntegerWeight(*codes), torch_weight(codes)):
        all_NO = weight.product(x_NI)
        assert torch.allclose(all_NO, expected_NO, rtol=1e-14)
        for rows in (1, 2, 3, 7, 8, 15):
            assert torch.equal(weight.product(x_NI[:rows]), all_NO[:rows])
        residual_NO = torch.randn(21, outputs, dtype=torch.float64)
        added_NO = weight.product(x_NI, residual_NO)
        assert torch.allclose(added_NO, all_NO + residual_NO, rtol=1e-14)


@compiles
def test_tiny_models_run_in_compiled_layers(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target")
    assert in_codes(folder, torch.float32).compiled is not None

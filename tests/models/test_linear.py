"""Packed weights: the same products in another layout; of bfloat16 the same numbers bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny import drop, write_tiny_eagle, write_tiny_target
from transformers import AutoModelForCausalLM

from specsot.engine.models import prepare_
from specsot.engine.run.scoring import full_prefill
from specsot.models import linear as products
from specsot.models.files import ModelError
from specsot.models.load.weights import load_eagle, load_target

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if products.can_pack(CPU, dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 65, 300])
@pytest.mark.parametrize("shape", [(576, 960), (1536, 576), (64, 33)])
@torch.no_grad()
def test_a_packed_layer_gives_the_same_numbers(
    rows: int, shape: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    layer = products.Linear(*shape, bias=bias).to(dtype)
    x, residual = torch.randn(rows, shape[0]).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    before = layer(x), layer(x, residual)
    plain = layer.weight.clone()
    products.pack_(layer)
    exact = dtype == torch.bfloat16
    for now, then in zip((layer(x), layer(x, residual)), before, strict=True):
        assert torch.equal(now, then) if exact else torch.allclose(now, then, atol=1e-5)
    assert torch.equal(layer.weight.to_dense(), plain) and layer.weight.dtype == dtype
    assert {name for name, _ in layer.named_parameters()} == ({"bias"} if bias else set())


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_what_is_lent_stays_as_it_is(dtype: torch.dtype) -> None:
    layers = products.Linear(8, 8), products.Linear(8, 8), torch.nn.Linear(8, 8)
    own, lent, other = model = torch.nn.Sequential(*layers).to(dtype)
    products.pack_(model, borrowed=[lent.weight])
    assert own.weight.is_mkldnn and not lent.weight.is_mkldnn
    assert isinstance(other.weight, torch.nn.Parameter), "a layer of somebody else's drafter"


@pytest.mark.skipif(not DTYPES, reason="nothing can be packed here")
@torch.inference_mode()
def test_a_tied_head_is_packed_beside_its_embedding_and_lent_so(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path / "target", extra={"tie_word_embeddings": True})
    drop("lm_head.weight")(folder)
    target = load_target(folder)
    x_RH = torch.randn(5, target.hidden_size)
    expected_RV = target.logits(x_RH)
    products.pack_(target)
    assert target.lm_head.weight.is_mkldnn and not target.embed.is_mkldnn
    assert torch.equal(target.lm_head.weight.to_dense(), target.embed)
    assert torch.allclose(target.logits(x_RH), expected_RV, atol=1e-5)
    drafter = load_eagle(write_tiny_eagle(tmp_path / "draft", folder), target)
    products.pack_(drafter, borrowed=(target.embed, target.lm_head.weight))
    assert drafter.lm_head.weight is target.lm_head.weight


def test_only_what_is_faster_packed_is_packed() -> None:
    assert not products.can_pack(CPU, torch.float64) and not products.can_pack(CPU, torch.float16)
    assert not products.can_pack(torch.device("cuda"), torch.bfloat16)


@torch.no_grad()
def test_a_plain_weight_multiplies_as_usual() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))


def test_few_numbers_of_rows_ever_reach_a_kernel() -> None:
    sizes = {rows: rows + products.padding(rows) for rows in range(1, 2049)}
    assert all(rows <= size <= rows * 9 / 8 for rows, size in sizes.items())
    assert all(sizes[rows] == rows for rows in (*range(1, 17), 18, 36, 72, 2048))
    assert len(set(sizes.values())) == 16 + 7 * 8


# -- weights in codes

packs = pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="no bfloat16 products")


def test_settings_are_read() -> None:
    read = [products.Weights.of(text) for text in ("full", "int8", "int4@16", "int4@0")]
    assert read == [("full", None), ("int8", None), ("int4", 16), ("int4", 0)]


@pytest.mark.parametrize("kind", [products.Int8, products.Int4])
def test_a_code_is_the_nearest_one(kind: type[products.Int8 | products.Int4]) -> None:
    weight_OI = torch.randn(64, 96)
    weight_OI[3] = 0.0
    codes = kind.of(weight_OI)
    off_OI = (codes.plain() - weight_OI).abs()
    scale = codes.scale_O[:, None] if isinstance(codes, products.Int8) else codes.scale_OG
    step_OI = scale.repeat_interleave(96 // scale.shape[1], 1)
    least, most = (-127, 127) if isinstance(codes, products.Int8) else (0, 15)
    inside_OI = (codes.codes_OI > least) & (codes.codes_OI < most)
    assert inside_OI.float().mean() > 0.8
    assert (off_OI <= 0.5001 * step_OI)[inside_OI].all() and (off_OI <= step_OI).all()
    assert torch.equal(kind.of(codes.plain()[3:4]).plain()[0], codes.plain()[3])
    assert torch.equal(scale.bfloat16().float(), scale), "what the kernels take of it is all of it"


@pytest.mark.parametrize("kind", [products.Int8, products.Int4])
def test_matrices_are_coded_alike_joined_or_not(kind: type[products.Int8 | products.Int4]) -> None:
    parts = torch.randn(32, 64), torch.randn(96, 64)
    whole = kind.of(torch.cat(parts)).plain()
    assert torch.equal(whole, torch.cat([kind.of(part).plain() for part in parts]))


@packs
@pytest.mark.parametrize("kind", [products.Int8, products.Int4])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_products_with_codes_are_those_with_values(
    kind: type[products.Int8 | products.Int4], rows: int
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
    layer = products.Linear(64, 96, bias=False).bfloat16()
    products.pack_(layer)
    layer.few, layer.few_rows = products.Int8.of(torch.zeros(96, 64)).product(), 4
    four, five = torch.ones(4, 64).bfloat16(), torch.ones(5, 64).bfloat16()
    assert not layer.forward(four).any() and layer.forward(five).any()
    assert products.faster_rows([]) == 0
    assert products.faster_rows([layer]) in (0, *products.MEASURED_ROWS)


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_ours_is_transformers_with_the_same_codes(tied: bool, tmp_path: Path) -> None:
    kind = "int4"
    folder = write_tiny_target(tmp_path / "target", extra={"tie_word_embeddings": tied})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    ids = torch.arange(3, 20)[None]
    full_QV = theirs(ids).logits[0]
    products.quantise_(theirs, kind)
    expected_QV = theirs(ids).logits[0]
    target = load_target(folder)
    prepare_(target, products.Weights(kind), CPU)
    ours_QV = full_prefill(target, ids[0].tolist(), torch.float32, CPU)[0].logits_RV
    assert target.weights == kind
    assert torch.allclose(ours_QV, expected_QV[-len(ours_QV) :], atol=1e-3)
    assert not torch.allclose(full_QV, expected_QV, atol=1e-2), "codes are no full weights"


def test_rows_that_are_no_multiple_of_a_group_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential()
    model.add_module("down", products.Linear(products.GROUP_SIZE + 8, 64, bias=False))
    with pytest.raises(ModelError, match=r"multiple of 32 numbers, `down` has 40: take int8"):
        products.check_widths(tmp_path / "config.json", "int4", model)
    products.check_widths(tmp_path / "config.json", "int8", model)

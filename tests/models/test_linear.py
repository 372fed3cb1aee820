"""Packed weights: the same products in another layout; of bfloat16 the same numbers bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny import drop, write_tiny_eagle, write_tiny_target

from specsot.models import linear as products
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

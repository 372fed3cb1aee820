"""Packed weights: the same numbers, bit for bit, in another layout."""

import pytest
import torch

from specsot.models.linear import Linear, can_pack, pack_

CPU = torch.device("cpu")
needs_bfloat16 = pytest.mark.skipif(
    not can_pack(CPU, torch.bfloat16), reason="this CPU has no products in bfloat16"
)


@needs_bfloat16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 65, 300])
@pytest.mark.parametrize("shape", [(576, 960), (1536, 576), (64, 33)])
@torch.no_grad()
def test_a_packed_layer_gives_the_same_numbers(
    rows: int, shape: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(rows)
    layer = Linear(*shape, bias=bias).bfloat16()
    x, residual = torch.randn(rows, shape[0]).bfloat16(), torch.randn(rows, shape[1]).bfloat16()
    before = layer(x), layer.added(residual, x)
    plain = layer.weight.clone()
    layer.pack_()
    assert torch.equal(layer(x), before[0]) and torch.equal(layer.added(residual, x), before[1])
    assert torch.equal(layer.weight.to_dense(), plain) and layer.weight.dtype == torch.bfloat16
    assert {name for name, _ in layer.named_parameters()} == ({"bias"} if bias else set())


@needs_bfloat16
@torch.no_grad()
def test_what_is_lent_stays_as_it_is() -> None:
    model = torch.nn.Sequential(Linear(8, 8), Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16()
    own, lent, other = model
    pack_(model, lent=[lent.weight])
    assert own.packed and not lent.packed
    assert isinstance(other.weight, torch.nn.Parameter), "a layer of somebody else's drafter"


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not can_pack(CPU, torch.float32) and not can_pack(CPU, torch.float16)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)

"""A mixture of experts: what each row is the sum of, and that the host reads no value."""

import pytest
import torch
import torch.nn.functional as F

from specsot.models.config import ExpertsConfig
from specsot.models.experts import Experts

HIDDEN, INNER = 16, 24


def experts(dtype: torch.dtype, inner: int = INNER) -> Experts:
    made = Experts(ExpertsConfig(count=6, per_token=2, normalised=True), HIDDEN, inner)
    draw = torch.Generator().manual_seed(2)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw).to(dtype)
    return made


def test_the_host_reads_no_value() -> None:
    x_NH = torch.empty(5, HIDDEN, dtype=torch.bfloat16, device="meta")  # it has none to read
    assert experts(torch.bfloat16).to("meta").forward(x_NH, x_NH).shape == x_NH.shape


@pytest.mark.parametrize(
    ("dtype", "inner"), [(torch.float32, INNER), (torch.float64, INNER), (torch.float32, 13)]
)
@pytest.mark.parametrize("rows", [1, 3, 40])
@torch.inference_mode()
def test_each_row_is_the_weighted_sum_of_its_own_experts(
    rows: int, dtype: torch.dtype, inner: int
) -> None:
    made = experts(dtype, inner)
    x_NH = torch.randn(rows, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(rows))
    found_NH = made.forward(x_NH, 2 * x_NH)
    for x_H, found_H in zip(x_NH, found_NH, strict=True):
        weights, chosen = (made.gate.weight @ x_H).softmax(-1, torch.float).topk(2)
        total_H = 2 * x_H
        for weight, expert in zip(weights / weights.sum(), chosen.tolist(), strict=True):
            gate_I, up_I = (made.gate_up[expert] @ x_H).chunk(2)
            total_H = total_H + weight.to(dtype) * (made.down[expert] @ (F.silu(gate_I) * up_I))
        torch.testing.assert_close(found_H, total_H, rtol=1e-4, atol=1e-3)

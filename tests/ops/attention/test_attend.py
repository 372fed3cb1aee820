"""Attention backends against a loop over single queries and keys."""

import math

import pytest
import torch
from helpers.attention import plain
from torch import Tensor

from specsot.ops.attention.backends import (
    Attend,
    dense,
    group_queries,
    to_bias,
    ungroup_queries,
    window_mask,
)

HEADS, KV_HEADS, DIM, QUERIES, KEYS, ROWS = 6, 2, 8, 5, 11, 2


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(ROWS, QUERIES, HEADS, DIM, generator=draw).to(dtype)
    k, v = torch.randn(2, ROWS, KV_HEADS, KEYS, DIM, generator=draw).to(dtype)
    mask = torch.rand(ROWS, QUERIES, KEYS, generator=draw) < 0.4
    mask[:, :, 3] = True
    return q, k, v, mask


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    for b in range(ROWS):
        for i in range(QUERIES):
            seen = mask[b, i]
            for h in range(HEADS):
                keys, values = k[b, h // (HEADS // KV_HEADS)][seen], v[b, h // (HEADS // KV_HEADS)]
                scores = keys @ q[b, i, h] / math.sqrt(DIM)
                out[b, i, h] = scores.softmax(0) @ values[seen]
    return out


@pytest.mark.parametrize("attend", [dense, plain])
def test_equal_to_a_loop(attend: Attend) -> None:
    q, k, v, mask = tensors(torch.float64)
    out = attend(q, k, v, to_bias(mask, HEADS // KV_HEADS, q.dtype))
    assert torch.allclose(out, by_hand(q, k, v, mask), atol=1e-12)


@pytest.mark.parametrize("attend", [dense, plain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_sees_nothing_is_finite_and_harms_no_other(
    attend: Attend, dtype: torch.dtype
) -> None:
    q, k, v, mask = tensors(dtype)
    before = attend(q, k, v, to_bias(mask, HEADS // KV_HEADS, dtype))
    mask[1, 4] = False
    after = attend(q, k, v, to_bias(mask, HEADS // KV_HEADS, dtype))
    assert after.isfinite().all()
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, :4], before[1, :4])


@pytest.mark.parametrize("attend", [dense, plain])
def test_what_is_hidden_has_no_influence_at_all(attend: Attend) -> None:
    q, k, v, mask = tensors()
    mask[:, :, 7] = False
    bias = to_bias(mask, HEADS // KV_HEADS, q.dtype)
    before = attend(q, k, v, bias)
    k[:, :, 7], v[:, :, 7] = 50.0, -1e4
    assert torch.equal(attend(q, k, v, bias), before)


def test_fold_and_unfold_are_inverse_and_share_a_kv_head() -> None:
    q = tensors()[0]
    folded = group_queries(q, KV_HEADS)
    assert folded.shape == (ROWS, KV_HEADS, 3 * QUERIES, DIM)
    assert torch.equal(folded[1, 1, 2 * QUERIES + 4], q[1, 4, 5])
    assert torch.equal(ungroup_queries(folded, QUERIES), q)


def drawn(mask_QK: Tensor) -> list[str]:
    return ["".join(".#"[int(cell)] for cell in row) for row in mask_QK]


def test_a_window_hides_by_position_wherever_the_slots_lie() -> None:
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    mask[0, 0, 4] = False
    keys = torch.tensor([[6, 2, 5, 3, 4]])  # the slots' positions, out of order
    near = window_mask(mask, torch.tensor([[5, 6, 6]]), keys, 3)
    assert drawn(near[0]) == ["#.##.", "#.#.#", "#.#.#"]

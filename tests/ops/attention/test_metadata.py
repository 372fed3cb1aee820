"""What a forward attends to: rows by their groups, and every backend by the same rule."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from helpers.attention import DIM, HEADS, attend_naively, attended, scene
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specsot.ops.attention.metadata import (
    AttentionGroup,
    SlotRun,
    row_index,
)
from specsot.ops.forward import plan_attention


@pytest.mark.parametrize(
    ("rows_Gq", "rows", "natural"),
    [
        ([[0, 1], [2, 3]], 4, True),
        ([[0, 1], [2, 3]], 5, False),
        ([[2, 3], [0, 1]], 4, False),
        ([[0, 1], [2, 2]], 4, False),
    ],
)
def test_rows_in_their_natural_order_need_no_index(
    rows_Gq: list[list[int]], rows: int, natural: bool
) -> None:
    host_Gq = np.array(rows_Gq)
    mask_GqK = torch.ones(2, 2, 3, dtype=torch.bool)
    index_Gq = row_index(host_Gq, rows, mask_GqK.device)
    group = AttentionGroup(index_Gq, SlotRun(0, 3, 3, 2), mask_GqK, torch.zeros(2, 3), host_Gq)
    assert (group.rows_Gq is None) == natural
    value_N = torch.arange(10, 10 + rows)
    assert group.of_rows(value_N[: 4 if natural else rows]).tolist() == [
        [10 + row for row in one] for one in rows_Gq
    ]


def queries(rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, HEADS, DIM, generator=draw, dtype=torch.float64)


CASES = {
    "one sequence": (1, False),
    "shared rows": (1, True),
    "rows of a pool": (3, False),
    "trees of their own sizes": (1, False, True),
    "the same in rows": (3, False, True),
}


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_all_backends_attend_to_what_the_rule_allows(case: str, even: bool, draw: Random) -> None:
    """Segments on the way to the root, committed or prompts of this forward, not behind the row;
    of its own tree a node sees its ancestors."""
    one = scene(draw, *CASES[case])
    rows = replace(one.rows, blend=object() if even else None)  # type: ignore[arg-type]
    q_Nhd = queries(rows.tokens_BQ.numel())
    expected = attend_naively(one, q_Nhd)
    for name in ("dense", "grouped", "cascade"):
        out_NI = attended(plan_attention(rows, one.kv, attention=name), q_Nhd, one.kv)
        for row, expected_I in expected.items():
            assert torch.allclose(out_NI[row], expected_I, atol=1e-9), (name, row)

"""CacheBlend: layer plans and their costs, which rows are recomputed, roles, budgets, ties."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specsot.ops.blend import Blend, BlendRows, ChunkKV, RowRole, deviation, join, pick, where_true
from specsot.ops.layer_plan import (
    BlendSettings,
    blend_flops,
    compile_layer_plan,
    decode_plan,
    prefill_flops,
)


def plan_of(layers: int, **settings: Any) -> list[int]:
    return [int(status) for status in compile_layer_plan(BlendSettings(**settings), layers)]


def test_plans_of_four_layers() -> None:
    assert plan_of(4, plan="plain") == [0, 0, 0, 0]
    assert plan_of(4, plan="blend") == [0, 1, 2, 2]
    assert plan_of(4, plan="blend", check_layers=(1, 3), ratios=(0.2, 0.1)) == [0, 1, 2, 1]
    assert plan_of(4, plan="blend", check_layers=(2, 3), ratios=(0.2, 0.2)) == [0, 0, 1, 1]
    assert plan_of(4, plan="reuse") == [3, 3, 3, 3]
    assert list(map(int, decode_plan(4))) == [-1, -1, -1, -1]


def test_a_check_layer_that_the_model_lacks() -> None:
    with pytest.raises(ValueError, match=r"`check_layers` holds 4, but the .* layers are 0 to 3"):
        plan_of(4, plan="blend", check_layers=(1, 4), ratios=(0.2, 0.1))
    with pytest.raises(ValueError, match="`check_layers` holds 1, but"):
        plan_of(1, plan="blend")


def test_when_nothing_is_gained_the_plan_is_plain() -> None:
    settings = BlendSettings(plan="blend", min_tokens=256)
    assert [settings.kind_for(cached) for cached in (0, 255, 256)] == ["plain", "plain", "blend"]
    assert BlendSettings(plan="blend", ratios=(1.0,)).kind_for(5000) == "plain"
    assert BlendSettings(plan="reuse").kind_for(256) == "reuse"
    assert BlendSettings(plan="reuse", ratios=(1.0,)).kind_for(256) == "reuse"
    assert BlendSettings(plan="blend", min_tokens=0).kind_for(0) == "plain"
    assert BlendSettings().kind_for(5000) == "plain"


def shape_of(**sizes: int) -> Any:
    return SimpleNamespace(**sizes)


@pytest.mark.parametrize(
    ("ratio", "speedup"),
    [(0.0, 20), (0.05, 10), (0.1, 6.9), (0.15, 5.2), (0.18, 4.5), (0.3, 3.0), (0.5, 1.9)],
)
def test_a_model_of_four_billion_at_4096_tokens(ratio: float, speedup: float) -> None:
    shape = shape_of(hidden_size=2560, intermediate_size=9728, heads=32, kv_heads=8, head_dim=128)
    full = prefill_flops(shape, 36, 4096)
    part = blend_flops(shape, 36, BlendSettings(plan="blend", ratios=(ratio,)), 4032, 64)
    assert full / part == pytest.approx(speedup, rel=0.05)


def test_operations_counted_by_hand() -> None:
    shape = shape_of(hidden_size=3, intermediate_size=5, heads=2, kv_heads=1, head_dim=4)
    layer = (
        2 * 2 * 3 * (8 + 4 + 4)  # projections of two rows
        + 2 * 2 * (1 + 2) * 8  # scores and sums: the first row sees one key, the second two
        + 2 * 2 * 8 * 3  # output projection
        + 2 * 2 * 3 * 3 * 5  # MLP
    )
    assert prefill_flops(shape, 7, 2) == 7 * layer
    everything = BlendSettings(plan="blend", ratios=(1.0,))
    assert blend_flops(shape, 7, everything, 1, 1) == 7 * layer
    reuse = blend_flops(shape, 7, BlendSettings(plan="reuse"), 1, 1)
    assert reuse == 7 * (2 * 3 * 16 + 2 * 2 * 2 * 8 + 2 * 8 * 3 + 2 * 3 * 3 * 5)
    gradual = BlendSettings(plan="blend", check_layers=(1, 3), ratios=(0.5, 0.2))
    assert blend_flops(shape, 7, gradual, 100, 9) < blend_flops(
        shape, 7, BlendSettings(plan="blend", ratios=(0.5,)), 100, 9
    )


LETTERS = {".": RowRole.PADDING, "s": RowRole.SUFFIX, "p": RowRole.PROTECTED, "r": RowRole.REUSED}


def rows_of(roles: list[str], branches: list[str], chunks: list[str] | None = None) -> BlendRows:
    role = np.array([[LETTERS[c] for c in row] for row in roles], np.int32)
    branch = np.array([[int(c) for c in row] for row in branches], np.int32)
    chunk = branch * 0 if chunks is None else np.array([[int(c) for c in r] for r in chunks])
    return BlendRows(role, branch // 5, branch, chunk.astype(np.int32))


def cache(rows: int) -> ChunkKV:
    return ChunkKV(torch.zeros(2, rows, 1, 4), torch.zeros(2, rows, 1, 4))


def made(rows: BlendRows, **settings: Any) -> Blend:
    cached = int(np.isin(rows.role_BQ, (RowRole.PROTECTED, RowRole.REUSED)).sum())
    return Blend.of(rows, cache(cached), BlendSettings(**{"plan": "blend"} | settings))


def picked(blend: Blend, deviations: list[float], check: int = 0) -> list[int]:
    return blend.index_R[pick(torch.tensor(deviations), blend, check)].tolist()


ONE = rows_of(["pprrrrrs"], ["00000000"])


def test_rows_that_deviate_most_are_picked() -> None:
    blend = made(ONE, ratios=(0.5,))
    assert blend.index_R.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert blend.counts_CG == ((2, 0),)
    assert picked(blend, [9, 9, 1, 5, 2, 4, 3]) == [3, 5]  # never the protected ones
    # of equals the lower index
    assert picked(made(ONE, ratios=(0.6,)), [0, 0, 1, 2, 1, 1, 1]) == [2, 3, 4]
    assert picked(made(ONE, ratios=(0.4,)), [0] * 7) == [2, 3]


def test_shares_are_cut_not_rounded() -> None:
    ten = rows_of(["r" * 10 + "s"], ["0" * 11])
    for ratio, count in ((0.0, 0), (0.09, 0), (0.1, 1), (0.199, 1), (0.29, 2), (1.0, 10)):
        assert made(ten, ratios=(ratio,)).counts_CG == ((count, 0),)


TWO = rows_of(["rrrrsrrrrrrss"], ["0000011111111"], ["0011000000011"])
PAIR = rows_of(["rrrrsrrrrs"], ["0000055555"])


@pytest.mark.parametrize(
    ("budget", "counts", "found"),
    [
        ("per_branch", (2, 3), [0, 1, 8, 9, 10]),
        ("per_prompt", (5,), [0, 1, 2, 3, 10]),
        ("per_chunk", (1, 1, 3), [0, 2, 8, 9, 10]),
    ],
)
def test_budgets(budget: Any, counts: tuple[int, ...], found: list[int]) -> None:
    assert made(PAIR, ratios=(0.5,), budget="per_prompt").counts_CG == ((2, 2, 0),)
    blend = made(TWO, ratios=(0.5,), budget=budget)
    assert blend.counts_CG == ((*counts, 0),)
    assert picked(blend, [20, 19, 18, 17, 1, 2, 3, 4, 5, 6]) == found


def test_a_later_check_picks_among_the_rows_left() -> None:
    blend = made(ONE, check_layers=(1, 2), ratios=(0.6, 0.2))
    assert blend.counts_CG == ((3, 0), (1, 0))
    assert picked(blend, [-1, -1, -1, 3, -1, 0, 2], check=1) == [3]
    assert picked(blend, [-1, -1, -1, 0, -1, 0, 0], check=1) == [3]


def test_room_for_rows_that_may_be_left() -> None:
    rows = rows_of(["ppprrrrs", "....rrss"], ["00000000", "11111111"])
    both_Gq = np.arange(16).reshape(2, 8)
    assert made(rows, ratios=(0.5,)).width(both_Gq, 0) == 3
    blend = made(rows, ratios=(0.5,), budget="per_prompt")
    assert (blend.width(both_Gq, 0), blend.width(both_Gq, None)) == (4, 2)
    assert [blend.width(both_Gq[b : b + 1], 0) for b in (0, 1)] == [4, 4]
    assert [blend.width(both_Gq[b : b + 1], None) for b in (0, 1)] == [1, 2]
    assert blend.counts_CG == ((3, 0),)
    assert blend.index_R.tolist() == [0, 1, 2, 3, 4, 5, 6, 12, 13]


def test_protected_rows_alone() -> None:
    blend = made(rows_of(["ppps"], ["0000"]), ratios=(1.0,))
    assert blend.counts_CG == ((0,),)
    assert picked(blend, [1, 2, 3]) == []


def test_deviations_count_the_parts_asked_for() -> None:
    zero, one = torch.zeros(3, 2, 4), torch.ones(3, 2, 4)
    for metric, value in (("k", 8.0), ("v", 72.0), ("kv", 80.0)):
        found = deviation((one, 3 * one), (zero, zero), metric)  # type: ignore[arg-type]
        assert found.tolist() == [value] * 3
    half = deviation((300 * one.half(), one.half()), (zero.half(), zero.half()), "k")
    assert (half.dtype, half.tolist()) == (torch.float32, [720000.0] * 3)  # not infinite


def test_chunks_are_joined_in_order() -> None:
    first = ChunkKV(torch.zeros(2, 3, 1, 4), torch.ones(2, 3, 1, 4), torch.zeros(3, 5))
    second = ChunkKV(torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), torch.ones(1, 5))
    whole = join([first, second])
    assert whole.keys_LRgd[0, :, 0, 0].tolist() == [0, 0, 0, 1]
    assert whole.features_RF is not None and whole.features_RF[:, 0].tolist() == [0, 0, 0, 1]
    assert (whole.rows, whole.bytes) == (4, 4 * (2 * 2 * 4 * 4 + 4 * 5))
    assert join([first, ChunkKV(second.keys_LRgd, second.values_LRgd)]).features_RF is None


def test_true_entries_in_their_order() -> None:
    assert where_true(torch.tensor([False, True, True, False, True]), 3).tolist() == [1, 2, 4]
    assert where_true(torch.tensor([False, False]), 0).tolist() == []

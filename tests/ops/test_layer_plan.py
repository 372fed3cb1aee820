"""Layer plans: seed values, layers that a model lacks, and what a plan costs."""

from typing import Any

import pytest

from specsot.ops.layer_plan import (
    BlendSettings,
    LayerShape,
    LayerStatus,
    blend_flops,
    compile_layer_plan,
    decode_plan,
    prefill_flops,
)


def plan_of(layers: int, **settings: Any) -> list[int]:
    return [int(status) for status in compile_layer_plan(BlendSettings(**settings), layers)]


def test_values_of_the_status() -> None:
    assert {status.name: int(status) for status in LayerStatus} == {
        "DECODE": -1,
        "FULL": 0,
        "CHECK": 1,
        "AFTER_CHECK": 2,
        "REUSE": 3,
    }


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


@pytest.mark.parametrize(
    ("ratio", "speedup"),
    [(0.0, 20), (0.05, 10), (0.1, 6.9), (0.15, 5.2), (0.18, 4.5), (0.3, 3.0), (0.5, 1.9)],
)
def test_a_model_of_four_billion_at_4096_tokens(ratio: float, speedup: float) -> None:
    shape = LayerShape(hidden=2560, inner=9728, heads=32, kv_heads=8, head_dim=128)
    full = prefill_flops(shape, 36, 4096)
    part = blend_flops(shape, 36, BlendSettings(plan="blend", ratios=(ratio,)), 4032, 64)
    assert full / part == pytest.approx(speedup, rel=0.05)


def test_operations_counted_by_hand() -> None:
    shape = LayerShape(hidden=3, inner=5, heads=2, kv_heads=1, head_dim=4)
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

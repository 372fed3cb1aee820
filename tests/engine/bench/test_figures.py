"""Figures and their intervals, on rounds that are made up; changes against a baseline."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from specsot.engine.bench.command import changes
from specsot.engine.bench.comparison import acceptance_by_depth
from specsot.engine.bench.experiment import DRAWS, FIGURES, estimate, resampled
from specsot.engine.bench.sides import Moments, PoolUse, SideRun
from specsot.engine.record.metrics import Meter

MS = 1_000_000


def a_run(first: int, last: int, tokens: int = 11, digest: str = "", **meter: Any) -> SideRun:
    moments = Moments(first * MS, last * MS, tokens - 1, 3)
    return SideRun(Meter(tokens=tokens, in_run=last * MS, **meter), {}, moments, digest=digest)


def test_speedups_are_medians_of_ratios_within_rounds() -> None:
    theirs = [a_run(10, 110), a_run(20, 220), a_run(5, 405, tokens=21)]
    mine = [a_run(10, 60), a_run(10, 60), a_run(5, 105, tokens=11)]
    found = FIGURES["speedup_decode"].measure(mine, theirs, [0, 1, 2])
    assert found is not None and found.value == 2  # 2, 4 and, per token, 2
    assert (found.low, found.high) == (2, 4)
    whole = FIGURES["speedup_ttlt"].measure(mine, theirs, [0, 1, 2])
    assert whole is not None and whole.value == pytest.approx(220 / 60)
    shorter = FIGURES["length_ratio"].measure(mine, theirs, [0, 1, 2])
    assert shorter is not None and shorter.low == pytest.approx(11 / 21)


def test_what_was_not_finished_does_not_count() -> None:
    broken = replace(a_run(1, 9999), problems=["stopped"])
    figure = FIGURES["speedup_ttlt"]
    found = figure.measure([a_run(1, 2), broken], [a_run(1, 4), a_run(1, 4)], [0, 1])
    assert found is not None and found.value == 2 and found.low is None
    assert figure.measure([broken], [a_run(1, 4)], [0]) is None


def test_sums_peaks_and_what_only_we_can_tell() -> None:
    one = a_run(1, 2, rows=10, drafted=8, accepted=4, lengths=Counter({1: 2, 3: 1}))
    two = a_run(1, 2, rows=10, drafted=2, accepted=1, lengths=Counter({2: 2}))
    peer = a_run(1, 2, lengths=Counter({1: 5}))
    rate = FIGURES["acceptance_rate"].measure([one, two], [one, two], [0, 0])
    assert rate is not None and rate.value == 0.5
    tau = FIGURES["tau_step"].measure([one, two], [one, two], [0, 0])
    assert tau is not None and tau.value == 9 / 5
    assert FIGURES["rows"].measure([peer], [peer], [0]) is None
    pools = {"target": PoolUse(1, 4 * MS, 9 * MS), "drafter": PoolUse(1, MS, 0)}
    held = SideRun(Meter(), pools)
    most = FIGURES["kv_held_mb"].measure([held, one], [held, one], [0, 0])
    assert most is not None and most.value == 5
    one, two = (a_run(1, 2, digest=digest) for digest in "xy")
    same = FIGURES["same_answer"].measure([one, one], [one, two], [0, 1])
    assert same is not None and same.value == 0.5
    assert acceptance_by_depth(Counter({1: 2, 2: 1, 3: 1})) == [0.5, 0.5]


def test_draws_take_prompts_first_and_then_their_repeats() -> None:
    numbers = resampled([0, 0, 0, 1, 1])
    assert numbers.shape == (DRAWS, 6) and set(numbers.ravel()) == set(range(5))
    prompts = numbers[:, ::3] >= 3  # the first of each of the two drawn prompts
    pairs = set(product((False, True), repeat=2))
    assert {tuple(row) for row in prompts.tolist()} == pairs
    assert (resampled([0, 0, 0, 1, 1]) == numbers).all()


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random, hits = np.random.default_rng(3), 0
    for _ in range(60):
        values = random.normal(2.0, 0.3, 24)
        found = estimate(range(24), lambda at, own=values: own[at].mean(-1))
        assert found.low is not None and found.high is not None
        hits += found.low <= 2.0 <= found.high
    assert 51 <= hits <= 60


def result(**figures: list[float | None]) -> dict[str, Any]:
    return {"rows": {"eagle": {"figures": figures, "reference": "A"}}}


@pytest.mark.parametrize(
    "name, before, now, sign",
    [
        ("speedup_decode", [2.0, 1.9, 2.1], [1.5, 1.4, 1.6], -1),
        ("speedup_decode", [2.0, 1.9, 2.1], [1.8, 1.6, 2.0], 0),  # they overlap
        ("speedup_decode", [2.0, 1.99, 2.01], [1.95, 1.94, 1.96], 0),  # sure, and too small
        ("speedup_decode", [2.0, 1.9, 2.1], [2.5, 2.4, 2.6], 1),
        ("speedup_decode", [2.0, None, None], [1.0, None, None], 0),  # of single rounds
        ("ms_per_token", [2.0, 1.9, 2.1], [4.0, 3.9, 4.1], 0),  # another hour's
        ("tau_step", [3.0, 2.5, 3.5], [2.9, 2.4, 3.4], -1),  # counted: the interval says nothing
        ("kv_held_mb", [5.0, None, None], [5.2, None, None], -1),
        ("kv_held_mb", [5.0, None, None], [4.0, None, None], 1),
        ("tokens", [50.0, 50.0, 50.0], [20.0, 20.0, 20.0], 0),  # neither better nor worse
    ],
)
def test_a_change_is_what_noise_does_not_explain(
    name: str, before: list[float | None], now: list[float | None], sign: int
) -> None:
    worse, better = changes(result(**{name: before}), result(**{name: now}))
    assert (len(better) - len(worse)) == sign and len(better) + len(worse) == abs(sign)
    assert all(name in str(one) for one in (*worse, *better))

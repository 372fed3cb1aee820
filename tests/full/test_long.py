"""Ten thousand requests in one run, and trainings that are killed at many moments and resumed."""

from pathlib import Path

import pytest
from helpers.interrupted import KINDS, check_equal, train_twice
from helpers.many import check, serve, short

from specsot.engine.models import Models


@pytest.mark.parametrize("layout", ["bim", "batching"])
def test_ten_thousand_short_requests(layout: str, small: Models) -> None:
    texts = [f"text {number}" for number in range(100)]
    check(serve(short(layout, small), texts, 100), 10_000)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_is_the_unbroken_one(tmp_path: Path, kind: str, seed: int) -> None:
    kills = train_twice(kind, tmp_path, steps=120, seed=seed)
    check_equal(tmp_path, kind, 120, kills)

"""Ten thousand requests in one run, and trainings that are killed at many moments and resumed."""

from pathlib import Path

import pytest
from helpers.interrupted import KINDS, check_equal, train_twice
from helpers.many import check, serve, short
from helpers.support import Graphs, tiny_models
from helpers.tiny import write_tiny_target


@pytest.mark.parametrize("layout", ["bim", "batching"])
def test_ten_thousand_short_requests(layout: str, tmp_path: Path, graphs: Graphs) -> None:
    models = tiny_models(write_tiny_target(tmp_path / "target", layers=1, hidden=16), None, ())
    texts = [f"text {number}" for number in range(100)]
    check(serve(short(layout, models, graphs), texts, 100), 10_000)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_is_the_unbroken_one(tmp_path: Path, kind: str, seed: int) -> None:
    kills = train_twice(kind, tmp_path, steps=120, seed=seed)
    check_equal(tmp_path, kind, 120, kills)

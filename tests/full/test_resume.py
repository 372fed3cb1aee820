"""Trainings of every kind of drafter, killed at many moments and resumed.

Run by name: `pytest tests/full/test_resume.py`.
"""

from pathlib import Path

import pytest
from helpers.interrupted import KINDS, check_equal, train_twice


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_is_the_unbroken_one(tmp_path: Path, kind: str, seed: int) -> None:
    kills = train_twice(kind, tmp_path, steps=120, seed=seed)
    check_equal(tmp_path, kind, 120, kills)

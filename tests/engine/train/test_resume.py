"""A killed training goes on as if nothing had happened; all drafters: tests/full/test_resume.py."""

from pathlib import Path

import pytest
from helpers.interrupted import check_equal, train_twice


@pytest.mark.timeout(120)
def test_a_training_killed_five_times_is_the_unbroken_one(tmp_path: Path) -> None:
    kills = train_twice("dflash", tmp_path, steps=40)
    check_equal(tmp_path, "dflash", 40, kills)

"""Two thousand and more bad model folders: each is refused in one line, or loads."""

import sys
from pathlib import Path

import pytest
from helpers.mutations import KINDS, Outside, faults_of, write_good
from helpers.support import SEED

from specsot.engine.models import load_models

FOLDERS = 2400


@pytest.mark.skipif(sys.platform != "linux", reason="what is opened is told by inotify")
def test_bad_folders(tmp_path: Path) -> None:
    good = write_good(tmp_path)
    models, outside = load_models(good / "target", None), Outside(good / "outside")
    kinds = ["target", "target", *KINDS]
    faults: list[str] = []
    for number in range(FOLDERS):
        seed = SEED * 100_000 + number
        faults += faults_of(good, models, kinds[number % len(kinds)], seed, outside)
    assert not faults, "\n".join(faults)

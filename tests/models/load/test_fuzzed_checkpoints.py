"""A drawn part of tests/full/test_fuzzed_checkpoints.py."""

import sys
from pathlib import Path

import pytest
from helpers.mutations import KINDS, Outside, faults_of, write_good
from helpers.support import SEED

from specsot.engine.models import load_models

FOLDERS = 60
FOUND = {2410: "dflash", 5506: "dflash", 130: "dflash", 191: "vanilla"}  # what was wrong once


@pytest.mark.skipif(sys.platform != "linux", reason="what is opened is told by inotify")
def test_some_bad_folders(tmp_path: Path) -> None:
    good = write_good(tmp_path)
    models, outside = load_models(good / "target", None), Outside(good / "outside")
    kinds = ["target", "target", *KINDS]
    drawn = {SEED * 1000 + n: kinds[n % len(kinds)] for n in range(FOLDERS)} | FOUND
    faults = [
        fault
        for seed, kind in drawn.items()
        for fault in faults_of(good, models, kind, seed, outside)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="what is opened is told by inotify")
def test_the_watch_sees_what_is_opened(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    (tmp_path / "file").write_text("x")
    assert outside.opened() and not outside.opened()
    (tmp_path / "file").read_text()
    assert outside.opened()

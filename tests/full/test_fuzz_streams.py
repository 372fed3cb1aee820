"""Run by name: closed, full and broken streams, full disks and signals; no answer is lost."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from helpers.fuzz_streams import run_cases, stream_cases
from helpers.support import SEED


def test_streams_disks_and_signals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = stream_cases(Random(SEED))
    codes, faults = run_cases(cases, tmp_path)
    counts = ", ".join(f"{count} x {code}" for code, count in sorted(Counter(codes).items()))
    with capsys.disabled():
        print(f"\nstreams: {len(codes)} tried ({counts}), {len(faults)} faults")
    assert not faults, "\n".join(faults)
    assert len(codes) >= 80

"""Run by name: changed graphs, odd inputs, broken streams and bad model folders, by thousands."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.fuzz import try_all, try_graph, try_input
from helpers.fuzz_streams import run_cases, stream_cases
from helpers.mutations import KINDS, check_folders
from helpers.support import SEED


@pytest.mark.parametrize("first", range(0, 600, 100))
@pytest.mark.parametrize(("one", "code"), [(try_graph, 3), (try_input, 2)])
def test_what_is_odd_is_explained_or_runs(
    one: Any,
    code: int,
    first: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    tally = try_all(one, range(first, first + 100), SEED)
    report(tally.report(f"{one.__name__} from {first}"))
    assert not tally.faults, "\n".join(tally.faults)
    assert min(tally.ended[0], tally.ended[code]) > 10


def test_streams_disks_and_signals(tmp_path: Path, report: Callable[[str], None]) -> None:
    cases = stream_cases(Random(SEED))
    codes, faults = run_cases(cases, tmp_path)
    counts = ", ".join(f"{count} x {code}" for code, count in sorted(Counter(codes).items()))
    report(f"streams: {len(codes)} tried ({counts}), {len(faults)} faults")
    assert not faults, "\n".join(faults)
    assert len(codes) >= 80


FOLDERS = 2400


@pytest.mark.skipif(sys.platform != "linux", reason="what is opened is told by inotify")
def test_bad_folders(tmp_path: Path) -> None:
    kinds = ["target", "target", *KINDS]
    drawn = {SEED * 100_000 + n: kinds[n % len(kinds)] for n in range(FOLDERS)}
    check_folders(tmp_path, drawn)

"""Options of comparisons and experiments that are quick."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from specsot.engine.bench import sides
from specsot.engine.prepare.options import RunOptions


@pytest.fixture
def options(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunOptions]:
    """Random models and a given outline: quick, and nothing depends on what they were taught."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sides, "cpu_share", lambda: 1.0)  # independent of the machine's load
    Path("o.txt").write_text("PLAN\n1|60|-|-|First\n2|60|-|1|Second\nEND\n")
    Path("q.txt").write_text("How do bees make honey?\nWhat is a lake?\n")
    yield RunOptions(
        prompts=Path("q.txt"),
        model=str(tiny[0]),
        drafter_model=str(tiny[1]),
        outline=Path("o.txt"),
        max_new_tokens=8,
        threads=1,
    )


@pytest.fixture
def endless_options(
    endless: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunOptions:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sides, "cpu_share", lambda: 1.0)  # independent of the machine's load
    Path("q.txt").write_text("How do bees make honey?\nWhat is a lake?\n")
    return RunOptions(
        prompts=Path("q.txt"),
        model=str(endless[0]),
        drafter_model=str(endless[1]),
        max_new_tokens=8,
        threads=1,
    )

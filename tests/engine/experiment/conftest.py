"""Experiments that are quick."""

from pathlib import Path

import pytest

from specsot.engine.bench import sides
from specsot.engine.prepare.options import RunOptions


@pytest.fixture
def options(
    endless: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunOptions:
    """Random models that never stop by themselves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sides, "cpu_share", lambda: 1.0)  # whoever else uses the machine
    Path("q.txt").write_text("How do bees make honey?\nWhat is a lake?\n")
    return RunOptions(
        prompts=Path("q.txt"),
        model=str(endless[0]),
        drafter_model=str(endless[1]),
        max_new_tokens=8,
        threads=1,
    )

"""Options of comparisons and experiments that are quick."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsot.engine.bench import sides
from specsot.engine.prepare.options import RunOptions


@pytest.fixture
def quick(
    endless: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunOptions:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sides, "cpu_share", lambda: 1.0)  # independent of the machine's load
    Path("q.txt").write_text("How do bees make honey?\nWhat is a lake?\n")
    models: dict[str, Any] = {"model": str(endless[0]), "drafter_model": str(endless[1])}
    return RunOptions(prompts=Path("q.txt"), max_new_tokens=8, threads=1, **models)


@pytest.fixture
def options(quick: RunOptions, tiny: tuple[Path, Path]) -> RunOptions:
    """Random models and a given outline: quick, and nothing depends on what they were taught."""
    Path("o.txt").write_text("PLAN\n1|60|-|-|First\n2|60|-|1|Second\nEND\n")
    models: dict[str, Any] = {"model": str(tiny[0]), "drafter_model": str(tiny[1])}
    return replace(quick, outline=Path("o.txt"), **models)

"""Every tool can be imported, and runs from the repository's root beside an installed specsot."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import specsot

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tools").rglob("*.py"))
NAMES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES]


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_is_imported_under_one_name(name: str) -> None:
    assert import_module(name).__name__ == name
    assert not {"ops", "models", "states", "engine"} & sys.modules.keys()


@pytest.mark.parametrize("name", ["embedded.train", "embedded.document_sets", "embedded.quality"])
def test_a_command_explains_itself(name: str) -> None:
    home = str(Path(specsot.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", f"tools.{name}", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": home},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Usage:" in done.stdout, done.stderr

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


EXPLAIN = """
import runpy, sys
for name in ("train", "document_sets", "quality"):
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(f"tools.embedded.{name}", run_name="__main__")
    except SystemExit as end:
        assert not end.code
"""


def test_commands_explain_themselves() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(specsot.__file__).parents[1])}
    words = [sys.executable, "-c", EXPLAIN]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("Usage:") == 3, done.stderr

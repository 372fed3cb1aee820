"""A folder for packages of a user."""

import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest
from helpers.packages import Write


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes files of packages that can be imported while a test runs."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def files(texts: dict[str, str]) -> Path:
        for name, text in texts.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        invalidate_caches()
        return tmp_path

    yield files
    for name in {name for name in sys.modules if name.startswith("own")} - known:
        del sys.modules[name]

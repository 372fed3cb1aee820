"""These take as long as they take."""

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = item.path.is_relative_to(Path(__file__).parent)
        if own and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def put(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", flush=True)

    return put

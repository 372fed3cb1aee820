"""Ten thousand requests in one run: `tests/runs/test_many_requests.py`, five times as long.

pytest tests/full/test_many_requests.py
"""

from pathlib import Path

import pytest
from helpers.many import check, serve, short
from helpers.support import Graphs, tiny_models
from helpers.tiny_models.tiny import write_tiny_target


@pytest.mark.parametrize("layout", ["bim", "batching"])
def test_ten_thousand_short_requests(layout: str, tmp_path: Path, graphs: Graphs) -> None:
    models = tiny_models(write_tiny_target(tmp_path / "target", layers=1, hidden=16), None, ())
    texts = [f"text {number}" for number in range(100)]
    check(serve(short(layout, models, graphs), texts, 100), 10_000)

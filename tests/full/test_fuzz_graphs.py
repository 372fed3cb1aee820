"""Run by name: 600 graphs with something changed, through `check` and `run`."""

from pathlib import Path

import pytest
from helpers.fuzz import try_graphs
from helpers.support import SEED

PARTS, EACH = 6, 100


@pytest.mark.parametrize("part", range(PARTS))
def test_changed_graphs_are_explained_or_run(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tally = try_graphs(range(part * EACH, (part + 1) * EACH), SEED)
    with capsys.disabled():
        print(f"\n{tally.report(f'graphs, part {part}')}")
    assert not tally.faults, "\n".join(tally.faults)
    assert tally.ended[0] > EACH // 10 and tally.ended[3] > EACH // 10

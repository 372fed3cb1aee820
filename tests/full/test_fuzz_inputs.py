"""Run by name: 350 odd prompts, files, options, variables and settings, through `run`."""

from pathlib import Path

import pytest
from helpers.fuzz import try_inputs
from helpers.support import SEED

PARTS, EACH = 5, 70


@pytest.mark.parametrize("part", range(PARTS))
def test_odd_inputs_are_explained_or_answered(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tally = try_inputs(range(part * EACH, (part + 1) * EACH), SEED)
    with capsys.disabled():
        print(f"\n{tally.report(f'inputs, part {part}')}")
    assert not tally.faults, "\n".join(tally.faults)
    assert tally.ended[0] > EACH // 10 and tally.ended[2] > EACH // 10

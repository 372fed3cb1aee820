"""Signs of life of long work where nobody watches a terminal."""

import pytest

from specsot.engine import terminal


def test_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 3.0, 11.0, 11.0, 12.0, 30.0, 30.0])
    monkeypatch.setattr(terminal, "monotonic", lambda: next(clock))
    with terminal.working("working ...") as tell:
        for number in range(4):
            tell(f"{number} of 4")
    assert capsys.readouterr().err == "1 of 4\n3 of 4\n"

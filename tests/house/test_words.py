"""The pages, help texts and graphs speak of objects, and not of persons or in riddles."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AVOIDED = re.compile(
    r"\b(nobody|somebody|anybody|everybody|whoever|whom|beside|thereby|therein|whereby"
    r"|stands? (?:in|on|for|behind|there)|lies (?:in|behind)|such an?|so many|the latter"
    r"|(?:is|are|was) told)\b",
    re.I,
)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(p for p in (ROOT / "docs").glob("*.md") if not p.name.startswith("samples")),  # of models
    *(ROOT / "examples").glob("*/README.md"),
    *(ROOT / "engine/cli").glob("*.yaml"),
    *(ROOT / "graphs").rglob("*.yaml"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_plain_words(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    assert [f"{at}: {line}" for at, line in lines if AVOIDED.search(line)] == []


def test_a_riddle_is_found() -> None:
    assert AVOIDED.search("Whoever asks is told so.")
    assert not AVOIDED.search("The target verifies the drafts of all branches in one forward.")

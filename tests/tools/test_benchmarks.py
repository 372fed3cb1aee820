"""docs/benchmarks.md and its pictures are those of the results that are kept."""

import re
from pathlib import Path
from shutil import copy

import pytest

from tools.bench.benchmarks import KEPT, PAGE, page_of

pytest.importorskip("matplotlib")


def test_the_page_is_what_the_results_give(tmp_path: Path) -> None:
    for file in KEPT.glob("*.json"):
        copy(file, tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    assert page_of(tmp_path) == page, "python -m tools.bench.benchmarks"
    shown = re.findall(r"\(benchmarks/(.+?\.svg)\)", page)
    for folder in (KEPT, tmp_path):
        assert sorted(file.name for file in folder.glob("*.svg")) == sorted(shown)


def test_the_page_is_short_and_has_intervals_in_one_form() -> None:
    page = PAGE.read_text(encoding="utf-8")
    tables = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    assert len(page.split()) <= 4500 and not re.search(r"\(\d\S* to ", tables)
    assert re.search(r"\| \d\.\d\d \(\d\.\d\d\N{EN DASH}\d\.\d\d\) \|", tables)
    assert not re.search("[Ss]eed 0", page)
    for lines in re.findall(r"(?:^\|.*\n)+", page, re.M):
        assert lines.count("\n") <= 12, lines  # ten rows

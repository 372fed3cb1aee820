"""The pictures of docs/concepts.md are those that their command draws."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.pictures import draw

FOLDER = Path(__file__).parents[2] / "docs/pictures"
PAGE = (FOLDER.parent / "concepts.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_current(name: str) -> None:
    drawn = draw.PICTURES[name]()
    assert drawn == (FOLDER / name).read_text(encoding="utf-8"), "python -m tools.pictures.draw"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_the_page_shows_all_of_them_with_words_for_those_who_do_not_see_them() -> None:
    shown = re.findall(r"!\[(.{40,})\]\(pictures/([\w.]+)\)", PAGE)
    assert {name for _, name in shown} == set(draw.PICTURES)
    assert {path.name for path in FOLDER.iterdir()} == set(draw.PICTURES)

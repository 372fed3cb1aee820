"""What the pages name is there: files, pages, links; the site's menu has every page."""

import json
import re
from pathlib import Path

import pytest
from helpers.pages import PAGES, ROOT, text_of

ROOMS = "ops models states engine tools tests graphs examples"
FILE = re.compile(rf"`((?:{ROOMS.replace(' ', '|')})/[\w./-]+)`")
LINK = re.compile(r"\]\((?!https?:)([\w./-]*)(#[\w-]+)?\)")


def prose(page: str) -> str:
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    return re.sub(r"^\|[^|]+\| (?=`[^|]+\|$)", "", text, flags=re.M) if "concepts" in page else text


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_two_versions_of_a_line(page: str) -> None:
    assert re.findall(r"^(?:<{7}|>{7}) .*", text_of(page), re.M) == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page: str) -> None:
    missing = [name for name in FILE.findall(prose(page)) if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for name, anchor in LINK.findall(prose(page)):
        to = (ROOT / page).parent / name if name else ROOT / page
        assert to.exists(), name
        assert not anchor or anchor[1:] in anchors(to), name + anchor


def test_the_menu_has_every_page_once() -> None:
    menu = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(menu) == sorted(pages)


def test_certificates_are_good_and_those_in_full_are_named() -> None:
    folder = ROOT / "docs" / "certificates"
    pages = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    assert len(pages) > 20 and all(page["passed"] for page in pages.values())
    named = re.search(r"In full: (.*?)\.", (folder / "README.md").read_text(), re.S)
    assert named is not None
    in_full = {name for name, page in pages.items() if not page["quick"]}
    assert set(re.findall(r"`(\w+)`", named[1])) == in_full

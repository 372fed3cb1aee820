"""docs/architecture.md and CONTRIBUTING.md name packages, files, classes and ops that exist."""

import ast
import re
from pathlib import Path

import pytest

from specsot.states.graph.load import op_table

ROOT = Path(__file__).parents[2]
ROOMS = ("ops", "models", "states", "engine")
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = {"architecture": PAGE, "contributing": CONTRIBUTING}
SUBJECTS = dict(re.findall(r"^\| `([a-z/]+)` \| (.+) \|$", PAGE, re.M))
PLAIN = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
PICTURE = re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S)


def words(text: str, kind: str) -> list[str]:
    return [word for word in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(kind, word)]


def names_in(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return found


CLASS, FILE, OP = r"[A-Z]\w+", r"[\w./]+\.\w+", r"[a-z]+\.[a-z_]+_?"


def test_every_package_has_its_subject_on_the_page_and_no_other() -> None:
    packages = {
        file.parent.relative_to(ROOT).as_posix()
        for room in ROOMS
        for file in (ROOT / room).rglob("__init__.py")
    }
    assert set(SUBJECTS) == packages
    assert len(set(SUBJECTS.values())) == len(SUBJECTS)


@pytest.mark.parametrize("page", PAGES)
def test_files_are_there(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.M | re.S)
    named = [word for word in words(text, r"[\w./]+") if "/" in word]
    named += re.findall(r"\]\(([\w./]+)\)", text)
    folder = ROOT if page == "contributing" else ROOT / "docs"
    assert len(named) > 8
    assert [one for one in named if not ((ROOT / one).exists() or (folder / one).exists())] == []


def test_tests_that_are_named_in_commands_are_there() -> None:
    named = re.findall(r"tests/[\w./]*", CONTRIBUTING)
    assert named and all((ROOT / one).exists() for one in named)


def test_classes_stand_in_the_files_beside_them() -> None:
    lines = [line for line in PLAIN.replace(" in\n", " in ").splitlines() if words(line, CLASS)]
    assert len(lines) > 12
    for line in lines:
        files = [ROOT / one for one in words(line, FILE) if (ROOT / one).is_file()]
        there = set().union(*map(names_in, files))
        assert set(words(line, CLASS)) <= there, line


def test_what_the_picture_names_there_is() -> None:
    (picture,) = PICTURE
    modules = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    there = set().union(*map(names_in, modules))
    named = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+|\b[A-Z][a-z]+\b|\bKVCache\b", picture))
    assert len(named) > 12 and named <= there


def test_ops_are_in_the_table() -> None:
    named = [word for word in words(PLAIN, OP) if not (ROOT / word).exists()]
    assert len(named) > 8 and set(named) <= set(op_table().ops)


def test_the_reading_order_is_short() -> None:
    files = re.findall(r"^\d+\. `([\w/.]+)`", PAGE, re.M)
    lines = [len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files]
    assert 10 <= len(files) <= 12 and sum(lines) <= 3_000

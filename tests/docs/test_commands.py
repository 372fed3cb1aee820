"""Every command of every page runs as printed, page by page, from an empty folder; what the pages
name is there: files, pages, links; the site's menu has every page."""

import doctest
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import warm
from helpers.pages import BLOCK, PAGES, REASONS, ROOT, Block, blocks_of, not_run, text_of

from specsot.engine.certify.certificate import with_table
from specsot.engine.prepare.files import graph_names

# Blocks that are shown and not run: a command that is added without being run is added here.
NOT_RUN: dict[str, dict[str, int]] = {
    "README.md": {"install": 2, "network": 1},
    "CONTRIBUTING.md": {"checkout": 7, "install": 1},
    "examples/own_drafter/README.md": {"install": 1},
    "examples/eagle1/README.md": {"install": 1},
    "examples/draft_lengths/README.md": {"install": 1},
    "docs/benchmarks.md": {"checkout": 1},
    "docs/checkpoints.md": {"models": 1},
    "docs/cli.md": {"minutes": 5, "models": 1, "network": 2},
    "docs/cluster.md": {"install": 1, "models": 1, "other test": 2},
    "docs/cluster_simulated.md": {"minutes": 1},
    "docs/concepts.md": {"other test": 1},
    "docs/embedded.md": {"checkout": 2},
    "docs/drafters.md": {"models": 1},
    "docs/howto.md": {"minutes": 1, "models": 4, "network": 2},
    "docs/outlines.md": {"network": 1},
    "docs/performance.md": {"checkout": 6},
    "docs/quantised.md": {"checkout": 1},
    "docs/results.md": {"checkout": 2},
    "docs/samples.md": {"checkout": 1},
    "docs/samples_smollm2.md": {"checkout": 1},
    "docs/scheduling.md": {"minutes": 1},
    "docs/serving.md": {"install": 1, "models": 1, "other test": 5},
    "docs/smollm2.md": {"network": 1, "checkout": 1},
    "docs/troubleshooting.md": {"models": 1, "other test": 1},
    "docs/certificates/README.md": {"minutes": 1},
}
RUN = [page for page in PAGES if any(not block.skipped for block in blocks_of(page))]
SETTINGS = {"SPECSOT_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "CI": "true"}
SHORT = {"SPECSOT_MAX_NEW_TOKENS": "8", "FEW": "1"}  # on pages that show no output
SHIM = """#!/bin/sh
[ "${{FEW-}}" ] && case $1 in compare|sweep) export SPECSOT_PROMPTS={prompts};; esac
exec {python} -S -E {warm} ask {socket} {words} "$@"
"""


@pytest.fixture(scope="module")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for PATH with `specsot` and `python`, which start at once."""
    folder = tmp_path_factory.mktemp("bin")
    socket = folder / "socket"
    server = subprocess.Popen(
        [sys.executable, warm.__file__, "serve", str(socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    told = {"python": sys.executable, "warm": warm.__file__, "socket": socket}
    told["prompts"] = folder / "prompts.txt"
    told["prompts"].write_text("Why is the sky blue?\n")
    for name, words in (("specsot", "-m specsot"), ("python", "")):
        (folder / name).write_text(SHIM.format(**told, words=words))
        (folder / name).chmod(0o755)
    yield folder
    server.stdin.close()
    server.wait(10)


def perform(block: Block, folder: Path, more: dict[str, str]) -> tuple[str, Path]:
    """What the commands of a block printed, and the folder that they end in.

    They must end as the page says."""
    place = folder.parent / "place"
    place.write_text(str(folder))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{block.commands}\npwd > {place}"],
        cwd=folder,
        env=os.environ | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    told = f"line {block.line}:\n{block.commands}\nended with {done.returncode}:\n{done.stdout}"
    assert done.returncode == block.code, told
    return done.stdout, Path(place.read_text().strip())


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_from_an_empty_folder(page: str, shims: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    more = SETTINGS | {"PATH": f"{shims}{os.pathsep}{os.environ['PATH']}"}
    more |= {} if any(block.shown for block in blocks) else SHORT
    folder = tmp_path / "empty"
    folder.mkdir()
    for block in blocks:
        if not block.skipped:
            printed, folder = perform(block, folder, more)
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = doctest.OutputChecker().check_output(block.shown, printed, flags)
            assert same or not block.shown, f"line {block.line} printed\n{printed}"
            # What is drawn is not what greedy decoding takes.
            if "temperature" in block.commands and not block.code:
                digests = set(re.findall(r"^digest (\w+)", printed, re.M))
                assert len(digests) == block.commands.count("specsot run")


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_found_and_those_not_run_are_counted_and_have_a_reason(page: str) -> None:
    assert not_run(page) == NOT_RUN.get(page, {})
    assert set(not_run(page)) <= set(REASONS)
    text = text_of(page)
    markers = re.findall(r"<!-- (?:not run|ends with)", text)
    assert len(markers) == sum(bool(found["kind"]) for found in BLOCK.finditer(text))
    assert text.count("```sh") == len(blocks_of(page))
    others = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    assert [line for line in others.splitlines() if re.match(r"    +(specsot|python) ", line)] == []


# -- what the pages name --------------------------------------------------------------------------

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
def test_files_and_links_that_are_named_are_there(page: str) -> None:
    assert re.findall(r"^(?:<{7}|>{7}) .*", text_of(page), re.M) == [], "two versions of a line"
    missing = [name for name in FILE.findall(prose(page)) if not (ROOT / name).exists()]
    assert missing == []
    for name, anchor in LINK.findall(prose(page)):
        to = (ROOT / page).parent / name if name else ROOT / page
        assert to.exists(), name
        assert not anchor or anchor[1:] in anchors(to), name + anchor


def test_the_menu_has_every_page_once() -> None:
    menu = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(menu) == sorted(pages)
    assert "docs/tutorial.md" in RUN and "README.md" in RUN


def test_certificates_are_good_and_in_full() -> None:
    folder = ROOT / "docs/certificates"
    made = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    assert made.keys() == set(graph_names()), "every shipped graph has packaged models"
    assert all(document["passed"] and not document["quick"] for document in made.values())
    assert (folder / "README.md").read_text() == with_table(folder), "specsot certify --out"

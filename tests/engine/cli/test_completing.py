"""What the shell offers behind TAB, asked for as bash, zsh and fish ask."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import CommandLine

from specsot.engine.cli.main import COMMANDS
from specsot.engine.prepare.files import graph_names

Ask = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    (here / "mine.yaml").write_text("{version: 1, name: mine, extends: bim_dflash}")
    (here / "notes.txt").write_text("")
    (here / "sub").mkdir()
    for name in ("20260101T000000Z-eagle-00000a", "20260102T000000Z-ngram-00000b"):
        (here / "runs" / name).mkdir(parents=True)
        (here / "runs" / name / "manifest.json").write_text("{}")
    return here


@pytest.fixture
def ask(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """ask(**variables): what a shell with these variables is offered."""

    def asked(**variables: str) -> list[str]:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            cli()
        assert cli.err == ""
        return cli.out.split()

    return asked


@pytest.fixture
def bash(ask: Ask) -> Ask:
    def asked(*words: str) -> list[str]:
        text, count = "\n".join(("specsot", *words)), str(len(words))
        return ask(_SPECSOT_COMPLETE="complete_bash", COMP_WORDS=text, COMP_CWORD=count)

    return asked


def test_commands_graphs_files_and_folders(folder: Path, bash: Ask) -> None:
    assert bash("") == [command.name for command in COMMANDS]
    assert bash("ex") == ["explain"]
    for command in ("run", "compare", "sweep", "check", "show", "certify"):
        assert set(bash(command, "")) == {*graph_names(), "mine.yaml", "runs/", "sub/"}
    assert bash("run", "bim_e") == ["bim_eagle"] and bash("run", "./mi") == ["./mine.yaml"]
    (folder / "sub" / "other.yaml").write_text("")
    assert bash("run", "sub/") == ["sub/other.yaml"]
    assert bash("run", f"{folder}/m") == [f"{folder}/mine.yaml"]


def test_settings_of_the_graph_that_is_named(bash: Ask) -> None:
    offered = bash("run", "eagle", "--set", "drafter.")
    assert {"drafter.num_draft_tokens=4", "drafter.kind=eagle3"} <= set(offered)
    assert "drafter.block_size=8" not in offered and not bash("run", "eagle", "--set", "skel")
    assert "drafter.num_draft_tokens=4" in bash("check", "bim_eagle", "--set", "drafter.")
    assert "drafter.block_size=" in "".join(bash("run", "mine.yaml", "--set", ""))
    assert "skeleton.max_branches=8" in bash("run", "--set", "skel"), "of the default graph"
    other = bash("run", "eagle", "--set", "drafter.kind=vanilla", "--set", "drafter.ga")
    assert "drafter.gamma=5" in other


def test_bench_completes_its_graphs_and_settings(bash: Ask) -> None:
    assert {"eagle", "mine.yaml"} <= set(bash("bench", ""))
    assert bash("bench", "eagle", "--vary", "layout.ki") == ["layout.kind=bim"]


def test_other_shells_complete_settings_after_a_graph(ask: Ask) -> None:
    words = "specsot compare eagle@layout.kind=paged,drafter.top"
    zsh = "\n".join(ask(_SPECSOT_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=words))
    assert "eagle@layout.kind=paged,drafter.top_k=" in zsh
    fish = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": words}
    offered = ask(_SPECSOT_COMPLETE="complete_fish", **fish)
    assert offered[0].startswith("eagle@layout.kind=paged,drafter.top_k=")


def test_what_is_broken_offers_nothing_and_no_model_is_imported(bash: Ask) -> None:
    Path("specsot.yaml").write_text("graph: [")
    Path("broken.yaml").write_text("{")
    assert bash("run", "--set", "dr") == []
    assert bash("run", "broken.yaml", "--set", "dr") == []
    assert bash("run", "no/such/folder/") == []
    script = "import sys\nfrom specsot.engine.cli.main import main\ntry: main()\nfinally: "
    script += "assert not {'torch', 'transformers'} & sys.modules.keys()"
    asked = {"_SPECSOT_COMPLETE": "complete_bash", "COMP_WORDS": "specsot run", "COMP_CWORD": "2"}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=os.environ | asked, capture_output=True, text=True)
    assert done.stderr == "" and "bim_eagle" in done.stdout

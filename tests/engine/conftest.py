"""Tiny models in files, sessions of the embedded models, and the command line in this process."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import CommandLine
from helpers.embedded import Embedded
from helpers.support import graphs
from helpers.tiny import write_tiny_eagle3, write_tiny_target

import specsot
from specsot.engine.cli.run_command import run_command
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.options import RunOptions
from specsot.engine.run.session import Session

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OUTLINE = "PLAN\n1|60|-|-|First [bold]thing\n2|70|Search|1|Second\n3|70|-|-|Third\nEND\n"


def write_models(root: Path, seed: int) -> tuple[Path, Path]:
    target = write_tiny_target(root / "target", "qwen3", seed=seed, vocab=4096)
    embedded = Path(specsot.__file__).parent / "models" / "embedded" / "target"
    for name in TOKENIZER:
        shutil.copy(embedded / name, target)
    return target, write_tiny_eagle3(root / "drafter", target)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("endless"), seed=14)


@pytest.fixture(scope="session")
def embedded() -> Embedded:
    return Embedded()


@pytest.fixture(scope="session")
def session(embedded: Embedded) -> Callable[..., Session]:
    """session(graph, *sets, target=...): over the embedded models, which are loaded once."""

    def make(
        graph: str = "bim_eagle", *sets: str, budget: int | None = 12, **models: Any
    ) -> Session:
        program = open_graph(graph, sets=sets, table=graphs.table)
        return Session(program, replace(embedded.models, **models), max_new_tokens=budget)

    return make


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.setattr(os, "nice", lambda _: 0)  # `serve` lowers the priority of its process
    return CommandLine(capsys)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass
class Shell:
    """`specsot run` in this process, in a folder of its own."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    defaults: dict[str, Any]
    out: str = ""
    err: str = ""

    def run(self, **options: Any) -> int:
        given = {**self.defaults, **options}
        code = run_command(RunOptions(**given))
        self.out, self.err = self.capsys.readouterr()
        return code

    def repeat(self, **options: Any) -> int:
        """The last run again, from its run.yaml."""
        given = dict.fromkeys(self.defaults) | {"argv": (), "documents": ()}
        return self.run(**{**given, "graph": str(self.latest.resolve() / "run.yaml"), **options})

    @property
    def latest(self) -> Path:
        return self.folder / "runs" / "latest"

    def read(self, name: str) -> Any:
        return json.loads((self.latest / name).read_text())

    def lines(self, name: str) -> list[Any]:
        return [json.loads(line) for line in (self.latest / name).read_text().splitlines()]

    @property
    def digest(self) -> str:
        return str(self.read("manifest.json")["digest"])


@pytest.fixture
def shell(tiny: tuple[Path, Path], here: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    (here / "outline.txt").write_text(OUTLINE)
    defaults = {
        "graph": "bim_eagle",
        "prompt": "How do bees make honey?",
        "model": str(tiny[0]),
        "drafter_model": str(tiny[1]),
        "outline": Path("outline.txt"),
        "max_new_tokens": 24,
        "threads": 1,
        "argv": ("specsot", "run"),
    }
    return Shell(here, capsys, defaults)

"""An installed wheel holds everything a run needs, and runs in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import specsot
from specsot.engine.prepare.files import graph_names

ROOT = Path(__file__).parents[2]
ROOMS = ("engine", "models", "ops", "states")
LEFT_OUT = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")
OPEN = """
import specsot, sys
from specsot.engine.prepare.files import graph_names
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.models import load_models
from specsot.engine.bench.question_sets import PUBLISHED
assert PUBLISHED.is_file()
assert specsot.__file__.startswith(sys.argv[1]), specsot.__file__
models = load_models(embedded_folder("target"), embedded_folder("eagle3"))
assert str(embedded_folder("target")).startswith(sys.argv[1])
print(len(graph_names()), models.target.num_layers, models.drafter.num_layers)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, work / "tree", ignore=LEFT_OUT)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile"]
    target = work / "site"
    place = ["--target", str(target), str(work / "tree")]
    subprocess.run([*pip, *offline, *place], check=True)
    return target


def test_models_and_graphs_open_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(installed)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(graph_names())), "8", "1"]


def packages(root: Path) -> set[str]:
    return {p.parent.relative_to(root).as_posix() for p in root.rglob("*.py")}


def test_the_wheel_holds_the_rooms_and_nothing_else(installed: Path) -> None:
    root = installed / "specsot"
    assert {p.name for p in installed.iterdir()} - {"bin", "specsot"} == {"specsot-0.2.0.dist-info"}
    rooms = {".", *(f"{room}/{name}" for room in ROOMS for name in packages(ROOT / room))}
    assert packages(root) == {name.removesuffix("/.") for name in rooms}
    assert not {p.name for p in root.iterdir()} & {"tests", "tools", "docs"}
    assert sorted(p.name for p in root.glob("*.py")) == ["__init__.py", "__main__.py"]
    assert not list(root.rglob("*almanac*"))
    assert (root / "models/embedded/target/model.safetensors").stat().st_size > 10**6
    data = [ROOT / "py.typed", ROOT / "specsot.yaml", *(ROOT / "graphs").rglob("*.yaml")]
    assert all((root / path.relative_to(ROOT)).is_file() for path in data)


def test_the_root_imports_nothing_of_ours() -> None:
    text = (ROOT / "__init__.py").read_text()
    assert "from ." not in text and "import specsot" not in text and specsot.__version__

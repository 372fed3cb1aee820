"""What the wheel is made of: packages that are found, data files that are named."""

import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import specsot
from specsot.engine.prepare.files import graph_names, open_graph

ROOT = Path(__file__).parents[2]
ROOMS = ("engine", "states", "ops", "models")


def test_every_package_has_an_init() -> None:
    """`setup.py` finds packages by it."""
    folders = {p.parent for room in ROOMS for p in (ROOT / room).rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_no_other_module_in_the_root() -> None:
    """Every module in the root would be installed as part of the package."""
    found = {p.name for p in ROOT.glob("*.py")}
    assert found <= {"__init__.py", "__main__.py", "setup.py"} and "__init__.py" in found


def test_the_root_imports_nothing_of_ours() -> None:
    text = (ROOT / "__init__.py").read_text()
    assert "from ." not in text and "import specsot" not in text


def test_our_modules_exist_once() -> None:
    ours = []
    for home in {ROOT, Path(specsot.__file__).parent}:
        for name, module in sys.modules.items():
            file = Path(getattr(module, "__file__", None) or "/")
            if file.is_relative_to(home) and file.relative_to(home).parts[0] in ROOMS:
                ours.append(name)
    assert ours and all(name.startswith("specsot.") for name in ours), ours


def test_data_files_that_are_read_at_run_time_are_packaged() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = tool["package-data"]["specsot"]
    packaged = {p.relative_to(ROOT) for pattern in patterns for p in ROOT.glob(pattern)}
    needed = {Path("py.typed"), Path("specsot.yaml")}
    needed |= {p.relative_to(ROOT) for p in (ROOT / "graphs").rglob("*") if p.is_file()}
    assert needed <= packaged


def test_graphs_ship() -> None:
    assert {"autoregressive", "bim_eagle", "bim_plain", "eagle"} <= set(graph_names())
    assert all(open_graph(name).graph.name == name for name in graph_names())
    assert (files("specsot") / "specsot.yaml").is_file()
    assert specsot.__version__

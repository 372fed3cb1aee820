"""Import table without cycles, file length, packed assignments, and modules without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("ops", "models", "states", "engine")
MODULES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))
NO_TORCH = (
    "ops.registry",
    "ops.layer_plan",
    "states.graph.load",
    "states.machine",
    "engine.cli.main",
    "engine.cli.start",
    "engine.cli.graphs",
    "engine.cli.decoding",
    "engine.bench.command",
    "engine.cli.train",
    "engine.prepare.job",
    "engine.view.diagram",
    "engine.serve.server",
)
LONGEST_FILE = 600  # lines of a file that is one concept

# Which package may import which others. Everything in a room may import what its root modules
# import; an arrow that is not here needs a reason, and its line.
MAY_IMPORT = {
    "ops": "ops/kv ops/sampling ops/attention",
    "ops/kv": "",
    "ops/sampling": "",
    "ops/attention": "ops/kv",
    "ops/verify": "ops ops/sampling",
    "ops/draft": "ops ops/kv ops/sampling ops/attention",
    "models": "ops ops/kv ops/attention",
    "models/drafters": "models ops/kv ops/attention",
    "models/families": "models",
    "models/load": "models models/drafters models/families",
    "states": "states/graph states/text ops ops/* models/load",
    "states/yaml": "",
    "states/graph": "states/yaml ops ops/sampling",
    "states/text": "states/yaml ops models models/load",
    "states/drafters": "states states/graph states/yaml ops ops/*",
    "states/phases": "states states/text ops ops/*",
    "engine": ("models models/* states states/yaml states/graph states/text states/phases ops/kv"),
    "engine/prepare": "engine states states/yaml states/graph states/text models ops ops/sampling",
    "engine/chunks": "engine states/yaml states/graph states/text models models/load ops",
    "engine/record": "engine engine/chunks states states/graph states/yaml ops",
    "engine/run": (
        "engine engine/prepare engine/chunks engine/record states states/* models models/* "
        "ops ops/*"
    ),
    "engine/view": "engine engine/record states states/* ops ops/*",
    "engine/bench": (
        "engine engine/prepare engine/record engine/run states states/* models models/load"
    ),
    "engine/certify": (
        "engine engine/prepare engine/record engine/run engine/bench engine/workers "
        "states states/* models models/load ops ops/*"
    ),
    "engine/simulate": "engine engine/record engine/workers states states/* ops/kv",
    "engine/train": "engine engine/prepare engine/run states states/* models models/*",
    "engine/workers": (
        "engine engine/prepare engine/run engine/record states states/* models models/load ops"
    ),
    "engine/serve": "engine engine/prepare engine/record engine/workers states/text",
    "engine/cli": "engine engine/* states/* models models/*",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package(path: Path) -> str:
    return path.relative_to(ROOT).parent.as_posix()


def imported(path: Path) -> Iterator[Path]:
    here = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            words = (node.module or "").split(".") if node.module else []
            base = ROOT.joinpath(*here[: len(here) - node.level + 1], *words)
            for alias in node.names:
                places = (base / f"{alias.name}.py", base.with_suffix(".py"), base / "__init__.py")
                yield next(place for place in places if place in FOUND)
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "specsot", "use a relative import"
        elif isinstance(node, ast.Import):
            ours = [a.name for a in node.names if a.name.split(".")[0] == "specsot"]
            assert not ours, "use a relative import"


FOUND = set(MODULES)


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def arrows() -> list[tuple[Path, Path]]:
    return [(path, to) for path in MODULES for to in imported(path)]


def test_every_package_has_its_arrows() -> None:
    assert set(MAY_IMPORT) == {package(path) for path in MODULES}


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_arrows(name: str) -> None:
    """A package imports what the table says, and the table says nothing that it does not import."""
    found = {
        package(to): f"{name_of(path)} -> {name_of(to)}"
        for path, to in arrows()
        if package(path) == name
    }
    found.pop(name, None)
    allowed = MAY_IMPORT[name].split()
    strange = [arrow for to, arrow in found.items() if not any(fnmatch(to, a) for a in allowed)]
    assert not strange
    assert all(any(fnmatch(to, a) for to in found) for a in allowed), "an arrow that nobody uses"


def test_no_circles() -> None:
    files: dict[str, set[str]] = {name_of(path): set() for path in MODULES}
    packages: dict[str, set[str]] = {package(path): set() for path in MODULES}
    for path, to in arrows():
        files[name_of(path)] |= {name_of(to)} - {name_of(path)}
        packages[package(path)] |= {package(to)} - {package(path)}
    for imports in (files, packages):
        TopologicalSorter(imports).prepare()  # a CycleError names the circle


def test_files_have_at_most_600_lines() -> None:
    lengths = {name_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


def test_assignments_are_not_packed() -> None:
    """`a, b = x, y` is rare: a swap, or values that are read together."""
    total = 0
    packed = []
    for path in MODULES:
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.Assign):
                total += 1
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                    packed.append(f"{name_of(path)}:{node.lineno}")
    assert len(packed) <= 0.015 * total, packed


def test_what_check_needs_imports_no_torch() -> None:
    lines = "\n".join(f"import specsot.{name}" for name in NO_TORCH)
    code = f"import sys\n{lines}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_running_loads_no_room_above_it() -> None:
    above = ("certify", "train", "bench", "cli", "view")
    code = f"""
import sys
import specsot.engine.run.api, specsot.engine.run.core, specsot.engine.run.session
print([m for m in sys.modules if m.startswith(tuple("specsot.engine." + n for n in {above!r}))])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert done.stdout == b"[]\n"

"""Packages of `examples` as installed ones, for programs that run from a checkout."""

import atexit
import os
import shutil
import sys
import tempfile
import tomllib
from importlib import invalidate_caches
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def install(name: str) -> None:
    """What `pip install -e examples/NAME` leaves, for this process and those that it starts."""
    source = EXAMPLES / name
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = Path(tempfile.mkdtemp(prefix="plug-in-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    name = project["name"].replace("-", "_")
    info = folder / f"{name}-{project['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    places = [str(folder), str(source / "src")]
    sys.path += places
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, *places])
    invalidate_caches()

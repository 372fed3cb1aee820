"""Packages of a user: their files, and what pip leaves of an installed distribution."""

from collections.abc import Callable
from importlib import invalidate_caches
from pathlib import Path

OPS = """\
raise RuntimeError("imported")

from specsot.ops.registry import guard, op


@op("own.count", writes="count")
def count(rows: list, *, factor: int = 1) -> int: ...


@op("own.eagle", drafters="eagle1")
def eagle(rows: list) -> None: ...


@guard("own_enough")
def enough(counter: dict) -> bool: ...


def plain(counter: dict) -> None: ...
"""
Write = Callable[[dict[str, str]], Path]


def install(folder: Path, group: str, value: str, point: str = "echo", name: str = "own") -> None:
    """What pip leaves of an installed distribution."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    with (info / "entry_points.txt").open("a") as file:
        file.write(f"[{group}]\n{point} = {value}\n")
    invalidate_caches()

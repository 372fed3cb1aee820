"""A small graph over the toy ops and how to load it; packages of a user, as pip leaves them."""

from collections.abc import Callable, Iterable
from importlib import invalidate_caches
from pathlib import Path

import pytest

from specsot.ops.registry import OpTable, read_table
from specsot.states.graph.checks import Keys, checked_program
from specsot.states.graph.graph import Program
from specsot.states.graph.load import override, validate
from specsot.states.yaml.source import GraphError, Source

GRAPH = """\
version: 1
name: toy
layout: {kind: bim}
drafter: {kind: eagle3}
initial: prefill
states:
  prefill: {ops: [toy.open]}
  draft: {ops: [toy.draft]}
  verify: {ops: [toy.verify_]}
  done: {final: true}
transitions:
  - {from: prefill, to: draft}
  - {from: draft, to: verify}
  - {from: verify, to: done, when: toy_done}
  - {from: verify, to: draft}
"""
GIVEN = frozenset({"counter"})


def toy_table() -> OpTable:
    return read_table([("helpers.toy_ops", Path(__file__).with_name("toy_ops.py"))])


def load(
    text: str = GRAPH, sets: Iterable[str] = (), table: OpTable | None = None, given: Keys = GIVEN
) -> Program:
    """As `load_program`, with other initial keys."""
    source = Source(text, "g.yaml")
    table = table or toy_table()
    override(source, sets, table)
    return checked_program(validate(source), source, table, given)


def problems(text: str, sets: Iterable[str] = ()) -> list[str]:
    return refused(load, text, sets)


def refused(call: Callable[..., object], *given: object) -> list[str]:
    with pytest.raises(GraphError) as caught:
        call(*given)
    return told(caught.value)


def changed(*pairs: tuple[str, str], text: str = GRAPH) -> str:
    """The text with each old part replaced by its new one; every old part must be there."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def told(error: GraphError) -> list[str]:
    """Its problems without their codes; those are held by the examples of `specsot explain`."""
    return [str(problem).removesuffix(f" [{problem.code}]") for problem in error.problems]


OPS = """\
raise RuntimeError("imported")

from specsot.ops.registry import guard, op


@op("own.count", writes="count")
def count(rows: list, *, factor: int = 1) -> int: ...


@guard("own_enough")
def enough(counter: dict) -> bool: ...


def plain(counter: dict) -> None: ...
"""
Write = Callable[[dict[str, str]], Path]


def install(folder: Path, group: str, value: str, point: str = "parrot", name: str = "own") -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    with (info / "entry_points.txt").open("a") as file:
        file.write(f"[{group}]\n{point} = {value}\n")
    invalidate_caches()

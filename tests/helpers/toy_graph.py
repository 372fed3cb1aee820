"""A small graph over the toy ops, and how to load it."""

from collections.abc import Iterable
from pathlib import Path

from specsot.ops.registry import OpTable, read_table
from specsot.states.graph.load import load_program
from specsot.states.graph.program import Program
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
    return read_table([("helpers.toy_rooms", Path(__file__).parent / "toy_rooms")])


def load(text: str = GRAPH, sets: Iterable[str] = ()) -> Program:
    return load_program(Source(text, "g.yaml"), toy_table(), GIVEN, sets)


def problems(text: str, sets: Iterable[str] = ()) -> list[str]:
    """The messages of a graph that has problems."""
    try:
        load(text, sets)
    except GraphError as error:
        return told(error)
    raise AssertionError("the graph was accepted")


def changed(*pairs: tuple[str, str], text: str = GRAPH) -> str:
    """The text with each old part replaced by its new one; every old part must be there."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def told(error: GraphError) -> list[str]:
    """Its problems without their codes; those are held by the examples of `specsot explain`."""
    return [str(problem).removesuffix(f" [{problem.code}]") for problem in error.problems]

"""Ops are what their names say: without a trailing underscore, nothing they were given changes.

Every call of every op in real runs is watched, and every registered op is called in one of them.
A snapshot holds the values of tensors and arrays, their addresses and versions, and everything
that the book of a run holds; the models' weights are watched by address and version."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from helpers import folds
from helpers.drafters import KINDS, SETTINGS, drafting
from helpers.support import GRAPHS, Graphs, Make, PlanBook, TokenBook, outline_of, start

from specsot.engine.run.core import EngineCore
from specsot.ops.forward import HostReader
from specsot.ops.kv.pool import KVCache
from specsot.ops.registry import OpEntry, OpTable
from specsot.states import machine
from specsot.states.graph.graph import OpStep
from specsot.states.manager import BranchStateManager
from specsot.states.request import Request
from specsot.states.scheduler import Inbox

SMALL = ("layout.max_num_branches=2", "layout.kv_slots=250")
ATOMS = (bool, int, float, str, bytes, type(None), torch.device, torch.dtype, np.generic)


def snapshot(value: Any, seen: dict[Any, int] | None = None) -> Any:
    seen = {} if seen is None else seen
    if isinstance(value, ATOMS):
        return value.value if isinstance(value, Enum) else value
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        return _tensor(value, seen)
    if isinstance(value, np.ndarray):
        return ("array", value.ctypes.data, value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, torch.nn.Module):
        weights = [*value.parameters(), *value.buffers()]
        return (
            "module",
            [(id(w) if w.is_mkldnn else w.data_ptr(), w._version, tuple(w.shape)) for w in weights],
        )
    return _parts(value, seen)


def _tensor(value: torch.Tensor, seen: dict[Any, int]) -> Any:
    whole = value.untyped_storage()
    at = ("bits", whole.data_ptr())
    if at not in seen:  # views of one storage are many
        seen[at] = crc32(torch.empty(0, dtype=torch.uint8).set_(whole).numpy())
    place = (value.data_ptr(), value._version, tuple(value.shape), value.stride(), value.dtype)
    return ("tensor", place, whole.data_ptr(), seen[at])


def _parts(value: Any, seen: dict[Any, int]) -> Any:
    name = type(value).__name__
    if isinstance(value, dict):
        return (name, [(snapshot(k, seen), snapshot(v, seen)) for k, v in value.items()])
    if isinstance(value, set | frozenset):
        return (name, sorted(map(repr, value)))
    if isinstance(value, list | tuple):
        return (name, [snapshot(item, seen) for item in value])
    if is_dataclass(value) and not isinstance(value, type):
        return (name, [(f.name, snapshot(getattr(value, f.name), seen)) for f in fields(value)])
    if hasattr(value, "__dict__") and not callable(value):
        return (name, [(k, snapshot(v, seen)) for k, v in sorted(vars(value).items())])
    return (name, repr(value) if type(value).__module__ == "itertools" else id(value))


class Forcing:
    """A grammar that allows everything, and says what comes next nonetheless."""

    consumed = 0

    def is_legal(self, token: int) -> bool:
        return token >= 0

    def advance(self, token: int) -> None:
        self.consumed += 1

    def rollback(self, count: int) -> None:
        self.consumed -= count

    def forced(self) -> list[int]:
        return [5, 6, 7, 8]


class Watch:
    """Binds ops as the machine does, and looks at the arguments before and after each call; asks
    all guards after every step."""

    def __init__(self, table: OpTable) -> None:
        self.bound = machine.bound
        entries = [one for one in table.guards.values() if "cluster" not in one.reads]
        self.guards = [(entry.name, entry.load(), entry.reads) for entry in entries]
        self.said: dict[str, set[bool]] = {name: set() for name, *_ in self.guards}
        self.called: set[tuple[str, str]] = set()
        self.changed: set[str] = set()
        self.broken: list[str] = []

    def __call__(self, step: OpStep) -> tuple[OpStep, str, Callable[..., Any]]:
        (_, place, function), entry = self.bound(step), step.entry

        def watched(*values: Any) -> Any:
            before = [snapshot(value) for value in values]
            result = function(*values)
            after = [snapshot(value) for value in values]
            self.called.add((entry.module, entry.function))
            triples = zip(entry.reads, before, after, strict=True)
            changed = [key for key, old, new in triples if old != new]
            if changed and entry.name.endswith("_"):
                self.changed.add(entry.name)
            elif changed:
                self.broken.append(f"{entry.name} changed {', '.join(changed)}")
            return result

        return step, place, watched

    def drive(self, run: EngineCore) -> None:
        run.board["inbox"] = inbox = Inbox(stays=True, sleeps=False)
        while not run.finished:
            run.advance()
            if run.state == "idle":
                inbox.close()
            before = snapshot(run.manager)
            for name, guard, reads in self.guards:
                self.said[name].add(guard(*[run.board[key] for key in reads]))
            if snapshot(run.manager) != before:
                self.broken.append(f"a guard after {run.state}")


def runs(graphs: Graphs, tiny: Make) -> Iterator[EngineCore]:
    """All kinds of drafters; all graphs with given and written outlines, both ways of sharing;
    combined answers; and beam search."""
    made = tiny("qwen3")
    for kind in KINDS:
        for sets in SETTINGS[kind]:
            session = graphs.session(
                "bim_plain",
                drafting(made, kind),
                made.book(),
                outline=outline_of(3),
                budget=5,
                sets=(f"drafter.kind={kind}", *sets, *SMALL),
            )
            yield start(session, ["hello"])
    for graph in GRAPHS:
        for share, outline in (("outline", outline_of(3, {3: (1,)})), ("prompt", None)):
            book: TokenBook = made.book(share)
            if outline is None:
                book = PlanBook(130, share, (2,))
                book.text = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\nEND"
            session = graphs.session(
                graph, made.models, book, outline=outline, budget=5, sets=SMALL
            )
            session.new_matcher = None if outline else lambda question: Forcing()
            yield start(session, ["hello", "again"])
    sets = (*folds.REUSED, "layout.kv_slots=500")
    combining = folds.session(graphs, made, *sets, outline=outline_of(3), budget=5)
    yield start(combining, ["hello", "again"])
    session = graphs.session("beam", made.models, made.book(), sets=SMALL)
    yield start(session, ["hello", "again", "and once more"])


@pytest.fixture(scope="module")
def watched(graphs: Graphs, tiny: Make) -> Watch:
    watch = Watch(graphs.table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "bound", watch)
        for run in runs(graphs, tiny):
            watch.drive(run)
    return watch


def test_guards_and_ops_without_a_trailing_underscore_change_nothing_they_were_given(
    watched: Watch,
) -> None:
    assert watched.broken == []
    assert all(answers == {True, False} for answers in watched.said.values()), watched.said


def decoding(table: OpTable) -> list[OpEntry]:
    """Ops but those that direct workers and decode nothing: tests/engine/workers runs these."""
    return [entry for entry in table.ops.values() if not entry.name.startswith("cluster.")]


def test_every_registered_op_was_watched(watched: Watch, graphs: Graphs) -> None:
    assert {(e.module, e.function) for e in decoding(graphs.table)} == watched.called


def test_ops_with_a_trailing_underscore_do_change_something(watched: Watch, graphs: Graphs) -> None:
    in_place = {one.name for one in decoding(graphs.table) if one.name.endswith("_")}
    assert watched.changed == in_place


@pytest.mark.parametrize(
    "change",
    [
        lambda kv, book, tensor: tensor.add_(0),
        lambda kv, book, tensor: tensor.__setitem__(0, 7),
        lambda kv, book, tensor: kv.data[0, 0, 0, 3].fill_(2.0),
        lambda kv, book, tensor: kv.append_([1], [0]),
        lambda kv, book, tensor: book.requests[0].context.append(1),
        lambda kv, book, tensor: book.table.new_branch(book.requests[0], 0, 1),
        lambda kv, book, tensor: kv.ledger.add("test", 0),
    ],
)
def test_the_watch_sees_small_changes(
    change: Callable[..., Any], tiny: Make, graphs: Graphs
) -> None:
    made = tiny("qwen3")
    run = start(graphs.session("eagle", made.models, made.book()), ["hello"])
    kv, book, tensor = run.manager.kv, run.manager, torch.zeros(3)
    assert isinstance(kv, KVCache) and isinstance(book, BranchStateManager)
    assert isinstance(book.requests[0], Request) and isinstance(run.board["host"], HostReader)
    before = snapshot((kv, book, tensor))
    assert snapshot((kv, book, tensor)) == before
    change(kv, book, tensor)
    assert snapshot((kv, book, tensor)) != before

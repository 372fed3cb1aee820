"""Device values reach the host through one counted function, once per round, and nowhere else."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.axes import FORWARDS, Case, book_of, prompts_of, session_of, target_of
from helpers.support import Make, Tiny, graphs, start
from torch.utils._python_dispatch import TorchDispatchMode

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.core import EngineCore
from specsot.ops.forward import HostReader
from specsot.states.machine import OpRan

READS = (
    *("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__"),
    *("__float__", "__complex__", "__array__", "__iter__", "__contains__", "unique"),
)


EAGLE, LAYOUTS = ("eagle3", 0), ("bim", "batching", "paged")
BASE = Case(parts=4, deps="fan", max_num_branches=3, stops=())


class HostRead(AssertionError):
    """A device value reached the host outside `ops.forward`."""


class Door:
    """Whether `ops.forward` is reading at the moment."""

    is_open = False


@pytest.fixture
def door(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> Door:
    """Every way from a tensor to the host raises, unless `ops.forward` takes it.

    From when the models are loaded: loading them looks at their weights."""
    made = tiny("llama"), target_of(BASE, tiny)
    assert all(one.models.drafter for one in made)
    door = Door()
    for name in ("read", "read_order"):
        monkeypatch.setattr(HostReader, name, _opened(door, getattr(HostReader, name)))
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, _guarded(door, name, getattr(torch.Tensor, name)))
    monkeypatch.setattr(torch, "nonzero", _guarded(door, "nonzero", torch.nonzero))
    return door


def _opened(door: Door, inside: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any) -> Any:
        door.is_open = True
        try:
            return inside(*args)
        finally:
            door.is_open = False

    return read


def _guarded(door: Door, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **options: Any) -> Any:
        if not door.is_open:
            raise HostRead(name)
        return real(*args, **options)

    return method


class NoSynchronisation(TorchDispatchMode):
    """Refuses ops whose result's size or value must be known on the host."""

    NAMES = (
        *("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique"),
        *("aten.unique", "aten.is_nonzero", "aten.equal"),
    )

    def __init__(self, door: Door) -> None:
        super().__init__()
        self.door, self.seen = door, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        self.seen += 1
        if name.startswith(self.NAMES) and not self.door.is_open:
            raise HostRead(name)
        if name.startswith("aten.index.") or name.startswith("aten.index_put"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise HostRead(f"{name} with a boolean index")
        if name.startswith("aten.repeat_interleave.Tensor") and not kwargs.get("output_size"):
            raise HostRead("repeat_interleave without output_size")
        return func(*args, **kwargs)


ROWS = (
    *(replace(BASE, work="answer", drafter=kind) for kind in (("none", 0), EAGLE)),
    *(
        replace(BASE, drafter=kind, layout=layout, share=share)
        for kind in (("none", 0), EAGLE)
        for layout in LAYOUTS
        for share in ("outline", "prompt")
    ),
    *(
        replace(BASE, drafter=kind, layout=layout, rows_per_round=7)
        for kind in (EAGLE, ("ngram", 1))
        for layout in LAYOUTS
    ),
    *(
        replace(BASE, drafter=EAGLE, layout=layout, work=work)
        for layout in LAYOUTS
        for work in ("written", "blended", "folded")
    ),
)


def read_once_a_forward(run: EngineCore, door: Door, reads: Sequence[str]) -> set[str]:
    states = set()
    with NoSynchronisation(door) as mode:
        while not run.finished:
            before = run.board["host"].reads
            run.advance()
            states.add(run.state)
            assert run.board["host"].reads - before == (run.state in reads), run.state
    assert run.board["host"].full_reads == 0 and run.board["host"].reads > 4 and mode.seen > 100
    return states


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_whole_runs_read_from_the_device_once_per_forward(
    case: Case, tiny: Make, door: Door
) -> None:
    run = start(session_of(case, target_of(case, tiny)), prompts_of(case))
    states = read_once_a_forward(
        run, door, (*FORWARDS, *(["merge"] if case.work == "folded" else []))
    )
    assert {"verify", "continuous_decode"} <= states or case.work == "answer"
    assert case.work != "blended" or run.manager.blend.library.hits > 0
    assert case.work != "folded" or run.manager.kv.ledger.moves["fold"] > 0


@pytest.mark.parametrize("accept", ["match", "rejection"])
@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_explained_rounds_read_no_more_often(
    kind: str, accept: str, tiny: Make, door: Door
) -> None:
    drafter = (kind, int(kind == "ngram"))
    case = replace(BASE, drafter=drafter, temperature=0.9, accept=accept, requests=1)
    session = session_of(case, target_of(case, tiny))
    program = session.program.with_settings("verify.accept", {"explain": True})
    assert program is not None
    session.program = program
    explained = list[int]()

    def sink(event: object) -> None:
        if isinstance(event, OpRan) and "committed" in event.results:
            trees = run.board["committed"].trees
            explained.append(sum(bool(tree.rule) for tree in trees))

    run = start(session, prompts_of(case), sink)
    read_once_a_forward(run, door, FORWARDS)
    assert sum(explained) > 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_answer_without_an_outline_reads_no_more_often(
    layout: str, tiny: Make, door: Door
) -> None:
    case = replace(BASE, work="written", drafter=EAGLE, layout=layout)
    made = target_of(case, tiny)
    book = book_of(case, made)
    book.plan = "DIRECT"
    run = start(session_of(case, made, book), prompts_of(case))
    read_once_a_forward(run, door, FORWARDS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_beam_search_reads_once_per_step(layout: str, made: Tiny, door: Door) -> None:
    sets = (f"layout.kind={layout}", "layout.max_num_branches=2")
    session = graphs.session("beam", made.models, made.book("outline", (2, 0)), sets=sets)
    run = start(session, ["hello", Prompt("1", "b", max_new_tokens=4), "a third question"])
    states = read_once_a_forward(run, door, ("select_beams",))
    assert {"expand_beams", "continuous_decode"} <= states


def test_a_read_outside_is_noticed(door: Door) -> None:
    value = torch.ones(3, dtype=torch.int64)
    for read in (int, float, bool, list):
        with pytest.raises(HostRead):
            read(value.sum() if read is not list else value)
    with pytest.raises(HostRead):
        value.tolist()
    with NoSynchronisation(door):
        with pytest.raises(HostRead):
            value[value > 0]
        with pytest.raises(HostRead):
            value.repeat_interleave(value)
    reader = HostReader()
    assert reader.read(value).sum() == 3
    assert (reader.reads, reader.full_reads) == (1, 0)

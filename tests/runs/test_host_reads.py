"""Device values reach the host through one counted function, once per round, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import folds
from helpers.reading import asked, searching, session
from helpers.support import (
    FULL,
    GRAPHS,
    Graphs,
    PlanBook,
    Tiny,
    drive,
    outline_of,
    start,
    tokens_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from specsot.engine.prepare.inputs import Prompt
from specsot.ops import forward as host
from specsot.ops.forward import HostReader
from specsot.states.machine import Run

READS = (
    *("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__"),
    *("__float__", "__complex__", "__array__", "__iter__", "__contains__", "unique"),
)
ROUNDS = ("verify", "continuous_decode")
FORWARDS = (*ROUNDS, "prefill", "skeleton", "parallel_prefill")


class HostRead(AssertionError):
    """A device value reached the host outside `ops.forward`."""


class Door:
    """Whether `ops.forward` is reading at the moment."""

    is_open = False


@pytest.fixture
def made(tiny: Callable[..., Tiny]) -> Tiny:
    return tiny("llama")


@pytest.fixture
def door(made: Tiny, monkeypatch: pytest.MonkeyPatch) -> Door:
    """Every way from a tensor to the host raises, unless `ops.forward` takes it.

    From when the models are loaded: loading them looks at their weights.
    """
    door, inside = Door(), host._to_host

    def to_host(values: torch.Tensor) -> Any:
        door.is_open = True
        try:
            return inside(values)
        finally:
            door.is_open = False

    monkeypatch.setattr(host, "_to_host", to_host)
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, _guarded(door, name, getattr(torch.Tensor, name)))
    monkeypatch.setattr(torch, "nonzero", _guarded(door, "nonzero", torch.nonzero))
    return door


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


def opened(graphs: Graphs, made: Tiny, graph: str, share: str = "outline") -> Run:
    session = graphs.session(
        graph,
        made.models,
        made.book(share, ()),
        outline=outline_of(4, {3: (1,)}),
        sets=("layout.max_num_branches=3",),
    )
    # With budgets that differ, branches end at different times and newcomers join a round.
    return start(session, ["hello", Prompt("1", "a second question", max_new_tokens=5)])


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_whole_runs_read_from_the_device_once_per_forward(
    graph: str, share: str, made: Tiny, graphs: Graphs, door: Door
) -> None:
    run = opened(graphs, made, graph, share)
    mode, forwards, states = NoSynchronisation(door), 0, set()
    with mode:
        while not run.finished:
            before = run.board["host"].reads
            run.advance()
            states.add(run.state)
            expected = run.state in FORWARDS
            assert run.board["host"].reads - before == expected, run.state
            forwards += expected
    assert run.board["host"].full_reads == 0
    assert run.board["host"].reads == forwards > 4
    assert mode.seen > 100
    wanted = {"verify", "continuous_decode"} if graph in FULL else {"verify"}
    assert wanted <= states


@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_branches_that_share_their_rows_read_no_more_often(
    layout: str, kind: str, made: Tiny, graphs: Graphs, door: Door
) -> None:
    """Whose a row is comes with the round's one read."""
    sets = (f"drafter.kind={kind}", "drafter.rows_per_round=7", "layout.max_num_branches=3")
    book, outline = made.book(stop_ids=()), outline_of(4, {3: (1,)})
    session = graphs.session(f"{layout}_plain", made.models, book, outline=outline, sets=sets)
    second = Prompt("1", "a second question", max_new_tokens=5)
    run, states = start(session, ["hello", second]), set()
    with NoSynchronisation(door):
        while not run.finished:
            before = run.board["host"].reads
            run.advance()
            states.add(run.state)
            assert run.board["host"].reads - before == (run.state in FORWARDS), run.state
    assert set(ROUNDS) <= states


@pytest.mark.parametrize("accept", ["match", "rejection"])
@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_explained_rounds_read_no_more_often(
    kind: str, accept: str, made: Tiny, graphs: Graphs, door: Door
) -> None:
    """What the drafts were judged by comes with the round's one read."""
    sets = (f"drafter.kind={kind}", "sampling.temperature=0.9", f"sampling.accept={accept}")
    book, outline = made.book(stop_ids=()), outline_of(4, {3: (1,)})
    session = graphs.session("bim_plain", made.models, book, outline=outline, sets=sets)
    program = session.program.with_settings("verify.accept", {"explain": True})
    assert program is not None
    session.program = program
    run, told = start(session, ["hello"]), 0
    with NoSynchronisation(door):
        while not run.finished:
            before = run.board["host"].reads
            run.advance()
            assert run.board["host"].reads - before == (run.state in FORWARDS), run.state
            told += len(run.board["committed"].explained) if run.state in ROUNDS else 0
    assert told > 5


@pytest.mark.parametrize("graph", FULL)
def test_written_outlines_and_fallbacks_read_no_more_often(
    graph: str, made: Tiny, graphs: Graphs, door: Door
) -> None:
    for text in ("PLAN\n1|50|-|-|One\n2|50|-|1|Two\nEND", "DIRECT"):
        book = PlanBook(130, "outline", ())
        book.text = text
        run = start(graphs.session(graph, made.models, book), ["hello"])
        with NoSynchronisation(door):
            drive(run, check=False)
        assert sum(map(len, tokens_of(run)["0"])) > 20


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_a_beam_search_reads_once_per_step(
    layout: str, made: Tiny, graphs: Graphs, door: Door
) -> None:
    """Which beams live on is decided on the device; the host is told with the step's one read."""
    sets = (f"layout.kind={layout}", "layout.max_num_branches=2")
    session = graphs.session("beam", made.models, made.book("outline", (2, 0)), sets=sets)
    run = start(session, ["hello", Prompt("1", "b", max_new_tokens=4), "a third question"])
    forwards, states = 0, set()
    with NoSynchronisation(door) as mode:
        while not run.finished:
            before = run.board["host"].reads
            run.advance()
            states.add(run.state)
            assert run.board["host"].reads - before == (run.state == "select_beams"), run.state
            forwards += run.state in ("prefill", "expand_beams", "continuous_decode")
    assert run.board["host"].reads == forwards > 4 and run.board["host"].full_reads == 0
    assert mode.seen > 100 and {"expand_beams", "continuous_decode"} <= states


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("graph", ["blend_eagle", "bim_blend_eagle"])
def test_cached_documents_are_blended_without_a_read(
    graph: str, layout: str, made: Tiny, graphs: Graphs, door: Door
) -> None:
    """How many rows are picked is known on the host, which ones on the device alone."""
    sets = (f"layout.kind={layout}", "layout.max_num_branches=3", "skeleton.search_top_k=8")
    outline = searching(["bees rain", "rain tea", "tea rain iron"], deps=(3,))
    run = start(
        session(graphs, made, graph, *sets[: 2 if graph == "blend_eagle" else 3], outline=outline),
        asked(3, documents=8),
    )
    with NoSynchronisation(door):
        while not run.finished:
            before = run.board["host"].reads
            run.advance()
            assert run.board["host"].reads - before == (run.state in FORWARDS), run.state
    assert run.board["branches"].blend.library.hits > 0


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_parts_are_folded_without_a_read(
    layout: str, made: Tiny, graphs: Graphs, door: Door
) -> None:
    """Nor are their rows kept with one; what is drawn behind the fold is read once."""
    opened = folds.session(graphs, made, f"layout.kind={layout}", outline=outline_of(3))
    run, states = start(opened, ["hello", "more"]), set()
    with NoSynchronisation(door):
        while not run.finished:
            before = run.board["host"].reads
            run.advance()
            states.add(run.state)
            reads = run.board["host"].reads - before
            assert reads == (run.state in (*FORWARDS, "merge")), run.state
    assert "merge" in states and run.board["kv"].ledger.moves["fold"] == 6


def test_a_read_outside_is_noticed(door: Door) -> None:
    """The test of the test."""
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

"""``bim`` and ``batching`` are one algorithm: same tokens, same acceptance, round by round.

Each case runs in both layouts and is held to plain greedy decoding, branch by branch. Here is a
part of the grid in which any two settings meet; more of it, and the embedded model, are in
tests/full/test_mode_consistency_grid.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from helpers.support import (
    FIXED,
    FULL,
    PLAIN,
    SEED,
    Graphs,
    PlanBook,
    Tiny,
    TokenBook,
    accepted_of,
    branches_of,
    check_lossless,
    contexts,
    drive,
    named,
    outline_of,
    pairwise,
    requests_of,
    run_all,
    start,
    tokens_of,
)

from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.machine import Run
from specsot.states.request import Finish, Stage
from specsot.states.text.outline import Point

Make = Callable[..., Tiny]
LAYOUTS = ("bim", "batching")
# A branch's own prompt; the shared prefix has 3 to 80 tokens of the question's own.
SIZES = {"one": (1, 1), "short": (2, 12), "mixed": (1, 120), "long": (60, 120)}
FACTORS: dict[str, tuple[Any, ...]] = {
    "parts": (1, 2, 3, 4, 5, 6, 7, 8),
    "max_num_branches": (1, 2, 3, 5, 8),
    "order": ("fcfs", "longest_first", "shortest_first"),
    "prompts": tuple(SIZES),
    "graph": ("plain", "eagle"),
    "attention": ("dense", "grouped"),
}


class ClassBook(TokenBook):
    """Branch prompts of one class of lengths."""

    low, high = 1, 12

    def own(self, point: Point) -> list[int]:
        return self.ids(f"own {point.id} {point.title}", self.low, self.high)


def check_case(case: dict[str, Any], made: Tiny, graphs: Graphs, **more: Any) -> int:
    """One case in both layouts and by transformers; returns how many drafts were accepted."""
    book = ClassBook(
        made.models.target.vocab_size, case.get("share", "outline"), more.pop("stops", ())
    )
    book.low, book.high = SIZES[case["prompts"]]
    sets = [f"layout.{key}={case[key]}" for key in ("max_num_branches", "order")]
    sets += [f"attention={case['attention']}", *(FIXED if case["graph"] == "eagle" else ())]
    runs = []
    for layout in LAYOUTS:
        session = graphs.session(
            f"{layout}_{case['graph']}",
            made.models,
            book,
            outline=outline_of(case["parts"]),
            sets=sets,
            **more,
        )
        runs.append(run_all(session, ["hello"], check=False))
    compare(*runs)
    check_lossless(runs[0], book, made.reference, plain=False)
    return sum(sum(b.accepted) for b in branches_of(runs[0]))


def compare(bim: Run, batching: Run) -> None:
    """Nothing that a user sees, and no round, differs between the layouts."""
    assert tokens_of(bim) == tokens_of(batching)
    assert accepted_of(bim) == accepted_of(batching)
    both = list(zip(branches_of(bim), branches_of(batching), strict=True))
    for one, other in both:
        assert (one.finish, one.note, one.emitted) == (other.finish, other.note, other.emitted)
    assert bim.steps == batching.steps, "the same states, in the same order"
    assert bim.board["answers"] == batching.board["answers"]
    for run in (bim, batching):
        assert run.board["kv"].needed_length == 0


@pytest.mark.parametrize("case", pairwise(FACTORS, SEED), ids=named)
def test_layouts_agree_and_are_lossless(case: dict[str, Any], tiny: Make, graphs: Graphs) -> None:
    accepted = check_case(case, tiny("llama"), graphs)
    assert accepted > 0 or case["graph"] == "plain"


@pytest.mark.parametrize("graph", ["plain", "eagle"])
def test_layouts_agree_on_outlines_that_the_model_writes(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """One plan is read out of whatever was written; its parts depend on each other."""
    made, runs = tiny("qwen3"), []
    for layout in LAYOUTS:
        session, _ = two(f"{layout}_{graph}", made, graphs)
        runs.append(run_all(session, ["hello", "a second question"]))
    compare(*runs)


# -- two requests in one run ---------------------------------------------------------------------


def two(graph: str, made: Tiny, graphs: Graphs) -> tuple[Session, PlanBook]:
    book = PlanBook(made.models.target.vocab_size, "outline", ())
    book.text = "PLAN\n1|50|-|-|One\n2|80|-|1|Two\n3|20|-|-|Three\nEND"
    sets = ("layout.max_num_branches=5", *(FIXED if "eagle" in graph else ()))
    return graphs.session(graph, made.models, book, budget=24, sets=sets), book


@pytest.mark.parametrize("graph", ["plain", "eagle"])
def test_one_of_two_requests_is_cancelled_and_the_other_does_not_notice(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """The second comes while branches of the first run; then one of them is cancelled."""
    made, found = tiny("llama"), []
    for layout in LAYOUTS:
        session, book = two(f"{layout}_{graph}", made, graphs)
        free = tokens_of(run_all(session, [Prompt("0", "hello"), Prompt("late", "another")]))
        for doomed, kept in (("0", "late"), ("late", "0")):
            run = _cancelled(session, doomed)
            tokens = tokens_of(run)
            assert tokens[kept] == free[kept]
            (gone,) = (r for r in requests_of(run) if r.key == doomed)
            assert Finish.CANCELLED in {b.finish for b in gone.all_branches()}
            for own, whole in zip(tokens[doomed], free[doomed], strict=False):
                assert own == whole[: len(own)]
            found.append((doomed, tokens))
            _check_kept(run, kept, book, made)
    assert found[:2] == found[2:], "the layouts were meant to agree on cancelled requests too"


def _cancelled(session: Session, doomed: str) -> Run:
    """A run of two requests, the second admitted mid-way, in which one is cancelled."""
    run = start(session, [Prompt("0", "hello")])
    drive(run, until=lambda run: any(len(b.tokens) > 3 for b in branches_of(run)))
    book = run.board["branches"]
    book.lifecycle.submit(session.request(Prompt("late", "another")))
    late = requests_of(run)[1]
    drive(
        run,
        until=lambda run: (
            late.stage is Stage.RUNNING or bool(late.root and late.root.num_cached_tokens > 4)
        ),
    )
    assert not any(r.finished for r in requests_of(run)), "both were meant to run"
    book.table.cancel(doomed)
    (gone,) = (r for r in requests_of(run) if r.key == doomed)
    drive(run, until=lambda run: gone.finished)
    owners = {gone.prefix_owner, *(b.owner for b in gone.all_branches())}
    owners -= set(book.prefixes.nodes) if book.prefixes is not None else set()
    for pool in book.pools:
        assert not owners & set(pool.owner.tolist()), "its rows are given back"
    return drive(run)


def _check_kept(run: Run, key: str, book: PlanBook, made: Tiny) -> None:
    (request,) = (r for r in requests_of(run) if r.key == key)
    for branch, context in contexts(request, book, plain=False):
        made.reference.check(branch, context, book.stop_ids)


# -- the graphs ----------------------------------------------------------------------------------


def resolved(name: str, graphs: Graphs, sets: Iterable[str] = ()) -> dict[str, Any]:
    """A graph with its defaults, each op with the function and the settings that it became."""
    program = open_graph(name, sets=tuple(sets), table=graphs.table)
    steps = {
        state: [(step.entry.function, dict(step.settings)) for step in steps]
        for state, steps in program.steps.items()
    }
    return program.graph.model_dump(by_alias=True) | {"steps": steps}


@pytest.mark.parametrize("kind", ["plain", "eagle"])
def test_twins_differ_in_name_and_layout_alone(kind: str, graphs: Graphs) -> None:
    bim, batching = (resolved(f"{layout}_{kind}", graphs) for layout in LAYOUTS)
    assert {key for key in bim if bim[key] != batching[key]} == {"name", "doc", "layout"}
    assert bim["layout"].pop("block_size") == 1, "a row is a block under batching"
    assert bim["layout"] | {"kind": "batching"} == batching["layout"]
    assert list(bim["states"]) == list(batching["states"])


@pytest.mark.parametrize("kind", ["plain", "eagle"])
def test_one_word_turns_a_graph_into_its_twin(kind: str, graphs: Graphs) -> None:
    swapped = resolved(f"bim_{kind}", graphs, ["layout.kind=batching"])
    twin = resolved(f"batching_{kind}", graphs)
    assert swapped | {key: twin[key] for key in ("name", "doc")} == twin


def test_all_full_graphs_have_the_same_states_and_ways(graphs: Graphs) -> None:
    found = [resolved(name, graphs) for name in FULL]
    for graph in found[1:]:
        assert list(graph["states"]) == list(found[0]["states"])
        assert graph["transitions"] == found[0]["transitions"]
    assert all("skeleton" not in resolved(name, graphs)["states"] for name in PLAIN)

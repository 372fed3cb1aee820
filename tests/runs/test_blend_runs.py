"""Runs on cached documents: what is reused, that speculation stays lossless, what is told."""

from typing import Any

import pytest
import torch
from helpers.reading import (
    BLENDED,
    DOCUMENTS,
    TWINS,
    Rounds,
    asked,
    book_of,
    searching,
    session,
    watched,
)
from helpers.support import (
    Graphs,
    Make,
    Tiny,
    accepted_of,
    drive,
    requests_of,
    run_all,
    start,
    tokens_of,
)

from specsot.engine.prepare.files import open_graph
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.states.machine import OpRan

PARTS = searching(["bees rain", "rain tea", "", "tea iron rain", "bees"], deps=(4,))
PREFIX = ("skeleton.documents=prefix",)


@pytest.fixture
def made(tiny: Make) -> Tiny:
    """What it writes hangs on what it has read: half of it changes on a blended cache."""
    return tiny("llama", context=2.0)


def of_one_block(graph: str) -> tuple[str, ...]:
    """What a graph without the block must be told to read the same documents."""
    return ("skeleton.documents=branches",) if graph.startswith("bim") else ()


@pytest.mark.parametrize("share", ["outline", "prompt"])
@pytest.mark.parametrize("graph", BLENDED)
@pytest.mark.parametrize(
    "sets",
    [("blend.ratios=[1]",), ("blend.min_tokens=5000",), ("blend.plan=plain",)],
    ids=lambda sets: sets[0],
)
def test_nothing_reused_is_the_graph_without_the_block(
    sets: tuple[str, ...], graph: str, share: str, made: Tiny, graphs: Graphs
) -> None:
    """The target's own tokens, and nobody reads a chunk alone for nothing."""
    opened = session(graphs, made, graph, *sets, outline=PARTS, share=share)
    run, rounds = watched(opened)
    sets = (*of_one_block(graph), "scheduler.prefix_cache=false")  # nothing stays of blended rows
    twin = session(graphs, made, TWINS[graph], *sets, outline=PARTS, share=share)
    other = run_all(twin, asked())
    assert tokens_of(run) == tokens_of(other) and accepted_of(run) == accepted_of(other)
    assert not rounds.blends and not run.manager.blend.library.made_sizes


@pytest.mark.parametrize("where", ["prefix", "branches"])
@pytest.mark.parametrize(
    ("graph", "share"),
    [("eagle", "outline"), ("bim_eagle", "prompt"), ("batching_eagle", "outline")],
)
def test_documents_without_the_block_are_read_exactly(
    graph: str, share: str, where: str, made: Tiny, graphs: Graphs
) -> None:
    """Every branch holds the target's own tokens behind the ids that its prompt consists of."""
    full = "_" in graph
    sets = (f"skeleton.documents={where}", f"skeleton.share={share}") if full else ()
    if full:
        sets = (*sets, "skeleton.grammar=false")
    book = book_of(made, share)
    opened = Session(
        open_graph(graph, ("limits.max_new_tokens=1", *sets), graphs.table),
        made.models,
        max_new_tokens=12,
        outline=PARTS if full else None,
        prompts=book,
    )
    run = run_all(opened, asked())
    for request, prompt in zip(requests_of(run), asked(), strict=True):
        for branch in request.branches:
            context = [*request.context, *branch.prompt]
            made.reference.check(branch, context, ())
            ids = [book.document(d.title, d.text) for d in prompt.documents]
            held = [any(_within(one, context)) for one in ids]
            wanted = branch.point.title.split() if branch.point else []
            words = [d.title in wanted for d in prompt.documents]
            if full and where == "branches":
                assert not any(h and not w for h, w in zip(held, words, strict=True))
                assert sum(held) == min(sum(words), 2) or branch.point.tool is None
            else:
                assert all(held)


def _within(part: list[int], whole: list[int]) -> list[bool]:
    return [whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1)]


class Logits:
    """A sink that keeps the logits of every branch's trees, round by round."""

    def __init__(self) -> None:
        self.of: dict[str, list[torch.Tensor]] = {}
        self.run: EngineCore | None = None

    def __call__(self, event: Any) -> None:
        if isinstance(event, OpRan) and event.op == "verify.accept" and self.run is not None:
            board = self.run.board
            trees = board["logits"][: board["rows"].tree_rows].chunk(board["rows"].trees)
            for branch, logits_TV in zip(board["branches"].active, trees, strict=True):
                self.of.setdefault(branch.name, []).append(logits_TV.clone())


@pytest.mark.parametrize(
    ("layout", "budget"), [("bim", "per_chunk"), ("batching", "per_branch"), ("paged", "per_chunk")]
)
def test_newcomers_are_blended_as_ever_and_leave_running_branches_alone(
    layout: str, budget: str, made: Tiny, graphs: Graphs
) -> None:
    """With few branches at once, the others are blended next to running trees; else in one prefill.

    Tokens, acceptance and logits of every round are the same.
    """
    found, parts = [], searching(["bees rain", "rain tea", "", "tea iron rain", "bees"])
    fixed = ("drafter.num_draft_tokens=6", "drafter.draft_depth=3", "blend.ratios=[0.4]")
    for most in (10, 3, 2, 1):
        sets = (f"layout.kind={layout}", f"layout.max_num_branches={most}")
        sets = (*sets, f"blend.budget={budget}", *fixed)
        rounds, logits = Rounds(), Logits()
        opened = session(graphs, made, "bim_blend_eagle", *sets, outline=parts)
        run = start(
            opened, asked(), lambda event, sinks=(rounds, logits): [s(event) for s in sinks]
        )
        rounds.run = logits.run = run
        drive(run)
        mixed = [one for one in rounds.found if one.blend and max(one.accepted) >= 0]
        assert bool(mixed) == (most in (2, 3)), "newcomers were to be blended next to running trees"
        for one in rounds.found:
            if one.blend is not None:
                assert one.blend.reused + one.blend.suffix == one.rows - one.padding
        found.append((tokens_of(run), accepted_of(run), logits.of))
    tokens, accepted, expected = found[0]
    assert len(expected) == 10
    for other in found[1:]:
        assert other[:2] == (tokens, accepted) and other[2].keys() == expected.keys()
        for name, logits_TV in expected.items():
            torch.testing.assert_close(other[2][name], logits_TV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_what_all_branches_find_stands_in_the_prefix(
    layout: str, made: Tiny, graphs: Graphs
) -> None:
    parts = searching(["bees rain", "rain tea", "tea rain"])
    prompts = asked(1, documents=8)
    opened = session(
        graphs,
        made,
        "bim_blend_eagle",
        f"layout.kind={layout}",
        "skeleton.search_top_k=8",
        outline=parts,
    )
    run, rounds = watched(opened, prompts)
    (request,) = requests_of(run)
    rain = made_ids(made, "rain")
    assert sum(_within(rain, request.context)) == 1
    assert not any(any(_within(rain, b.prompt)) for b in request.branches)
    (blend,) = rounds.blends
    copies = 3 if layout == "batching" else 1
    sizes = [len(made_ids(made, word)) for word in ("bees", "tea", "tea", *["rain"] * copies)]
    assert sorted(cached for cached, _ in blend.parts) == sorted(sizes)
    plain = run_all(
        session(
            graphs,
            made,
            "bim_eagle",
            *of_one_block("bim"),
            "skeleton.search_top_k=8",
            outline=parts,
        ),
        prompts,
    )
    assert [b.prompt.ids for b in requests_of(plain)[0].branches] == [
        b.prompt.ids for b in request.branches
    ]


def made_ids(made: Tiny, word: str) -> list[int]:
    (document,) = [d for d in DOCUMENTS if d.title == word]
    return book_of(made).document(document.title, document.text)


def test_layouts_agree_where_every_row_holds_a_blended_prefix(made: Tiny, graphs: Graphs) -> None:
    """Under ``batching`` the hoisted documents are blended once for each copy of the prefix."""
    parts = searching(["rain bees", "rain tea", "rain"])
    found = []
    for layout in ("bim", "batching", "paged"):
        for ratio in ("0.3", "0.7"):
            sets = (f"layout.kind={layout}", f"blend.ratios=[{ratio}]", "skeleton.search_top_k=8")
            opened = session(graphs, made, "bim_blend_eagle", *sets, outline=parts)
            found.append(tokens_of(run_all(opened, asked(2, documents=8))))
    assert found[:2] == found[2:4] == found[4:]

"""EAGLE-1 and EAGLE-2: one head, two kinds of trees, and what they must have in common.

Lossless in both layouts with few and many branches is also part of tests/runs/test_drafters.py.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from helpers.drafters import drafting
from helpers.support import (
    SEED,
    Graphs,
    Tiny,
    accepted_of,
    check_lossless,
    drive,
    named,
    outline_of,
    pairwise,
    run_all,
    start,
)

from specsot.engine.prepare.environment import model_folder
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.api import open_session
from specsot.engine.run.runner import perform
from specsot.models.files import ModelError
from specsot.ops.draft.static_tree import MC_SIM_7B_63
from specsot.ops.types import Proposal
from specsot.states.machine import Run

Make = Callable[..., Tiny]
QUESTIONS = (Prompt("0", "hello"), Prompt("1", "a second question", max_new_tokens=7))
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {}}
TREES = {
    "dynamic": ("drafter.kind=eagle2",),
    "dynamic, by branches": ("drafter.kind=eagle2", "drafter.num_draft_tokens={1: 12, 2: 5, 4: 2}"),
    "static": ("drafter.kind=eagle1",),
    "static, one level": ("drafter.kind=eagle1", "drafter.tree=[[0], [1], [2]]"),
    "static, a chain": ("drafter.kind=eagle1", "drafter.tree=[[0], [0, 0], [0, 0, 0]]"),
    "static, not the best": ("drafter.kind=eagle1", "drafter.tree=[[1, 1], [1], [2]]"),
}
WHOLE: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "tree": tuple(TREES),
    "layout": ("bim", "batching", "paged"),
    "parts": (1, 2, 3, 5),
    "share": ("outline", "prompt"),
    "max_num_branches": (1, 2, 8),
    "requests": (1, 2),
    "stops": ((2,), ()),
}


@pytest.mark.parametrize("case", pairwise(WHOLE, SEED), ids=named)
def test_every_branch_is_the_targets_own(case: dict[str, Any], tiny: Make, graphs: Graphs) -> None:
    made = tiny(case["family"])
    book = made.book(case["share"], case["stops"])
    session = graphs.session(
        f"{case['layout']}_plain",
        drafting(made, "eagle2"),
        book,
        outline=outline_of(case["parts"]),
        sets=(*TREES[case["tree"]], f"layout.max_num_branches={case['max_num_branches']}"),
    )
    run = run_all(session, QUESTIONS[: case["requests"]])
    check_lossless(run, book, made.reference, plain=False)
    assert run.board["kv"].needed_length == run.board["kv_draft"].needed_length == 0


@pytest.mark.parametrize("kind", ["eagle2", "eagle1"])
def test_float64_and_an_outline_that_the_model_writes(
    kind: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("qwen3", "float64")
    book = made.book(stop_ids=())
    sets = (f"drafter.kind={kind}",)
    for outline in (None, outline_of(2)):
        session = graphs.session(
            "bim_plain", drafting(made, kind), book, outline=outline, sets=sets
        )
        run = run_all(session, QUESTIONS)
        assert str(run.board["kv_draft"].data.dtype) == "torch.float64"
        check_lossless(run, book, made.reference, plain=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["eagle2", "eagle1"])
def test_drafts_are_accepted_and_refused(
    kind: str, family: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny(family)
    session = graphs.session(
        "bim_plain",
        drafting(made, kind),
        made.book(stop_ids=()),
        outline=outline_of(4),
        budget=30,
        sets=(f"drafter.kind={kind}",),
    )
    rounds = [a for r in accepted_of(run_all(session, QUESTIONS)).values() for b in r for a in b]
    assert 1.0 < sum(rounds) / len(rounds) < 3.5, rounds
    assert len(set(rounds)) >= 3


# -- the trees ------------------------------------------------------------------------------------


def drafted(made: Tiny, graphs: Graphs, branches: int, *sets: str, layout: str = "bim") -> Proposal:
    """What the first round offers to `branches` branches of one outline."""
    session = graphs.session(
        f"{layout}_plain",
        drafting(made, "eagle2"),
        made.book(stop_ids=()),
        outline=outline_of(branches),
        sets=sets,
    )

    def grown(run: Run) -> bool:
        return run.state == "grow_tree" and len(run.board["proposal"].tokens_SN) == branches

    proposal: Proposal = drive(start(session, QUESTIONS[:1]), until=grown).board["proposal"]
    return proposal


def paths(proposal: Proposal, branch: int) -> dict[tuple[int, ...], float]:
    """Score of every node, by the tokens from the root on."""
    found: list[tuple[int, ...]] = []
    tokens, parents = proposal.tokens_SN[branch].tolist(), proposal.parents_SN[branch].tolist()
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert [len(path) for path in found] == proposal.depths_SN[branch].tolist()
    assert len(set(found)) == len(found) and proposal.valid_SN.all()
    return dict(zip(found, proposal.scores_SN[branch].tolist(), strict=True))


def static(nodes: Any) -> tuple[str, str]:
    return "drafter.kind=eagle1", f"drafter.tree={[list(node) for node in nodes]}"


WIDE = [node for depth in (1, 2, 3) for node in product(range(3), repeat=depth)]


@pytest.mark.parametrize(
    ("nodes", "dynamic"),
    [
        (WIDE[:12], ("drafter.draft_depth=2", "drafter.top_k=3", "drafter.num_draft_tokens=12")),
        (
            [(0,) * n for n in range(1, 6)],
            ("drafter.draft_depth=5", "drafter.top_k=1", "drafter.num_draft_tokens=5"),
        ),
    ],
    ids=["all of two levels", "a chain"],
)
def test_where_both_draft_everything_they_draft_the_same(
    nodes: list[tuple[int, ...]], dynamic: tuple[str, ...], tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    one = drafted(made, graphs, 3, *static(nodes))
    other = drafted(made, graphs, 3, "drafter.kind=eagle2", *dynamic)
    for branch in range(3):
        assert paths(one, branch) == pytest.approx(paths(other, branch), abs=1e-4)


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_a_node_is_the_same_in_every_tree_that_has_it(
    layout: str, tiny: Make, graphs: Graphs
) -> None:
    """Whatever else is drafted beside it, and however the branches lie in tensors."""
    made = tiny("llama")
    whole = drafted(made, graphs, 3, *static(WIDE))
    parts = ([(2,), (0,), (2, 1), (2, 1, 2)], [(1,), (1, 0), (1, 2), (1, 2, 0), (1, 0, 0)])
    for part in (*parts, [(2, 0), (0,), (2,), (1,)]):
        some = drafted(made, graphs, 3, *static(part), layout=layout)
        for branch in range(3):
            every, few = paths(whole, branch), paths(some, branch)
            chosen = dict(zip(sorted(WIDE, key=lambda n: (len(n), n)), every, strict=True))
            assert set(few) == {chosen[node] for node in part}
            assert few == pytest.approx({path: every[path] for path in few}, abs=1e-4)


# -- the graph ------------------------------------------------------------------------------------


def test_eagle2_is_the_twin_of_eagle() -> None:
    one, other = open_graph("eagle").graph, open_graph("eagle2").graph
    assert other.drafter.kind == "eagle2"
    assert other.drafter.model_dump(exclude={"kind"}) == one.drafter.model_dump(exclude={"kind"})
    same = {"name": one.name, "doc": one.doc, "drafter": one.drafter}
    assert other.model_copy(update=same) == one


def test_the_packaged_head_drafts_for_both_kinds() -> None:
    """Out of the box, and the text is the target's own."""
    found: list[list[int]] = []
    rounds: list[int] = []
    for graph, *sets in (["autoregressive"], ["eagle2"], ["eagle2", "drafter.kind=eagle1"]):
        session = open_session(graph, sets=sets, max_new_tokens=40, threads=1)
        run, recorder, _ = perform(session, [Prompt("1", "Tell me about honey bees.")])
        found.append(run.board["branches"].requests[0].branches[0].tokens)
        rounds.append(recorder.meter.rounds)
        run.close()
    assert found[0] == found[1] == found[2]
    assert max(rounds[1:]) < 0.8 * rounds[0]


def test_a_kind_that_has_no_packaged_model() -> None:
    with pytest.raises(ModelError, match=r"no embedded other model: name one with --drafter-model"):
        model_folder("embedded", "other")


def test_a_graph_keeps_its_tree_as_it_was_given() -> None:
    drafter = open_graph("eagle2", ("drafter.kind=eagle1",)).graph.drafter
    assert drafter.model_dump()["tree"] == MC_SIM_7B_63
    assert (drafter.offered, drafter.scratch) == (25, 10)


def test_a_run_of_eagle2_alone(tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama")
    book = made.book(stop_ids=())
    session = graphs.session("eagle2", drafting(made, "eagle2"), book, budget=30)
    run = run_all(session, QUESTIONS)
    check_lossless(run, book, made.reference, plain=True)

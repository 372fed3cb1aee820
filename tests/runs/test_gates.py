"""What broke earlier systems, each as a gate of its own: greedy, both layouts, with and without
EAGLE-3."""

from dataclasses import replace
from itertools import product

import pytest
from helpers.axes import Case, check_case
from helpers.support import (
    FULL,
    Graphs,
    Make,
    Tiny,
    branches_of,
    check_lossless,
    drive,
    outline_of,
    outlined,
    requests_of,
    run_all,
    start,
)

from specsot.engine.run.core import EngineCore
from specsot.states.request import Branch, Finish

WITH_EAGLE = ("eagle", "bim_eagle", "batching_eagle", "paged_eagle")


def drafted(branch: Branch) -> list[int]:
    """For each token of an answer: how deep in its tree it was drafted, 0 if the target drew it."""
    depths = [0]
    for accepted, emitted in zip(branch.accepted, branch.emitted, strict=True):
        depths += [d if d <= accepted else 0 for d in range(1, emitted + 1)]
    return depths


EAGLE = ("eagle3", 0)
GATES = (
    *(Case(drafter=EAGLE, stops=(), budget=budget) for budget in (1, 2, 3, 4, 7)),
    *(
        Case(drafter=EAGLE, stops=stops, budget=24)
        for stops in ((0,), (0, 2, 3, 17), (*range(4, 130),))
    ),
    *(Case(drafter=EAGLE, parts=1, stops=(), share=share) for share in ("outline", "prompt")),
    Case(drafter=EAGLE, temperature=1.0, dtype="float64", rules="top_p"),
    Case(work="answer", drafter=EAGLE, budget=1, stops=()),
    # Inside an accepted path the last token of a part has a row, at the end of one it has none.
    *(
        Case(work=work, drafter=EAGLE, parts=4, budget=budget, stops=())
        for work in ("folded", "attended")
        for budget in (6, 7)
    ),
)


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("case", GATES, ids=lambda case: str(case)[:60])
def test_budgets_stop_ids_and_single_branches(
    case: Case, layout: str, tiny: Make, graphs: Graphs
) -> None:
    run = check_case(replace(case, layout=layout), tiny, graphs)
    if not case.stops:
        assert all(len(b.tokens) == b.budget for b in branches_of(run))


# -- the end of an answer ---------------------------------------------------------------------


@pytest.mark.parametrize("graph", WITH_EAGLE)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_end_token_inside_an_accepted_path_ends_the_answer_there(
    graph: str, family: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny(family)
    free = outlined(graphs, made, graph, budget=30)
    stop = _stop_drafted_early(branches_of(free))
    stopped = outlined(graphs, made, graph, (stop,), budget=30)
    inside = 0
    for before, branch in zip(branches_of(free), branches_of(stopped), strict=True):
        cut = before.tokens.index(stop) if stop in before.tokens else len(before.tokens)
        assert branch.tokens == before.tokens[:cut], "nothing after the end, all before it"
        assert (branch.finish is Finish.STOP) == (stop in before.tokens)
        inside += bool(branch.accepted) and branch.accepted[-1] > branch.emitted[-1]
    assert inside, "the end was meant to lie inside an accepted path"


def _stop_drafted_early(branches: list[Branch]) -> int:
    for branch in branches:
        depths = drafted(branch)
        for place, token in enumerate(branch.tokens[:-1]):
            early = 0 < depths[place] < depths[place + 1]
            if early and branch.tokens.index(token) == place:
                return token
    raise AssertionError("no path of two accepted drafts; choose another model")


def test_an_outline_and_a_direct_answer_have_their_own_budgets(tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama")
    sets = ("skeleton.max_tokens=9", "skeleton.direct_tokens=5")
    session = graphs.session("bim_eagle", made.models, made.book(stop_ids=()), sets=sets)
    request = requests_of(run_all(session, ["hello"]))[0]
    assert len(request.root.tokens) == 9 and request.root.finish is Finish.LENGTH
    assert [len(b.tokens) for b in request.branches] == [5]


# -- tokens and models that look like something else -------------------------------------------


@pytest.mark.parametrize("graph", WITH_EAGLE)
def test_token_0_and_the_pad_token_are_drafted_accepted_and_kept(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """Ids 0 and 3 (PAD) are among the likely tokens of the tiny models, and mean nothing here."""
    drafts: set[int] = set()
    for seed in (2, 1, 3, 0):
        run = outlined(graphs, tiny("qwen3", seed=seed), graph, budget=60, parts=5)
        for branch in branches_of(run):
            pairs = zip(branch.tokens, drafted(branch), strict=True)
            drafts |= {token for token, depth in pairs if depth}
        if {0, 3} <= drafts:
            return
    raise AssertionError(f"0 and 3 were meant to be drafted and accepted: {sorted(drafts)}")


# -- branches that run side by side ------------------------------------------------------------


@pytest.mark.parametrize("graph", FULL)
def test_one_endless_branch_does_not_starve_the_others(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    made, stop, endless = _endless(graphs, tiny)
    book = made.book(stop_ids=(stop,))
    session = graphs.session(
        graph,
        made.models,
        book,
        outline=outline_of(5),
        budget=60,
        sets=("layout.max_num_branches=2",),
    )
    run, ended = start(session, ["hello"]), []

    def note(run: EngineCore) -> bool:
        ended.extend(b for b in branches_of(run) if b.finish and b not in ended)
        return False

    drive(run, until=note)
    note(run)
    check_lossless(run, book, made.reference, plain=False)
    assert ended[-1].index == endless, [b.name for b in ended]
    assert ended[-1].finish is Finish.LENGTH and len(ended[-1].tokens) == 60
    assert {b.finish for b in ended[:-1]} == {Finish.STOP}


def _endless(graphs: Graphs, tiny: Make) -> tuple[Tiny, int, int]:
    """(models, stop id, branch): one of the first two never stops, the others soon do."""
    for seed, family in product((2, 3, 1, 0), ("qwen3", "llama")):
        made = tiny(family, seed=seed)
        branches = branches_of(outlined(graphs, made, "bim_eagle", parts=5, budget=60))
        for branch in branches[:2]:
            others = [set(b.tokens[:18]) for b in branches if b is not branch]
            if found := set.intersection(*others) - set(branch.tokens):
                return made, min(found), branch.index
    raise AssertionError("no model with such a token")

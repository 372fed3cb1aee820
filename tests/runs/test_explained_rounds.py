"""What `--explain-rounds` tells of a round is what happened in it (`explained.Witness`)."""

from typing import Any

import pytest
import torch
from helpers.drafters import KINDS, SETTINGS
from helpers.explained import (
    HEAT,
    KEPT,
    Witness,
    above,
    explaining,
    laws,
    listen,
    session_of,
    small_model,
)
from helpers.sampled import Make, texts
from helpers.support import Graphs, Tiny

from specsot.ops.forward import HostReader
from specsot.states.round import ExplainedRound, FinalToken

DRAWN = (f"sampling.temperature={HEAT}", f"sampling.top_k={KEPT}")
WAYS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    "drawn": DRAWN,
    "rejection": (*DRAWN, "sampling.accept=rejection"),
}
CASES = [(kind, number, way) for kind in KINDS for number in (0, 1) for way in WAYS]
CASES = [case for case in CASES if case[1] < len(SETTINGS[case[0]])]
RECURSIVE = ("drafter.tree=[[0], [1], [0, 0], [0, 1], [1, 0]]", "drafter.draws=distinct")


@pytest.fixture(scope="module")
def made(tiny: Make) -> Tiny:
    return tiny("llama")


@pytest.mark.parametrize(("kind", "number", "way"), CASES)
def test_the_figures_are_those_of_the_round(
    kind: str, number: int, way: str, made: Tiny, graphs: Graphs
) -> None:
    layout = f"layout.kind={('bim', 'batching')[(number + len(way)) % 2]}"
    session = session_of(made, graphs, kind, *SETTINGS[kind][number], *WAYS[way], layout)
    run, observe = listen(explaining(session))
    witness = Witness(run, made, way != "greedy")
    for one in observe:
        witness.check(one)
    assert sum(len(one.told.drafts) for one in observe) or kind == "ngram"
    emitted = sum(sum(branch.emitted) for branch, _ in witness.behind.values())
    assert sum(one.told.committed for one in observe) == emitted > 0


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("way", WAYS)
def test_branches_beside_each_other_are_told_apart(
    way: str, layout: str, made: Tiny, graphs: Graphs
) -> None:
    session = session_of(made, graphs, "eagle3", *WAYS[way], graph=f"{layout}_eagle")
    run, observe = listen(explaining(session))
    witness = Witness(run, made, way != "greedy", plain=False)
    for one in observe:
        witness.check(one)
    assert len({one.told.branch for one in observe}) == 6
    assert sum(one.told.accepted for one in observe) > 5


def test_without_a_drafter_there_is_the_final_token_alone(made: Tiny, graphs: Graphs) -> None:
    _, observe = listen(explaining(session_of(made, graphs, "none", *DRAWN)))
    assert observe
    for one in observe:
        assert (one.told.drafts, one.told.accepted) == (
            (),
            0,
        ) and one.told.came is FinalToken.TARGET


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_the_probabilities_of_a_chain(rule: str, made: Tiny, graphs: Graphs) -> None:
    """p by the target and q by the drafter, each asked by itself behind the same tokens."""
    sets = ("drafter.gamma=3", "drafter.draws=sampled", *WAYS["rejection"], f"sampling.rule={rule}")
    run, observe = listen(explaining(session_of(made, graphs, "vanilla", *sets, endless=40)))
    witness = Witness(run, made, True)
    drafter, seen = small_model(made), 0
    for one in observe:
        witness.check(one)
        for draft, p_V in witness.chances(one):
            ids = (*witness.ids(one), *above(one.told, draft))
            q_V = laws(drafter.logits(ids, torch.float32)[-1], True).softmax(-1)
            assert draft.figures.p == pytest.approx(float(p_V[draft.token]), abs=1e-5)
            assert draft.figures.q == pytest.approx(float(q_V[draft.token]), abs=1e-5)
            seen += 1
        if rule == "block":
            _check_block(one.told)
    assert seen > 10
    assert {one.told.came for one in observe} == {FinalToken.RESIDUAL, FinalToken.BONUS}


def _check_block(told: ExplainedRound) -> None:
    """The longest prefix whose r is below its h."""
    tried = [(d.depth, d.figures.r, d.figures.chance) for d in told.drafts]
    passed = [depth for depth, r, h in tried if r is not None and h is not None and r < h]
    assert told.accepted == max(passed, default=0)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "dflash"])
def test_siblings_are_tried_against_what_the_earlier_ones_left(
    kind: str, made: Tiny, graphs: Graphs
) -> None:
    """Best tokens were not drawn: q is 1, and a rejected sibling's share of p is gone."""
    sets = SETTINGS[kind][1 if kind == "dflash" else 0]
    sets = (*sets, *WAYS["rejection"], "sampling.rule=topk")
    run, observe = listen(explaining(session_of(made, graphs, kind, *sets, endless=40)))
    witness, later = Witness(run, made, True), 0
    for one in observe:
        for draft, p_V in witness.chances(one):
            earlier = [
                d for d in one.told.drafts if d.parent == draft.parent and d.node < draft.node
            ]
            p_V[[d.token for d in earlier]] = 0.0
            assert draft.figures.q == 1
            assert draft.figures.p == pytest.approx(float(p_V[draft.token] / p_V.sum()), abs=1e-5)
            assert not any(d.accepted for d in earlier)
            later += bool(earlier)
    assert later > 5


def test_drawn_siblings_are_tried_without_the_earlier_ones(made: Tiny, graphs: Graphs) -> None:
    sets = (*RECURSIVE, *WAYS["rejection"], "sampling.rule=without_replacement")
    run, observe = listen(explaining(session_of(made, graphs, "eagle1", *sets)))
    witness, first = Witness(run, made, True), 0
    for one in observe:
        assert one.told.rule == "without_replacement"
        witness.check(one)
        tried = set()
        for draft, p_V in witness.chances(one):
            if draft.parent not in tried:
                assert draft.figures.p == pytest.approx(float(p_V[draft.token]), abs=1e-5)
                first += 1
            tried.add(draft.parent)
    assert first > 5


def test_the_drafters_score_is_the_sum_of_its_log_probabilities(made: Tiny, graphs: Graphs) -> None:
    run, observe = listen(explaining(session_of(made, graphs, "vanilla", "drafter.gamma=3")))
    witness, drafter = Witness(run, made, False), small_model(made)
    for one in observe:
        total = 0.0
        for draft in one.told.drafts:
            ids = (*witness.ids(one), *above(one.told, draft))
            total += float(drafter.logits(ids, torch.float32)[-1].log_softmax(-1)[draft.token])
            assert draft.figures.score == pytest.approx(total, abs=1e-4)


def test_an_unadjusted_token_is_the_targets_own(made: Tiny, graphs: Graphs) -> None:
    sets = (*WAYS["rejection"], "drafter.gamma=3", "drafter.draws=sampled")
    sets = (*sets, "sampling.skip_sample_adjustment=true")
    _, observe = listen(explaining(session_of(made, graphs, "vanilla", *sets)))
    assert {one.told.came for one in observe} == {FinalToken.TARGET, FinalToken.BONUS}


@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize("way", WAYS)
def test_explaining_changes_no_token_and_nothing_is_read_where_nobody_asks(
    kind: str, way: str, made: Tiny, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    inside = HostReader.read

    def read(self: HostReader, values: torch.Tensor) -> Any:
        reads.append(values.numel())
        return inside(self, values)

    monkeypatch.setattr(HostReader, "read", read)
    own = SETTINGS[kind][0] if kind != "none" else ()
    session = session_of(made, graphs, kind, *own, *WAYS[way])
    quiet, nothing = listen(session)
    plain, reads[:] = list(reads), []
    loud, observe = listen(explaining(session))
    assert not nothing and observe
    assert texts(quiet) == texts(loud)
    assert quiet.board["host"].reads == loud.board["host"].reads == len(reads) == len(plain)
    laid = sum(reads) - sum(plain)
    assert laid % 7 == 0 and laid // 7 >= sum(len(one.told.drafts) for one in observe)

"""What `--explain-rounds` records of a round is what happened in it; a witness computes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from helpers.axes import tokens_by_branch
from helpers.drafters import KINDS, SETTINGS, drafting
from helpers.support import Reference, Tiny, contexts, drive, graphs, outline_of, requests_of, start

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.ops.forward import HostReader
from specsot.ops.sampling import coins
from specsot.states.graph.plugins import drafter_class
from specsot.states.machine import Event, OpRan
from specsot.states.request import Branch
from specsot.states.round import MATCH, FinalToken, VerifiedTree

HEAT, KEPT = 1.3, 12
SINGLE = (Prompt("0", "hello"), Prompt("1", "a second question", max_new_tokens=7))


class ExplainedDraft:
    """One draft of an explained tree."""

    def __init__(self, tree: VerifiedTree, node: int) -> None:
        self.node = node
        self.parent = tree.parents[node]
        self.depth = tree.depths[node]
        self.token = tree.tokens[node]
        self.accepted = node in tree.path
        self.reached = tree.reached(node)
        self.figures = tree.figures[node - 1]


class ExplainedRound:
    """An explained tree, draft by draft."""

    def __init__(self, tree: VerifiedTree) -> None:
        self.branch = tree.branch
        self.rule = tree.rule
        self.position = tree.position
        self.root = tree.root
        self.drafts = [ExplainedDraft(tree, node) for node in tree.drafts]
        self.accepted = len(tree.path) - 1
        self.final = tree.final
        self.came = tree.came
        self.committed = tree.num_committed
        self.finish = tree.finish


@dataclass
class Heard:
    """One record, with how many tokens its branch had before the round."""

    told: ExplainedRound
    before: int


def explaining(session: Session) -> Session:
    program = session.program.with_settings("verify.accept", {"explain": True})
    assert program is not None
    session.program = program
    return session


def listen(session: Session, prompts: Any = SINGLE) -> tuple[EngineCore, list[Heard]]:
    observe: list[Heard] = []

    def sink(event: Event) -> None:
        if isinstance(event, OpRan) and "committed" in event.results:
            sizes = {b.name: len(b.tokens) for r in requests_of(run) for b in r.all_branches()}
            trees = [tree for tree in run.board["committed"].trees if tree.rule]
            for told in map(ExplainedRound, trees):
                observe.append(Heard(told, sizes[told.branch] - told.committed))

    run = start(session, prompts, sink)
    return drive(run, check=False), observe


def session_of(made: Tiny, kind: str, *sets: str, graph: str = "", endless: int = 0) -> Session:
    """Short answers that may end by a stop token; `endless`: answers of so many tokens."""
    models = made.models if kind == "none" else drafting(made, kind)
    book = made.book("outline", () if endless else (2,))
    sets = (f"drafter.kind={kind}", *sets)
    outline = outline_of(3) if graph else None
    graph = graph or "autoregressive"
    return graphs.session(graph, models, book, outline=outline, sets=sets, budget=endless or 10)


def laws(logits_V: torch.Tensor, drawn: bool) -> torch.Tensor:
    """float64 log-probabilities up to a constant, as the target (or a drafter) draws from them."""
    scores_V = logits_V.double() / (HEAT if drawn else 1.0)
    if not drawn:
        return scores_V
    return scores_V.where(scores_V >= scores_V.topk(KEPT).values[-1], -torch.inf)


class Witness:
    """Checks records against the target's own scores behind every node."""

    def __init__(self, run: EngineCore, made: Tiny, drawn: bool, plain: bool = True) -> None:
        book = run.board["prompts"]
        pairs = [pair for r in requests_of(run) for pair in contexts(r, book, plain)]
        self.behind = {branch.name: (branch, context) for branch, context in pairs}
        self.drawn = drawn
        self.logits = cache(lambda ids: made.reference.logits(ids, torch.float32)[-1])

    def ids(self, observe: Heard) -> tuple[int, ...]:
        branch, context = self.behind[observe.told.branch]
        return (*context, *branch.tokens[: observe.before])

    def check(self, observe: Heard) -> None:
        told, ids = observe.told, self.ids(observe)
        assert told.root == ids[-1] and told.position == len(ids) - 1
        branch = self.behind[told.branch][0]
        path = [d.token for d in told.drafts if d.accepted]
        assert len(path) == told.accepted
        kept = branch.tokens[observe.before : observe.before + told.committed]
        assert kept == [*path, told.final][: told.committed]
        if told.committed <= told.accepted:
            assert told.finish is not None
        for draft in told.drafts:
            self._check(draft, branch, (*ids, *above(told, draft)), told)
        assert told.came is self._came(told)

    def _check(
        self, draft: ExplainedDraft, branch: Branch, ids: tuple[int, ...], told: ExplainedRound
    ) -> None:
        assert draft.depth == len(ids) - told.position
        key = torch.tensor([coins.branch_key(branch.request.seed, branch.index)])
        if told.rule == MATCH:
            self._check_match(draft, key, ids, told)
        else:
            self._check_judged(draft, key, told)

    def _check_match(
        self, draft: ExplainedDraft, key: torch.Tensor, ids: tuple[int, ...], told: ExplainedRound
    ) -> None:
        found, scores_V = draft.figures, laws(self.logits(ids), self.drawn)
        at = coins.token_keys(key, torch.tensor([len(ids)]))
        assert (found.p, found.q, found.r, found.chance) == (None,) * 4
        if self.drawn:
            scores_V = coins.perturbed(scores_V[None], at)[0]
            assert found.coin == coins.gumbel(at, torch.tensor([[draft.token]])).item()
        else:
            assert found.coin is None
        assert found.draw == int(scores_V.argmax())
        taken = {0} | {d.node for d in told.drafts if d.accepted}
        assert draft.reached == (draft.parent in taken)
        assert draft.accepted == (draft.reached and found.draw == draft.token)

    def _check_judged(self, draft: ExplainedDraft, key: torch.Tensor, told: ExplainedRound) -> None:
        found = draft.figures
        assert found.draw is None and found.coin is None
        if not draft.reached:
            assert (found.p, found.q, found.r, found.chance) == (None,) * 4
            return
        rank = sum(d.parent == draft.parent and d.node < draft.node for d in told.drafts)
        place = [torch.tensor([value]) for value in (told.position, draft.depth, rank)]
        assert (
            found.r == coins.uniforms(coins.round_keys(key, *place, coins.CoinRole.ACCEPT)).item()
        )
        assert found.p is not None and found.q is not None and found.r is not None
        if told.rule != "block":
            passes = found.q > 0 and found.r * found.q < found.p
            assert draft.accepted == passes
            assert found.chance == pytest.approx(min(1, found.p / found.q), rel=1e-5)

    def _came(self, told: ExplainedRound) -> FinalToken:
        last = max((d.node for d in told.drafts if d.accepted), default=0)
        if not told.drafts:
            return FinalToken.TARGET
        if any(d.parent == last for d in told.drafts):
            return FinalToken.TARGET if told.rule == MATCH else FinalToken.RESIDUAL
        return FinalToken.BONUS

    def chances(self, observe: Heard) -> Iterator[tuple[ExplainedDraft, torch.Tensor]]:
        for draft in observe.told.drafts:
            if draft.reached:
                ids = (*self.ids(observe), *above(observe.told, draft))
                yield draft, laws(self.logits(ids), True).softmax(-1)


def above(told: ExplainedRound, draft: ExplainedDraft) -> list[int]:
    of_node, tokens = {d.node: d for d in told.drafts}, []
    while draft.parent:
        draft = of_node[draft.parent]
        tokens.append(draft.token)
    return tokens[::-1]


def small_model(made: Tiny) -> Reference:
    return Reference(drafting(made, "vanilla").drafter.config.path.parent)


DRAWN = (f"sampling.temperature={HEAT}", f"sampling.top_k={KEPT}")
WAYS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    "drawn": DRAWN,
    "rejection": (*DRAWN, "sampling.accept=rejection"),
}
CASES = [(kind, number, way) for kind in KINDS for number in (0, 1) for way in WAYS]
CASES = [case for case in CASES if case[1] < len(SETTINGS[case[0]])] + [("none", 0, "drawn")]
RECURSIVE = ("drafter.tree=[[0], [1], [0, 0], [0, 1], [1, 0]]", "drafter.draws=distinct")


@pytest.mark.parametrize(("kind", "number", "way"), CASES)
def test_the_figures_are_those_of_the_round(kind: str, number: int, way: str, made: Tiny) -> None:
    layout = f"layout.kind={('bim', 'batching')[(number + len(way)) % 2]}"
    own = SETTINGS[kind][number] if kind != "none" else ()
    session = session_of(made, kind, *own, *WAYS[way], layout)
    run, observe = listen(explaining(session))
    witness = Witness(run, made, way != "greedy")
    for one in observe:
        witness.check(one)
    assert any(one.told.drafts for one in observe) or not drafter_class(kind).Settings.has_model
    emitted = sum(sum(branch.emitted) for branch, _ in witness.behind.values())
    assert sum(one.told.committed for one in observe) == emitted > 0


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("way", WAYS)
def test_branches_beside_each_other_are_told_apart(way: str, layout: str, made: Tiny) -> None:
    session = session_of(made, "eagle3", *WAYS[way], graph=f"{layout}_eagle")
    run, observe = listen(explaining(session))
    witness = Witness(run, made, way != "greedy", plain=False)
    for one in observe:
        witness.check(one)
    assert len({one.told.branch for one in observe}) == 6
    assert sum(one.told.accepted for one in observe) > 5


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_the_probabilities_of_a_chain(rule: str, made: Tiny) -> None:
    """p by the target and q by the drafter, each asked by itself behind the same tokens."""
    sets = ("drafter.gamma=3", "drafter.draws=sampled", *WAYS["rejection"], f"sampling.rule={rule}")
    run, observe = listen(explaining(session_of(made, "vanilla", *sets, endless=40)))
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
    tried = [(d.depth, d.figures.r, d.figures.chance) for d in told.drafts]
    passed = [depth for depth, r, h in tried if r is not None and h is not None and r < h]
    assert told.accepted == max(passed, default=0)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "dflash"])
def test_siblings_are_tried_against_what_the_earlier_ones_left(kind: str, made: Tiny) -> None:
    """Best tokens were not drawn: q is 1, and a rejected sibling's share of p is gone."""
    sets = SETTINGS[kind][1 if kind == "dflash" else 0]
    sets = (*sets, *WAYS["rejection"], "sampling.rule=topk")
    run, observe = listen(explaining(session_of(made, kind, *sets, endless=40)))
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


def test_drawn_siblings_are_tried_without_the_earlier_ones(made: Tiny) -> None:
    sets = (*RECURSIVE, *WAYS["rejection"], "sampling.rule=without_replacement")
    run, observe = listen(explaining(session_of(made, "eagle1", *sets)))
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


def test_the_drafters_score_is_the_sum_of_its_log_probabilities(made: Tiny) -> None:
    run, observe = listen(explaining(session_of(made, "vanilla", "drafter.gamma=3")))
    witness, drafter = Witness(run, made, False), small_model(made)
    for one in observe:
        total = 0.0
        for draft in one.told.drafts:
            ids = (*witness.ids(one), *above(one.told, draft))
            total += float(drafter.logits(ids, torch.float32)[-1].log_softmax(-1)[draft.token])
            assert draft.figures.score == pytest.approx(total, abs=1e-4)


def test_an_unadjusted_token_is_the_targets_own(made: Tiny) -> None:
    sets = (*WAYS["rejection"], "drafter.gamma=3", "drafter.draws=sampled")
    sets = (*sets, "sampling.skip_sample_adjustment=true")
    _, observe = listen(explaining(session_of(made, "vanilla", *sets)))
    assert {one.told.came for one in observe} == {FinalToken.TARGET, FinalToken.BONUS}


@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize("way", WAYS)
def test_explaining_changes_no_token_and_nothing_is_read_where_nobody_asks(
    kind: str, way: str, made: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    inside = HostReader.read

    def read(self: HostReader, values: torch.Tensor) -> Any:
        reads.append(values.numel())
        return inside(self, values)

    monkeypatch.setattr(HostReader, "read", read)
    own = SETTINGS[kind][0] if kind != "none" else ()
    session = session_of(made, kind, *own, *WAYS[way])
    quiet, nothing = listen(session)
    plain, reads[:] = list(reads), []
    loud, observe = listen(explaining(session))
    assert not nothing and observe
    assert tokens_by_branch(quiet) == tokens_by_branch(loud)
    hosts = (quiet.board["host"], loud.board["host"])
    assert hosts[0].reads == hosts[1].reads == len(reads) == len(plain)
    laid = sum(reads) - sum(plain)
    assert laid % 7 == 0 and laid // 7 >= sum(len(one.told.drafts) for one in observe)

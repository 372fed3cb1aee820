"""`rows_per_round`: branches that share a round's drafted tokens, with every drafter of trees."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.sharing import BOUNDS, FULL_ROUNDS, LAYOUTS, bound_of, session_of
from helpers.support import (
    Graphs,
    PlanBook,
    Tiny,
    accepted_of,
    branches_of,
    check_lossless,
    drive,
    outline_of,
    run_all,
    start,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.ops.draft.proposals import share
from specsot.ops.types import Proposal
from specsot.states.layout import Layout
from specsot.states.phases import continuous_decode, verify
from specsot.states.phases.grow_tree import force
from specsot.states.round import RoundSummary

Make = Callable[..., Tiny]


@dataclass
class Round:
    """One round: what was drafted, what was kept, and the rows that the target got.

    before, after: the proposal before and after the branches shared it.
    rows: of the target's forward; riders: those of them that are prompts.
    """

    before: Proposal
    after: Proposal
    rows: int = 0
    riders: int = 0

    @property
    def counts(self) -> list[int]:
        """Drafted tokens of each tree."""
        return self.after.valid_SN.sum(1).tolist()

    @property
    def depths(self) -> list[int]:
        deep_SN = self.after.depths_SN * self.after.valid_SN
        return deep_SN.amax(1).tolist() if deep_SN.shape[1] else [0] * len(deep_SN)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Every round of the runs of a test."""
    seen: list[Round] = []
    place_ = Layout.place_

    def shared(proposal: Proposal, rows_per_round: int | None) -> Proposal:
        seen.append(Round(proposal, share(proposal, rows_per_round)))
        return seen[-1].after

    def placed(layout: Layout, kv: Any, trees: Any, spans: Any) -> Any:
        found = place_(layout, kv, trees, spans)
        if trees is not None:
            seen[-1].rows = found.rows.tokens_BQ.numel()
            seen[-1].riders = sum(len(s.tokens) * len(layout.rows_of(s.owner)) for s in spans)
        return found

    monkeypatch.setattr(verify, "share", shared)
    monkeypatch.setattr(continuous_decode, "share", shared)
    monkeypatch.setattr(Layout, "place_", placed)
    return seen


@pytest.mark.parametrize("kind", BOUNDS)
def test_the_text_is_the_targets_own_and_both_layouts_accept_the_same(
    kind: str, tiny: Make, graphs: Graphs, rounds: list[Round]
) -> None:
    made, found = tiny("llama"), []
    for layout in LAYOUTS:
        session = session_of(kind, layout, made, graphs)
        run = run_all(session, ["hello"])
        check_lossless(run, session.prompts, made.reference, plain=False)
        found.append((tokens_of(run), accepted_of(run), [one.counts for one in rounds]))
        rounds.clear()
    assert found[0] == found[1], "the same tokens, accepted lengths and trees, round by round"
    accepted = [count for branch in found[0][1]["0"] for count in branch]
    assert sum(accepted) > 0, "nothing was ever accepted: nothing was tested"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", BOUNDS)
def test_two_requests_share_the_rows_too(
    kind: str, layout: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("qwen3")
    session = session_of(kind, layout, made, graphs, made.book("prompt"))
    run = run_all(session, ["hello", Prompt("1", "a second question", max_new_tokens=7)])
    check_lossless(run, session.prompts, made.reference, plain=False)


@pytest.mark.parametrize("kind", BOUNDS)
def test_what_is_drawn_is_the_same_too(kind: str, tiny: Make, graphs: Graphs) -> None:
    """At a temperature: a draft that was not verified costs a round, never a token."""
    made = tiny("llama")
    heat, found = ["sampling.temperature=1.0", "sampling.top_k=20"], []
    for layout in LAYOUTS:
        session = session_of(kind, layout, made, graphs, sets=heat)
        found.append(tokens_of(run_all(session, ["hello"], check=False)))
    sets, book = [*heat, "layout.max_num_branches=3"], made.book(stop_ids=())
    outline = outline_of(5)
    plain = graphs.session("bim_plain", made.models, book, outline=outline, budget=25, sets=sets)
    found.append(tokens_of(run_all(plain, ["hello"], check=False)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", BOUNDS)
def test_a_round_has_as_many_nodes_as_it_may_and_no_row_more(
    kind: str, layout: str, tiny: Make, graphs: Graphs, rounds: list[Round]
) -> None:
    most = bound_of(kind)
    questions = ["hello", Prompt("1", "a second question", max_new_tokens=7)]
    run_all(session_of(kind, layout, tiny("qwen3"), graphs), questions, check=False)
    assert {len(one.counts) for one in rounds} >= {2, 3}
    for one in rounds:
        trees, nodes = one.before.tokens_SN.shape
        assert sum(one.counts) == min(most, int(one.before.valid_SN.sum()))
        if kind in FULL_ROUNDS:
            assert sum(one.counts) == min(most, trees * nodes)
        if layout == "bim":
            assert one.rows == trees + min(most, trees * nodes) + one.riders
        elif not one.riders:
            assert one.rows >= trees * (1 + min(most, nodes))
    full = [one for one in rounds if sum(one.counts) == most]
    assert full, "the bound was meant to be reached"
    if kind in FULL_ROUNDS:
        uneven = [one for one in full if len(set(one.counts)) > 1]
        assert uneven, "the branches were meant to get unequal parts"
    assert any(one.riders for one in rounds), "prompts were meant to ride beside the trees"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_branches_get_deeper_trees(
    layout: str, tiny: Make, graphs: Graphs, rounds: list[Round]
) -> None:
    mean: dict[int, float] = {}
    for active in (1, 3):
        rounds.clear()
        outline = outline_of(active)
        session = session_of("eagle3", layout, tiny("llama"), graphs, outline=outline)
        run_all(session, ["hello"], check=False)
        depths = [one.depths for one in rounds if len(one.counts) == active]
        assert len(depths) > 3
        mean[active] = sum(map(sum, depths)) / (active * len(depths))
        assert {sum(one.counts) for one in rounds} == {12}
    assert mean[1] > mean[3] + 0.5


@pytest.mark.parametrize("kind", ["eagle3", "dflash, ddtree"])
def test_the_best_nodes_are_kept_whosever_they_are(
    kind: str, tiny: Make, graphs: Graphs, rounds: list[Round]
) -> None:
    """No node that was left out is more probable than one that was kept."""
    run_all(session_of(kind, "bim", tiny("llama"), graphs), ["hello"], check=False)
    for one in rounds:
        kept = sorted(one.after.scores_SN[one.after.valid_SN].tolist(), reverse=True)
        every = sorted(one.before.scores_SN.flatten().tolist(), reverse=True)
        assert kept == every[: bound_of(kind)]


@pytest.mark.parametrize("kind", ["eagle3", "ngram, nasd"])
def test_outlines_that_the_model_writes(
    kind: str, tiny: Make, graphs: Graphs, rounds: list[Round]
) -> None:
    """A root branch has the round for itself; later its rows are everybody's prefix."""
    made, found = tiny("llama"), []
    for layout in LAYOUTS:
        book = PlanBook(made.models.target.vocab_size, "outline", ())
        book.text = "PLAN\n1|50|-|-|One\n2|80|-|1|Two\n3|20|-|-|Three\nEND"
        session = session_of(kind, layout, made, graphs, book, outline=None)
        run = run_all(session, ["hello"])
        assert len(branches_of(run)) == 3
        check_lossless(run, book, made.reference, plain=False)
        found.append((tokens_of(run), accepted_of(run)))
    assert found[0] == found[1]
    assert {len(one.counts) for one in rounds} >= {1, 2}


class Counting:
    """A target that notes how many rows it was asked to give logits for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked = inner, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, *args: Any) -> Any:
        self.asked.append(args[6].numel())
        return self.inner.forward(*args)


def test_rows_that_nobody_has_get_no_logits(
    tiny: Make, graphs: Graphs, rounds: list[Round]
) -> None:
    made = tiny("llama")
    target = Counting(made.models.target)
    made = replace(made, models=replace(made.models, target=target))
    session = session_of("eagle3", "bim", made, graphs, outline=outline_of(3))
    run = drive(start(session, ["hello"]), until=lambda run: run.state == "parallel_prefill")
    target.asked.clear()
    drive(run)
    assert target.asked == [len(one.counts) + 12 for one in rounds]


def test_tokens_that_a_grammar_forces_come_first() -> None:
    """They are certain, so the branches that draft freely share what is left."""
    steps_SN = torch.arange(4).expand(3, -1)
    scores_SN = torch.tensor([[-0.1, -0.2, -0.3, -0.4], [-0.5] * 4, [-0.9, -1.0, -1.1, -1.2]])
    valid_SN = torch.ones(3, 4, dtype=torch.bool)
    drafted = Proposal(steps_SN, steps_SN - 1, steps_SN + 1, valid_SN, scores_SN, 4)
    free, bound = SimpleNamespace(matcher=None), SimpleNamespace()
    bound.matcher = SimpleNamespace(forced=lambda: [7, 8, 9])
    active = [free, free, bound]
    manager: Any = SimpleNamespace(table=SimpleNamespace(active=active))
    kept = share(force(manager, drafted), 6)
    assert kept.valid_SN.sum(1).tolist() == [3, 0, 3]
    assert kept.tokens_SN[2, :3].tolist() == [7, 8, 9]
    assert kept.parents_SN[2, :3].tolist() == [-1, 0, 1]


def test_rows_that_stand_for_nothing_are_counted(
    tiny: Make, graphs: Graphs, rounds: list[Round]
) -> None:
    """Under ``bim`` there are none if enough is drafted; in batching trees are padded."""
    for layout, kind in (("bim", "eagle3"), ("batching", "eagle3"), ("bim", "ngram, nasd")):
        rounds.clear()
        summaries: list[RoundSummary] = []
        session = session_of(kind, layout, tiny("llama"), graphs)
        run = start(session, ["hello"])
        branches = run.board["branches"]
        branches.committer = _Noting(branches.committer, summaries)
        drive(run, check=False)
        of_trees = [one for one in summaries if max(one.accepted) >= 0]
        assert len(of_trees) == len(rounds)
        for one, seen in zip(of_trees, rounds, strict=True):
            needed = len(seen.counts) + sum(seen.counts) + seen.riders
            assert one.drafted == sum(seen.counts)
            assert (one.rows, one.padding) == (seen.rows, seen.rows - needed)
        wasted = sum(one.padding for one in of_trees)
        assert (wasted == 0) == (layout == "bim")


@dataclass
class _Noting:
    """A committer that records the summaries of another one."""

    committer: Any
    summaries: list[RoundSummary]

    def commit_(self, *args: Any, **more: Any) -> RoundSummary:
        self.summaries.append(self.committer.commit_(*args, **more))
        return self.summaries[-1]

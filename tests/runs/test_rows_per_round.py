"""What a round spends: no row stands for nothing, and no forward is for no branch.

Branches share a round's drafted tokens (`rows_per_round`), a round chooses its size by what
forwards cost, and under ``bim`` a forward is never more than under ``batching``."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import support
from helpers.drafters import CHOOSING, drafting
from helpers.support import Tiny

from specsot.engine.models import Models
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.metrics import counted_figures, held_figures
from specsot.engine.record.recorder import Recorder
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.ops.draft.proposals import share
from specsot.ops.types import Proposal
from specsot.states.admission import request_slots
from specsot.states.drafters.vanilla import PLUGGED_IN
from specsot.states.graph.plugins import drafter_class
from specsot.states.layout import Layout
from specsot.states.machine import OpRan
from specsot.states.phases import continuous_decode, verify
from specsot.states.phases.grow_tree import force
from specsot.states.request import Finish
from specsot.states.round import RoundSummary
from specsot.states.yaml.source import GraphError

LAYOUTS = ("bim", "batching", "paged")
BOUNDS = {
    "eagle3": ("num_draft_tokens=12", "draft_depth=5", "top_k=4", "rows_per_round=12"),
    "eagle2": (
        "num_draft_tokens={1: 12, 2: 9, 3: 6}",
        "draft_depth=4",
        "top_k=3",
        "rows_per_round=10",
    ),
    "eagle1": ("rows_per_round=14",),
    "dflash, ddtree": ("grow=ddtree", "num_draft_tokens=9", "block_size=5", "rows_per_round=11"),
    "dflash, chain": ("grow=chain", "block_size=6", "rows_per_round=7"),
    "ngram": ("num_draft_tokens=6", "rows_per_round=5"),
}
LONG = support.SizedBook(130, "outline", ())
PARTS = support.outline_with([90] * 3)
FULL_ROUNDS = tuple(kind for kind in BOUNDS if "ngram" not in kind)  # always enough candidates


def session_of(kind: str, layout: str, made: Tiny, book: Any = None, **more: Any) -> Session:
    name = kind.partition(",")[0]
    own = [f"drafter.{one}" for one in BOUNDS[kind]]
    own += [f"layout.kind={layout}", "layout.max_num_branches=3"]
    return support.graphs.session(
        "bim_plain",
        drafting(made, name),
        book or made.book(stop_ids=()),
        outline=more.pop("outline", support.outline_of(5)),
        budget=more.pop("budget", 25),
        sets=(f"drafter.kind={name}", *own, *more.pop("sets", ())),
    )


def bound_of(kind: str) -> int:
    return int(BOUNDS[kind][-1].partition("=")[2])


@dataclass
class Round:
    """One round: what was drafted, what was kept, and the rows that the target got.

    before, after: the proposal before and after the branches shared it.
    rows: of the target's forward; riders: those of them that are prompts."""

    before: Proposal
    after: Proposal
    rows: int = 0
    riders: int = 0

    @property
    def counts(self) -> list[int]:
        return self.after.valid_SN.sum(1).tolist()

    @property
    def depths(self) -> list[int]:
        deep_SN = self.after.depths_SN * self.after.valid_SN
        return deep_SN.amax(1).tolist() if deep_SN.shape[1] else [0] * len(deep_SN)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    seen: list[Round] = []
    place_ = Layout.place_

    def shared(proposal: Proposal, rows_per_round: int | None) -> Proposal:
        seen.append(Round(proposal, share(proposal, rows_per_round)))
        return seen[-1].after

    def placed(layout: Layout, kv: Any, trees: Any, spans: Any, **facts: Any) -> Any:
        found = place_(layout, kv, trees, spans, **facts)
        if trees is not None:
            seen[-1].rows = found.rows.tokens_BQ.numel()
            seen[-1].riders = sum(len(s.tokens) * len(layout.rows_of(s.owner)) for s in spans)
        return found

    monkeypatch.setattr(verify, "share", shared)
    monkeypatch.setattr(continuous_decode, "share", shared)
    monkeypatch.setattr(Layout, "place_", placed)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", BOUNDS)
def test_a_round_has_as_many_nodes_as_it_may_and_no_row_more(
    kind: str, layout: str, tiny: support.Make, rounds: list[Round]
) -> None:
    most = bound_of(kind)
    questions = ["hello", Prompt("1", "a second question", max_new_tokens=7)]
    support.run_all(session_of(kind, layout, tiny("qwen3")), questions, check=False)
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


@pytest.mark.parametrize("kind", ["eagle3", "dflash, ddtree"])
def test_the_best_nodes_are_kept_whosever_they_are(
    kind: str, made: Tiny, rounds: list[Round]
) -> None:
    support.run_all(session_of(kind, "bim", made), ["hello"], check=False)
    for one in rounds:
        kept = sorted(one.after.scores_SN[one.after.valid_SN].tolist(), reverse=True)
        every = sorted(one.before.scores_SN.flatten().tolist(), reverse=True)
        assert kept == every[: bound_of(kind)]


def test_tokens_that_a_grammar_forces_come_first() -> None:
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


@pytest.mark.parametrize(
    ("layout", "kind"), [("bim", "eagle3"), ("batching", "eagle3"), ("bim", "ngram")]
)
def test_rows_that_stand_for_nothing_are_counted(
    layout: str, kind: str, made: Tiny, rounds: list[Round]
) -> None:
    _, summaries, found = rounds_of(session_of(kind, layout, made))
    of_trees = [one for _, one in summaries if one.trees]
    assert len(of_trees) == len(rounds)
    for one, seen in zip(of_trees, rounds, strict=True):
        needed = len(seen.counts) + sum(seen.counts) + seen.riders
        assert one.drafted == sum(seen.counts)
        assert (one.rows, one.padding) == (seen.rows, seen.rows - needed)
    assert found["padding_waste"] == found["target_rows_empty"] / found["target_rows"]
    assert (found["target_rows_empty"] == 0) == (layout == "bim")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_that_is_exactly_full_runs_all_branches_at_once(layout: str, made: Tiny) -> None:
    one = partial(session_of, "eagle3", layout, made, LONG, outline=PARTS)
    free = support.run_all(one(), ["hello"], check=False)
    (request,) = support.requests_of(free)
    own = [len(branch.prompt) + branch.budget for branch in request.branches]
    rows = max(own) + 1 if layout == "batching" else sum(own) + 3
    nodes = 36 if layout == "paged" else 12  # there each tree has room for all of them
    needed = request.prefix_length + rows + nodes
    assert needed > request_slots(request) + nodes + 1, "the request was meant to open"
    for less in (0, 1):
        run, most = support.start(one(sets=[f"layout.kv_slots={needed - less}"]), ["hello"]), 0
        while not run.finished:
            run.advance()
            most = max(most, len(run.branches))
        if less and layout == "batching":  # nor would it fit alone
            assert {branch.finish for branch in support.branches_of(run)} == {Finish.REFUSED}
        else:
            assert support.tokens_of(run) == support.tokens_of(free)
            assert most == 3 - less


POLICIES = ("fixed", "egag", *PLUGGED_IN, "cost")


def choosing_session_of(made: Tiny, kind: str, *sets: str, parts: int = 4) -> Session:
    return support.graphs.session(
        "bim_plain",
        drafting(made, kind),
        made.book(stop_ids=()),
        outline=support.outline_of(parts),
        budget=14,
        sets=(f"drafter.kind={kind}", *sets),
    )


def rounds_of(
    session: Session,
) -> tuple[EngineCore, list[tuple[Any, RoundSummary]], dict[str, Any]]:
    recorder = Recorder(str, None)
    run = support.start(session, ["hello", "a second question"])
    run.sink, found = recorder, list[tuple[Any, RoundSummary]]()
    recorder.attach(run)

    def look(event: Any) -> None:
        if "batch" in run.board and run.board["batch"] is not None:
            batches.append(run.board["batch"])
        if "committed" in getattr(event, "results", {}):
            found.append((batches[-1], run.board["committed"]))

    batches: list[Any] = []
    recorder.listeners.append(look)
    support.drive(run)
    meter = recorder.meter
    return run, found, counted_figures(meter) | held_figures(meter, run.board)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_only_drafts_have_rows(policy: str, layout: str, made: Tiny) -> None:
    costs = CHOOSING["vanilla"][-1:] if policy == "cost" else ()
    sets = (f"drafter.gamma_policy={policy}", "drafter.gamma_max=5", f"layout.kind={layout}")
    kind = "adaptive" if policy in PLUGGED_IN else "vanilla"
    _, rounds, found = rounds_of(choosing_session_of(made, kind, *sets, *costs))
    lengths, forwards, rested = [], 0, 0
    for batch, summary in rounds:
        drafts = [sum(token >= 0 for token in tree.tokens) - 1 for tree in summary.trees]
        lengths.append(drafts)
        prompts = sum(span.flat_Cn.size for span in batch.placed.spans)
        rows = sum(1 + n for n in drafts) + prompts
        assert summary.rows - summary.padding == rows
        assert layout != "bim" or summary.padding == 0
        longest = max(drafts, default=0)
        if policy == "cost" and not longest:
            assert summary.work.forwards <= 1
            rested += not summary.work.forwards and bool(summary.trees)
        elif summary.trees:
            assert summary.work.forwards == max(longest, 1)
        forwards += summary.work.forwards
    assert found["drafter_forwards"] == forwards > 0
    assert found["target_rows"] == sum(one.rows for _, one in rounds)
    assert policy != "cost" or rested, "what nobody asks for waits"
    assert policy == "fixed" or len({n for own in lengths for n in own}) > 2, "lengths differ"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CHOOSING)
def test_what_is_chosen_is_what_is_drafted(kind: str, layout: str, made: Tiny) -> None:
    sets = (*CHOOSING[kind], f"layout.kind={layout}")
    _, rounds, found = rounds_of(choosing_session_of(made, kind, *sets))
    sizes = {}
    for _, one in rounds:
        if not one.trees:
            continue
        (choice,) = one.choices
        sizes[choice.size] = sizes.get(choice.size, 0) + 1
        drafted = [sum(token >= 0 for token in tree.tokens) - 1 for tree in one.trees]
        may_be_fewer = not drafter_class(kind).Settings.has_model and max(drafted) <= choice.size
        assert max(drafted) == choice.size or may_be_fewer
        assert choice.tokens >= len(one.trees) and choice.ms > 0
    assert found["chosen_sizes"] == {str(size): n for size, n in sorted(sizes.items())}
    assert len(sizes) > 1


def test_a_slow_target_is_offered_more(made: Tiny) -> None:
    drafted = []
    for target in ("{1: 100.0, 64: 101.0}", "{1: 1.0, 64: 60.0}"):
        costs = f"drafter.costs={{target: {target}, drafter: {{1: 0.1}}}}"
        sets = ("drafter.num_draft_tokens=auto", "drafter.draft_depth=4", "drafter.top_k=3", costs)
        _, rounds, _ = rounds_of(choosing_session_of(made, "eagle3", *sets))
        drafted.append(sum(one.drafted for _, one in rounds) / len(rounds))
    assert drafted[0] > 2 * drafted[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ("eagle3", "dflash", "vanilla"))
def test_a_drafter_that_costs_more_than_it_saves_is_left_alone_but_for_a_look(
    kind: str, layout: str, made: Tiny
) -> None:
    dear = "drafter.costs={target: {1: 1.0}, drafter: {1: 90.0}}"
    sets = (*CHOOSING[kind][:-1], dear, f"layout.kind={layout}")
    _, rounds, _ = rounds_of(choosing_session_of(made, kind, *sets))
    sizes = [one.choices[0].size for _, one in rounds if one.trees]
    drafted = [one.drafted for _, one in rounds if one.trees]
    assert sizes[0] and [size > 0 for size in sizes] == [count > 0 for count in drafted]
    assert 2 <= sum(size > 0 for size in sizes) < len(sizes) / 3


@pytest.mark.parametrize("kind", CHOOSING)
def test_costs_that_are_not_given_are_measured(kind: str, made: Tiny) -> None:
    session = choosing_session_of(made, kind, *CHOOSING[kind][:-1])
    rounds_of(session)
    (costs, _) = session.costs
    assert costs is not None and len(costs.target.rows) >= 2 and min(costs.target.ms) > 0
    assert bool(costs.drafter.rows) is drafter_class(kind).Settings.has_model
    assert session.costs[0] is costs, "once for all runs of a session"


def test_what_a_clock_decides_is_not_drawn(made: Tiny) -> None:
    drawn = ("sampling.temperature=0.8", "sampling.accept=rejection", "drafter.draws=sampled")
    with pytest.raises(GraphError, match="so that runs can be repeated"):
        choosing_session_of(made, "vanilla", *drawn, "drafter.gamma_policy=cost")
    choosing_session_of(made, "vanilla", *drawn, *CHOOSING["vanilla"])


def test_trees_that_are_chosen_are_not_shared_out_as_well(made: Tiny) -> None:
    with pytest.raises(GraphError, match="both set the size of trees"):
        choosing_session_of(made, "ngram", *CHOOSING["ngram"], "drafter.rows_per_round=4")


ROOM, NEW = 64, 4


def forwards(layout: str, lengths: list[int], models: Models) -> list[Any]:
    """For each forward of requests of these lengths: its rows, and keys and masks by group."""
    capacity = ROOM * (len(lengths) if layout == "bim" else 1)
    sets = (f"layout.kind={layout}", f"layout.max_num_branches={len(lengths)}")
    sets = (*sets, f"layout.kv_slots={capacity}", "scheduler.prefix_cache=false")
    book = support.FixedBook({str(n): range(3, 3 + length) for n, length in enumerate(lengths)})
    session = support.graphs.session("autoregressive", models, book, budget=NEW, sets=sets)
    seen = []

    def sink(event: object) -> None:
        if isinstance(event, OpRan) and event.op == "mask.build":
            groups = run.board["attention"].groups
            rows = run.board["batch"].rows.tokens_BQ.numel()
            seen.append((rows, [(group.keys, tuple(group.mask_GqK.shape)) for group in groups]))

    run = support.start(session, [*book.prompts], sink)
    support.drive(run, check=False)
    return seen


def entries(groups: list[Any]) -> int:
    return sum(g * q * k for _, (g, q, k) in groups)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_requests_of_one_length_are_the_same_forwards(count: int, small: Models) -> None:
    lengths = [20] * count
    bim = forwards("bim", lengths, small)
    assert bim == forwards("batching", lengths, small)
    assert [entries(groups) for _, groups in bim] == [
        count * 20 * 20,
        *(count * (20 + new) for new in range(1, NEW)),
    ], "every request costs its own context"


def test_requests_of_several_lengths_are_less(small: Models) -> None:
    lengths = [3, 40, 11, 5]
    bim = forwards("bim", lengths, small)
    batching = forwards("batching", lengths, small)
    assert [rows for rows, _ in bim] == [sum(lengths), *[4] * (NEW - 1)]
    assert [rows for rows, _ in batching] == [4 * max(lengths), *[4] * (NEW - 1)]
    for (_, ours), (_, theirs) in zip(bim, batching, strict=True):
        assert entries(ours) <= entries(theirs)

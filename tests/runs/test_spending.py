"""What rounds spend: no row of a tree stands for nothing, no forward is for nobody, and a round
that chooses for itself goes by what forwards cost."""

from typing import Any

import pytest
from helpers.drafters import CHOOSING, SETTINGS, drafting
from helpers.support import Graphs, Make, Tiny, check_lossless, drive, outline_of, start

from specsot.engine.record.metrics import figures
from specsot.engine.record.recorder import Recorder
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.states.round import RoundSummary
from specsot.states.yaml.source import GraphError

POLICIES = ("fixed", "egag", "heuristic", "svip", "confidence", "adaedl", "cost")
LAYOUTS = ("bim", "batching", "paged")


def session_of(graphs: Graphs, made: Tiny, kind: str, *sets: str, parts: int = 4) -> Session:
    return graphs.session(
        "bim_plain",
        drafting(made, kind),
        made.book(stop_ids=()),
        outline=outline_of(parts),
        budget=14,
        sets=(f"drafter.kind={kind}", *sets),
    )


def rounds_of(
    session: Session,
) -> tuple[EngineCore, list[tuple[Any, RoundSummary]], dict[str, Any]]:
    """A run over two questions, its batches with what came of them, and its metrics."""
    recorder = Recorder(str, None)
    run = start(session, ["hello", "a second question"])
    run.sink, found = recorder, list[tuple[Any, RoundSummary]]()
    recorder.attach(run)

    def look(event: Any) -> None:
        if "batch" in run.board and run.board["batch"] is not None:
            batches.append(run.board["batch"])
        if "committed" in getattr(event, "results", {}):
            found.append((batches[-1], run.summary))

    batches: list[Any] = []
    recorder.listeners.append(look)
    drive(run)
    return run, found, figures(recorder.meter, run.board)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_only_drafts_have_rows(policy: str, layout: str, tiny: Make, graphs: Graphs) -> None:
    """The drafter stops with the longest chain, the target verifies roots and drafts alone."""
    made = tiny("llama")
    costs = CHOOSING["vanilla"][-1:] if policy == "cost" else ()
    sets = (f"drafter.gamma_policy={policy}", "drafter.gamma_max=5", f"layout.kind={layout}")
    run, rounds, found = rounds_of(session_of(graphs, made, "vanilla", *sets, *costs))
    book = made.book(stop_ids=())
    check_lossless(run, book, made.reference, plain=False)
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
@pytest.mark.parametrize("number", range(2))
def test_trees_of_ngrams_have_the_rows_of_what_was_found(
    number: int, layout: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    sets = (*SETTINGS["ngram"][number], f"layout.kind={layout}")
    _, rounds, found = rounds_of(session_of(graphs, made, "ngram", *sets))
    drafts = [[len(tree.tokens) - 1 for tree in one.trees] for _, one in rounds]
    there = [[sum(t >= 0 for t in tree.tokens) - 1 for tree in one.trees] for _, one in rounds]
    assert drafts != there, "some trees were smaller than the others"
    assert found["padding_waste"] == found["target_rows_empty"] / found["target_rows"]
    assert (found["target_rows_empty"] == 0) is (layout == "bim")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CHOOSING)
def test_what_is_chosen_is_what_is_drafted(
    kind: str, layout: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    sets = (*CHOOSING[kind], f"layout.kind={layout}")
    run, rounds, found = rounds_of(session_of(graphs, made, kind, *sets))
    check_lossless(run, made.book(stop_ids=()), made.reference, plain=False)
    sizes = {}
    for _, one in rounds:
        if not one.trees:
            continue
        (choice,) = one.choices
        sizes[choice.size] = sizes.get(choice.size, 0) + 1
        drafted = [sum(token >= 0 for token in tree.tokens) - 1 for tree in one.trees]
        assert max(drafted) == choice.size or (kind == "ngram" and max(drafted) <= choice.size)
        assert choice.tokens >= len(one.trees) and choice.ms > 0
    assert found["chosen_sizes"] == {str(size): n for size, n in sorted(sizes.items())}
    assert len(sizes) > 1


def test_a_slow_target_is_offered_more(tiny: Make, graphs: Graphs) -> None:
    """The same text, at other costs."""
    made, drafted = tiny("llama"), []
    for target in ("{1: 100.0, 64: 101.0}", "{1: 1.0, 64: 60.0}"):
        costs = f"drafter.costs={{target: {target}, drafter: {{1: 0.1}}}}"
        sets = ("drafter.num_draft_tokens=auto", "drafter.draft_depth=4", "drafter.top_k=3", costs)
        run, rounds, _ = rounds_of(session_of(graphs, made, "eagle3", *sets))
        check_lossless(run, made.book(stop_ids=()), made.reference, plain=False)
        drafted.append(sum(one.drafted for _, one in rounds) / len(rounds))
    assert drafted[0] > 2 * drafted[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ("eagle3", "dflash", "vanilla"))
def test_a_drafter_that_costs_more_than_it_saves_is_left_alone_but_for_a_look(
    kind: str, layout: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    dear = "drafter.costs={target: {1: 1.0}, drafter: {1: 90.0}}"
    sets = (*CHOOSING[kind][:-1], dear, f"layout.kind={layout}")
    run, rounds, _ = rounds_of(session_of(graphs, made, kind, *sets))
    check_lossless(run, made.book(stop_ids=()), made.reference, plain=False)
    sizes = [one.choices[0].size for _, one in rounds if one.trees]
    drafted = [one.drafted for _, one in rounds if one.trees]
    assert sizes[0] and [size > 0 for size in sizes] == [count > 0 for count in drafted]
    assert 2 <= sum(size > 0 for size in sizes) < len(sizes) / 3


@pytest.mark.parametrize("kind", CHOOSING)
def test_costs_that_are_not_given_are_measured(kind: str, tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama")
    session = session_of(graphs, made, kind, *CHOOSING[kind][:-1])
    run, _, _ = rounds_of(session)
    check_lossless(run, made.book(stop_ids=()), made.reference, plain=False)
    (costs, _) = session.costs
    assert costs is not None and len(costs.target.rows) >= 2 and min(costs.target.ms) > 0
    assert bool(costs.drafter.rows) is (kind != "ngram")
    assert session.costs[0] is costs, "once for all runs of a session"


def test_what_a_clock_decides_is_not_drawn(tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama")
    drawn = ("sampling.temperature=0.8", "sampling.accept=rejection", "drafter.draws=sampled")
    with pytest.raises(GraphError, match="so that runs can be repeated"):
        session_of(graphs, made, "vanilla", *drawn, "drafter.gamma_policy=cost")
    session_of(graphs, made, "vanilla", *drawn, *CHOOSING["vanilla"])


def test_trees_that_are_chosen_are_not_shared_out_as_well(tiny: Make, graphs: Graphs) -> None:
    with pytest.raises(GraphError, match="both set the size of trees"):
        session_of(graphs, tiny("llama"), "ngram", *CHOOSING["ngram"], "drafter.rows_per_round=4")

"""What a round should draft: golden optima, what is learnt, and that choices follow the costs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers.vanilla import best_gamma, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft import sizes as sizes_file
from specsot.ops.draft.sizes import (
    MAX_PAUSE,
    MIN_PAUSE,
    ChainChooser,
    Curve,
    RoundCosts,
    TreeChooser,
)

FREE = Curve((), ())
ROOMY = [99] * 8


def flat(ms: float) -> Curve:
    return Curve((1, 2), (ms, ms))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [0.0]
    monkeypatch.setattr(sizes_file, "perf_counter", lambda: seconds[0])
    return seconds


def taught(chooser: ChainChooser, alpha: float, branches: int = 1, rounds: int = 150) -> None:
    """Independent acceptance: of the drafts of a round so many as geometric draws say."""
    draw = np.random.default_rng(0)
    owners = list(range(branches))
    for _ in range(rounds):
        choice = chooser.choose_(owners, ROOMY[:branches])
        paths = []
        for length in choice.lengths:
            accepted = 0
            while accepted < length and draw.random() < alpha:
                accepted += 1
            paths.append(list(range(accepted + 1)))
        chooser.learn_(owners, paths)


def test_a_curve_is_measured_points_and_lines_between_them() -> None:
    curve = Curve.of({4: 8.0, 1: 2.0, 8: 8.0})
    assert curve.at([1, 2.5, 4, 6, 8, 100]).tolist() == [2.0, 5.0, 8.0, 8.0, 8.0, 8.0]
    assert Curve.of({2: 1.0, 4: 3.0}).at([1, 6]).tolist() == [1.0, 5.0]
    assert Curve.of({4: 2.0}).at([8]).tolist() == [4.0]
    assert FREE.at([1, 9]).tolist() == [0, 0]
    assert Curve.of({1: 4.0, 2: 3.0}).at([1, 9]).tolist() == [3.0, 3.0], (
        "fewer rows never take longer"
    )


@pytest.mark.parametrize("case", cases("cost_model"))
def test_known_acceptance_gives_the_published_length(case: Any) -> None:
    """Leviathan's best length for independent acceptance, a target's forward being 1.

    Theirs is for a forward of the drafter for each draft, as here."""
    alpha, cost = case["alpha"], case["c"]
    chooser = ChainChooser(RoundCosts(flat(1.0), flat(cost), 0.0), 24)
    chooser._hits_D += 1e12 * alpha
    chooser._tries_D += 1e12
    chooser.by_owner[0] = (1e12 * alpha, 1e12)
    chooser.choose_([0], [99])  # the first round drafts in any case, to see
    choice = chooser.choose_([0], [99])
    assert choice.size == min(best_gamma(alpha, cost), 24) == min(case["gamma_star"], 24)


@pytest.mark.parametrize(("alpha", "least", "most"), [(0.95, 6, 12), (0.7, 2, 6), (0.05, 0, 1)])
def test_lengths_follow_what_is_accepted(alpha: float, least: int, most: int) -> None:
    chooser = ChainChooser(RoundCosts(flat(10.0), flat(1.0), 0.0), 12)
    taught(chooser, alpha)
    assert least <= chooser.choose_([0], [99]).size <= most


def pauses(sizes: Sequence[int]) -> list[int]:
    drafted = [at for at, size in enumerate(sizes) if size]
    return [after - before - 1 for before, after in pairwise(drafted)]


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("of_trees", [False, True])
def test_where_a_draft_costs_as_much_as_a_token_it_is_tried_less_and_less_often(
    of_trees: bool, branches: int
) -> None:
    costs = RoundCosts(flat(1.0), flat(1.0), 0.0)
    chooser = TreeChooser(costs, 8, 3, width) if of_trees else ChainChooser(costs, 8)
    owners = list(range(branches))
    sizes = []
    for _ in range(300):
        sizes.append(chooser.choose_(owners, ROOMY[:branches]).size)
        chooser.learn_(owners, [[0]] * branches)
    assert sizes[0], "nothing is known before the first one"
    longer = [times * MIN_PAUSE for times in (1, 2, 4, 8)]
    assert pauses(sizes)[:6] == [*longer, MAX_PAUSE, MAX_PAUSE]


def test_drafts_that_were_not_worth_it_are_tried_again_and_then_kept() -> None:
    chooser = ChainChooser(RoundCosts(flat(10.0), flat(1.0), 0.0), 8)
    taught(chooser, 0.0, rounds=30)
    taught(chooser, 0.95, rounds=2 * MAX_PAUSE)
    assert chooser.choose_([0], [99]).size >= 4


def test_rounds_with_drafts_have_an_overhead_of_their_own(clock: list[float]) -> None:
    """Those without take 2 ms beside their forward, those with drafts 6 ms."""
    chooser = ChainChooser(RoundCosts(flat(3.0), flat(1.0)), 4)
    for _ in range(40):
        choice = chooser.choose_([0], [99])
        chooser.learn_([0], [[0]])
        clock[0] += 1e-3 * (3.0 + choice.size + (6.0 if choice.size else 2.0))
    chooser.choose_([0], [99])
    assert chooser.overhead == pytest.approx(2.0)
    assert chooser.overhead_drafted == pytest.approx(6.0)


def test_more_branches_get_shorter_chains_where_rows_cost() -> None:
    """Rows are free up to sixteen, and cost as much as a whole forward from there on."""
    target = Curve.of({1: 10.0, 16: 10.0, 32: 20.0})
    found = []
    for branches in (1, 4, 8):
        chooser = ChainChooser(RoundCosts(target, flat(0.5), 0.0), 12)
        taught(chooser, 0.8, branches)
        found.append(chooser.choose_(list(range(branches)), ROOMY[:branches]).size)
    assert found == sorted(found, reverse=True) and found[0] > found[-1]


def test_a_branch_whose_drafts_fail_gets_fewer() -> None:
    target = Curve.of({1: 10.0, 64: 70.0})
    chooser = ChainChooser(RoundCosts(target, flat(0.2), 0.0), 8)
    for _ in range(60):
        good, bad = chooser.choose_([1, 2], [99, 99]).lengths
        chooser.learn_([1, 2], [list(range(good + 1)), [0]])
    good, bad = chooser.choose_([1, 2], [99, 99]).lengths
    assert good > bad
    assert set(chooser.by_owner) == {1, 2}


def test_a_chain_is_never_longer_than_its_answer() -> None:
    chooser = ChainChooser(RoundCosts(flat(10.0), flat(0.1), 0.0), 8)
    taught(chooser, 0.95)
    assert chooser.choose_([0, 1], [3, 0]).lengths == (3, 0)


def test_every_level_of_a_tree_has_its_share_of_what_rounds_cost_beside_forwards() -> None:
    costs = RoundCosts(flat(10.0), flat(0.5), 3.0)
    tree = TreeChooser(costs, 8, 4, lambda nodes, levels: (1,) * levels)
    choice = tree.choose_([0], [99])
    assert choice.ms == pytest.approx(10.0 + 0.5 * choice.levels + 1.5 * (1 + choice.levels))
    chain = ChainChooser(costs, 8).choose_([0], [99])
    assert chain.ms == pytest.approx(10.0 + 0.5 * chain.size + 3.0)


def test_what_is_read_once_is_no_overhead(clock: list[float]) -> None:
    """The first round's drafter reads a prompt of 40 rows, which takes 20 ms."""
    costs = RoundCosts(flat(3.0), Curve.of({1: 1.0, 2: 1.0, 40: 20.0}))
    chooser = ChainChooser(costs, 4)
    for unread in (40, 2, 2, 2):
        choice = chooser.choose_([0], [99], unread)
        chooser.learn_([0], [list(range(choice.size + 1))])
        clock[0] += 1e-3 * (3.0 + choice.size + (19.0 if unread > 2 else 0.0) + 0.5)
    assert choice.size > 1 and chooser.overhead_drafted == pytest.approx(0.5)


# -- trees -----------------------------------------------------------------------------------------


def grown(chooser: TreeChooser, ranks: Sequence[float], rounds: int = 200) -> int:
    draw, sizes = np.random.default_rng(1), []
    for _ in range(rounds):
        choice = chooser.choose_([0], [99])
        hit = draw.random()
        total, path = 0.0, [0]
        for rank, share in enumerate(ranks, 1):
            total += share
            if hit < total:
                path = [0, rank] if rank <= choice.size else [0]
                break
        chooser.learn_([0], [path])
        sizes.append(choice.size)
    return int(np.median(sizes[-50:]))


def width(nodes: int, levels: int) -> Sequence[int]:
    return (2, *[4] * (levels - 1))


def test_trees_grow_as_long_as_nodes_are_worth_their_rows() -> None:
    for most_ms, ranks, fits in (
        (10.5, [0.1] * 8, range(8, 33)),
        (200.0, [0.1] * 8, range(2)),
        (40.0, [0.99], range(1, 2)),  # a first node that is always right needs no others
    ):
        costs = RoundCosts(Curve.of({1: 10.0, 64: most_ms}), flat(0.01), 0.0)
        assert grown(TreeChooser(costs, 32, 1, width), ranks) in fits


def test_levels_are_given_up_where_the_drafter_is_slow() -> None:
    for ms, deep in ((0.01, True), (20.0, False)):
        costs = RoundCosts(Curve.of({1: 10.0, 64: 11.0}), flat(ms), 0.0)
        chooser = TreeChooser(costs, 16, 5, width)
        for _ in range(100):
            choice = chooser.choose_([0], [99])
            chooser.learn_([0], [[0, *range(1, 1 + min(choice.levels, 4))]])
        levels = chooser.choose_([0], [99]).levels
        assert (levels >= 4) is deep, levels


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 6)), max_size=20),
)
def test_a_tree_is_within_its_bounds(
    nodes: int, levels: int, rounds: list[tuple[int, int]]
) -> None:
    chooser = TreeChooser(RoundCosts(flat(1.0), flat(0.1), 0.0), nodes, levels, width)
    for branches, taken in rounds:
        choice = chooser.choose_(list(range(branches)), ROOMY[:branches])
        assert min(choice.size, 1) <= choice.levels <= min(levels, choice.size)
        assert choice.size <= nodes
        depth = min(taken, choice.levels)
        chooser.learn_(list(range(branches)), [list(range(depth + 1))] * branches)

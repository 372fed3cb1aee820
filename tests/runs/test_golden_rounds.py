"""Golden tables of whole decodings, through the engine: what is fed and kept, how much is drafted.

Target and drafter run for real on real rows; only their logits are scripted, so that a round
accepts exactly as many drafts as the table's round does.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from helpers.scripted import (
    VOCAB,
    begin,
    branch_of,
    drafter_of,
    other,
    ranked,
    says_text,
    states_of,
    text,
    with_entropy,
)
from helpers.support import Graphs, Tiny
from helpers.vectors import cases, vectors
from torch import Tensor

from specsot.states.request import Finish
from specsot.states.round import RoundSummary


def rejected(length: int, accepted: Sequence[int], gammas: Sequence[int]) -> set[int]:
    """Positions at which the drafter is wrong, so that each round accepts what it should."""
    places = set()
    for count, gamma in zip(accepted, gammas, strict=True):
        if count < gamma:
            places.add(length + count)
        length += count + 1
    return places


# --- which rows are fed and kept -----------------------------------------------------------------


@pytest.mark.parametrize("case", [one for one in cases("cache") if one["first_target"]])
def test_both_pools_hold_what_the_table_says(
    tiny: Callable[..., Tiny], graphs: Graphs, case: Any
) -> None:
    """Our rows in the words of the table.

    Target: the same rows. Drafter: the table keeps the rows of accepted drafts, so that a round
    first feeds one token (two after a round that accepted everything). Here drafts are always
    thrown away, and a round first feeds all that was committed since the last one, up to the
    root token: it ends where the table's first feed ends, and begins where our last one ended.
    So while a round drafts, and after it, the drafter holds as many rows as the round began with
    tokens, in rounds without a draft, too. The drafts' own feeds are those of the table. A run
    always draws its first token from the prompt, so the other tables do not happen.
    """
    first, *rounds = case["rounds"]
    prompt = [text(place) for place in range(case["prompt_len"])]
    accepted = [one["accepted"] for one in rounds]
    wrong = rejected(first["length"], accepted, [one["gamma"] for one in rounds])
    run = begin(
        graphs,
        tiny(),
        prompt,
        case["max_new_tokens"],
        f"drafter.gamma={case['gamma']}",
        target=says_text,
        drafter=drafter_of(wrong),
    )
    target, drafter = run.board["target"], run.board["drafter"].model
    pools, length, read = (run.board["kv"], run.board["kv_draft"]), first["length"], 0
    table = iter(rounds)
    for state in states_of(run):
        if state == "prefill":
            assert target.feeds == [list(range(*first["target_feed"]))]
            assert pools[0].current_length == first["target_cache"]
            assert pools[1].current_length == first["draft_cache"]
        elif state == "verify":
            one = next(table)
            caught_up, *fed = drafter.feeds
            assert caught_up == list(range(read, length))
            feeds = one["draft_feeds"]
            assert [[at, at + 1] for (at,) in fed] == feeds[1:]
            assert all(feed[1] == caught_up[-1] + 1 for feed in feeds[:1])
            start, end = one["target_feed"]
            assert target.feeds == [list(range(start, end))], "of a shorter chain no row more"
            summary: RoundSummary = run.board["committed"]
            assert (summary.drafted, summary.accepted) == (one["gamma"], (one["accepted"],))
            read, length = length, one["length"]
            done = branch_of(run).finish is not None
            kept = (0, 0) if done else (one["target_cache"], read)
            assert (pools[0].needed_length, pools[1].needed_length) == kept
        target.feeds.clear()
        if state in ("prefill", "verify"):
            drafter.feeds.clear()
    assert next(table, None) is None
    wanted = [text(place) for place in range(case["prompt_len"], length)]
    assert branch_of(run).tokens == wanted and branch_of(run).finish is Finish.LENGTH


# --- how much is drafted -------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("heuristic_gamma"))
def test_lengths_follow_the_heuristic_schedule(
    tiny: Callable[..., Tiny], graphs: Graphs, case: Any
) -> None:
    rows = case["rows"]
    gammas, accepted = [row["gamma"] for row in rows], [row["matches"] for row in rows]
    budget = sum(accepted) + len(rows) + 40
    wrong = rejected(6, accepted, gammas)
    run = begin(
        graphs,
        tiny(),
        [text(place) for place in range(5)],
        budget,
        "drafter.gamma_policy=heuristic",
        f"drafter.gamma={case['start']}",
        f"drafter.gamma_max={max(*gammas, *(row['next'] for row in rows))}",
        target=says_text,
        drafter=drafter_of(wrong),
    )
    table = iter(rows)
    for state in states_of(run):
        if state == "verify" and (row := next(table, None)):
            summary, lengths = run.board["committed"], run.board["branches"].drafter.lengths
            memory = lengths[branch_of(run).owner]
            assert (summary.drafted, summary.accepted) == (row["gamma"], (row["matches"],))
            assert memory is not None and memory.gamma == row["next"]
    assert next(table, None) is None


@pytest.mark.parametrize("case", vectors("egag")["schedules"])
def test_lengths_follow_the_entropy_of_the_first_draft(
    tiny: Callable[..., Tiny], graphs: Graphs, case: Any
) -> None:
    """The table gives what is left before each round, and so what the one before emitted.

    A length follows the law where the round before ended, so there is one in front of the table's.
    """
    rows = case["rounds"]
    left = [row["remaining"] for row in rows]
    accepted = [before - after - 1 for before, after in pairwise(left)]
    prompt = [text(place) for place in range(4)]
    roots = [len(prompt) + 1 + left[0] - one for one in left]
    drafted = [row["gamma_eff"] for row in rows[:-1]]
    all_right = [a == g and g > 0 for a, g in zip(accepted, drafted, strict=True)]
    ends = [root - 1 - right for root, right in zip(roots, [False, *all_right], strict=True)]
    entropies = dict(zip(ends, (row["h_norm"] for row in rows), strict=True))
    wrong = {len(prompt) + 1, *rejected(roots[0] + 1, accepted, drafted)}

    def drafter(position: int) -> Tensor:
        place = position + 1
        token = other(place) if place in wrong else text(place)
        return with_entropy(token, VOCAB, entropies.get(position, 0.1))

    run = begin(
        graphs,
        tiny(),
        prompt,
        left[0] + 2,
        "drafter.gamma_policy=egag",
        f"drafter.gamma_min={case['gamma_min']}",
        f"drafter.gamma_max={case['gamma_max']}",
        f"drafter.egag_mode={case['mode']}",
        f"drafter.egag_ema_beta={case['beta']}",
        "drafter.egag_h_ref=1.0",  # so the table's normalised entropy is one in nats
        target=says_text,
        drafter=drafter,
    )
    table, states = iter(rows), states_of(run)
    next(state for state in states if state == "verify")
    for state in states:
        if state == "verify" and (row := next(table, None)):
            summary: RoundSummary = run.board["committed"]
            (record,) = summary.gamma
            assert record.h_norm == pytest.approx(row["h_norm"], abs=1e-9)
            assert record.raw == pytest.approx(row["raw"], abs=1e-8)
            assert record.ema == pytest.approx(row["ema"], abs=1e-8)
            assert (record.gamma, record.gamma_eff) == (row["gamma"], row["gamma_eff"])
            assert summary.drafted == row["gamma_eff"]
    assert next(table, None) is None


# --- where it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("stop"))
def test_a_run_ends_where_the_vectors_say(
    tiny: Callable[..., Tiny], graphs: Graphs, case: Any
) -> None:
    """One round that would say the case's tokens: all but the last are drafted and right."""
    root, emitted = text(3), case["emitted"]

    def target(position: int) -> Tensor:
        place = position - 3
        return ranked(
            [root if place < 0 else emitted[place] if place < len(emitted) else 99], VOCAB
        )

    run = begin(
        graphs,
        tiny(),
        [text(place) for place in range(3)],
        case["remaining"] + 1,
        f"drafter.gamma={max(len(emitted) - 1, 0)}",
        stop_ids=case["stop"],
        target=target,
        drafter=target,
    )
    assert "verify" in states_of(run)
    kept = case["kept"][:-1] if case["reason"] == "stop" else case["kept"]
    branch = branch_of(run)
    assert branch.tokens == [root, *kept]
    assert (branch.finish.value if branch.finish else None) == case["reason"]
    assert (branch.finish is not None) == case["finished"]

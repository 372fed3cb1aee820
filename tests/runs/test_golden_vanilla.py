"""Golden tables of whole decodings: what is fed and cached, and how much is drafted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, log
from typing import Any

import pytest
import torch
from helpers.support import FixedBook, Graphs, Make, Tiny, check_rows, start
from helpers.vanilla import cases, vectors
from scipy.optimize import brentq
from torch import Tensor

from specsot.engine.run.core import EngineCore
from specsot.states.request import Branch, Finish
from specsot.states.round import RoundSummary

VOCAB = 130
MOST = 400  # transitions of a run
Says = Callable[[int], Tensor]
HAIR = 1e-10


@dataclass
class Scripted:
    """A decoder whose logits are `says(position of the row)`: float64 [V], for the next token.

    feeds: for each forward, the positions of its rows, in order; padding is left out."""

    model: Any
    says: Says
    feeds: list[list[int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, tokens_BQ: Tensor, positions_BQ: Tensor, *others: Any, **named: Any) -> Any:
        out = self.model.forward(tokens_BQ, positions_BQ, *others, **named)
        positions = positions_BQ.flatten().tolist()
        self.feeds.append(positions)
        said = [self.says(positions[row]) for row in named["logit_rows_R"].tolist()]
        return out._replace(logits_RV=torch.stack(said)) if said else out


def ranked(token: int) -> Tensor:
    logits_V = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
    logits_V[token] = 0.0
    return logits_V


def with_entropy(token: int, nats: float) -> Tensor:
    """Logits whose best token is this one, of a law with this entropy, or a hair less.

    Less rather than more: lengths are rounded down, and half a token up."""
    if nats == 0:
        return ranked(token)
    logits_V = torch.zeros(VOCAB, dtype=torch.float64)
    logits_V[token] = brentq(lambda lead: _entropy(lead) - (nats - HAIR), 0, 60, xtol=1e-14)
    return logits_V


def _entropy(lead: float) -> float:
    """Of the law whose best token leads all others by this much."""
    best = 1 - (VOCAB - 1) / (exp(lead) + VOCAB - 1)
    return -best * log(best) + (1 - best) * log(exp(lead) + VOCAB - 1)


def text(position: int) -> int:
    return 5 + position * 7 % 100


def begin(
    graphs: Graphs, made: Tiny, length: int, budget: int, *sets: str, drafter: Says
) -> EngineCore:
    """A run of one request, a prompt of this length: the target goes on with the text, and
    `drafter` says what the drafter does after each position."""
    real = made.models.target
    scripts = {"target": lambda at: ranked(text(at + 1)), "drafter": drafter}
    models = replace(made.models, **{n: Scripted(real, says) for n, says in scripts.items()})
    book = FixedBook({"q": [text(place) for place in range(length)]})
    return start(graphs.session("speculative", models, book, budget=budget, sets=sets), ["q"])


def drafter_of(
    wrong: set[int], entropies: dict[int, float] | None = None, others: float = 0.0
) -> Says:
    """Right but at some places; entropies: of its laws by position, `others` elsewhere."""

    def says(position: int) -> Tensor:
        place = position + 1
        nats = (entropies or {}).get(position, others)
        return with_entropy(text(place) + (place in wrong), nats)

    return says


def states_of(run: EngineCore) -> Iterator[str]:
    """The states that are entered, one after another; pools and book agree after each.

    The first `schedule` is left out."""
    run.advance()
    for _ in range(MOST):
        run.advance()
        check_rows(run)
        yield run.state
        if run.finished:
            return
    raise AssertionError("the run does not come to an end")


def branch_of(run: EngineCore) -> Branch:
    branch: Branch = run.requests[0].branches[0]
    return branch


def rejected(length: int, accepted: Sequence[int], gammas: Sequence[int]) -> set[int]:
    places = set()
    for count, gamma in zip(accepted, gammas, strict=True):
        if count < gamma:
            places.add(length + count)
        length += count + 1
    return places


# --- which rows are fed and kept -----------------------------------------------------------------


@pytest.mark.parametrize("case", [one for one in cases("cache") if one["first_target"]])
def test_both_pools_hold_what_the_table_says(tiny: Make, graphs: Graphs, case: Any) -> None:
    """Our rows in the words of the table.

    Target: the same rows. Drafter: the table keeps the rows of accepted drafts, so that a round
    first feeds one token (two after a round that accepted everything). Here drafts are always
    thrown away, and a round first feeds all that was committed since the last one, up to the
    root token: it ends where the table's first feed ends, and begins where our last one ended.
    So while a round drafts, and after it, the drafter holds as many rows as the round began with
    tokens, in rounds without a draft, too. The drafts' own feeds are those of the table. A run
    always draws its first token from the prompt, so the other tables do not happen."""
    first, *rounds = case["rounds"]
    accepted = [one["accepted"] for one in rounds]
    wrong = rejected(first["length"], accepted, [one["gamma"] for one in rounds])
    run = begin(
        graphs,
        tiny(),
        case["prompt_len"],
        case["max_new_tokens"],
        f"drafter.gamma={case['gamma']}",
        drafter=drafter_of(wrong),
    )
    target, drafter = run.board["target"], run.board["drafter"].model
    pools, length, read = (run.manager.kv, run.manager.kv_draft), first["length"], 0
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
def test_lengths_follow_the_heuristic_schedule(tiny: Make, graphs: Graphs, case: Any) -> None:
    rows = case["rows"]
    gammas, accepted = [row["gamma"] for row in rows], [row["matches"] for row in rows]
    budget = sum(accepted) + len(rows) + 40
    wrong = rejected(6, accepted, gammas)
    run = begin(
        graphs,
        tiny(),
        5,
        budget,
        "drafter.kind=adaptive",
        "drafter.gamma_policy=heuristic",
        f"drafter.gamma={case['start']}",
        f"drafter.gamma_max={max(*gammas, *(row['next'] for row in rows))}",
        drafter=drafter_of(wrong),
    )
    table = iter(rows)
    for state in states_of(run):
        if state == "verify" and (row := next(table, None)):
            summary, lengths = run.board["committed"], run.manager.drafter.lengths
            memory = lengths[branch_of(run).owner]
            assert (summary.drafted, summary.accepted) == (row["gamma"], (row["matches"],))
            assert memory is not None and memory.gamma == row["next"]
    assert next(table, None) is None


@pytest.mark.parametrize("case", vectors("egag")["schedules"])
def test_lengths_follow_the_entropy_of_the_first_draft(
    tiny: Make, graphs: Graphs, case: Any
) -> None:
    """The table gives what is left before each round, and so what the one before emitted.

    A length follows the law where the round before ended, so there is one in front of the table's.
    """
    rows = case["rounds"]
    left = [row["remaining"] for row in rows]
    accepted = [before - after - 1 for before, after in pairwise(left)]
    roots = [5 + left[0] - one for one in left]
    drafted = [row["gamma_eff"] for row in rows[:-1]]
    all_right = [a == g and g > 0 for a, g in zip(accepted, drafted, strict=True)]
    ends = [root - 1 - right for root, right in zip(roots, [False, *all_right], strict=True)]
    entropies = dict(zip(ends, (row["h_norm"] for row in rows), strict=True))
    run = begin(
        graphs,
        tiny(),
        4,
        left[0] + 2,
        "drafter.gamma_policy=egag",
        f"drafter.gamma_min={case['gamma_min']}",
        f"drafter.gamma_max={case['gamma_max']}",
        f"drafter.egag_mode={case['mode']}",
        f"drafter.egag_ema_beta={case['beta']}",
        "drafter.egag_h_ref=1.0",  # so the table's normalised entropy is one in nats
        drafter=drafter_of({5, *rejected(roots[0] + 1, accepted, drafted)}, entropies, 0.1),
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

"""Golden tables of whole decodings: what is fed and cached, how much is drafted, where it ends."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import log
from typing import Any

import pytest
import torch
from helpers.support import FixedBook, Graphs, Make, Tiny, check_rows, start
from helpers.vanilla import cases, vectors
from torch import Tensor

from specsot.engine.run.core import EngineCore
from specsot.ops.types import Proposal
from specsot.states.request import Branch, Finish
from specsot.states.round import RoundSummary

VOCAB = 130
MOST = 400  # transitions of a run
Says = Callable[[int], Tensor]
HAIR = 1e-10


@dataclass
class Scripted:
    """A decoder whose logits are `says(position of the row)`: float64 [V], for the next token.

    feeds: for each forward, the positions of its rows, in order; padding is left out.
    """

    model: Any
    says: Says
    feeds: list[list[int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, tokens_BQ: Tensor, positions_BQ: Tensor, *others: Any) -> Any:
        out = self.model.forward(tokens_BQ, positions_BQ, *others)
        positions = positions_BQ.flatten().tolist()
        self.feeds.append(positions)
        logit_rows = others[4]
        said = [self.says(positions[row]) for row in logit_rows.tolist()]
        return out._replace(logits_RV=torch.stack(said)) if said else out


def ranked(tokens: Sequence[int], size: int) -> Tensor:
    logits_V = torch.full((size,), -torch.inf, dtype=torch.float64)
    for place, token in enumerate(tokens):
        logits_V[token] = -float(place)
    return logits_V


def with_entropy(token: int, size: int, nats: float) -> Tensor:
    """Logits whose best token is this one, of a law with so many nats of entropy, or a hair less.

    Less rather than more: lengths are rounded down, and half a token up.
    """
    if nats == 0:
        return ranked([token], size)
    low, high = 0.0, 60.0  # of the best token over all others
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _entropy(middle, size) > nats - HAIR else (low, middle)
    logits_V = torch.zeros(size, dtype=torch.float64)
    logits_V[token] = high
    return logits_V


def _entropy(lead: float, size: int) -> float:
    total = torch.tensor(lead, dtype=torch.float64).exp().item() + size - 1
    best = 1 - (size - 1) / total
    return -best * log(best) + (1 - best) * log(total)


def text(position: int) -> int:
    return 5 + position * 7 % 100


def other(position: int) -> int:
    return text(position) + 1


def begin(
    graphs: Graphs,
    made: Tiny,
    prompt: Sequence[int],
    budget: int,
    *sets: str,
    stop_ids: Sequence[int] = (),
    **models: Says,
) -> EngineCore:
    """A run of one request; `target` and `drafter` are what they say after each position."""
    real = made.models.target
    scripts = {name: Scripted(real, says) for name, says in models.items()}
    graph = "speculative" if "drafter" in models else "ngram"
    book = FixedBook({"q": prompt}, stop_ids=stop_ids)
    scripted = replace(made.models, **scripts)
    session = graphs.session(graph, scripted, book, budget=budget, sets=sets)
    return start(session, ["q"])


def says_text(position: int) -> Tensor:
    return ranked([text(position + 1)], VOCAB)


def drafter_of(wrong: set[int]) -> Says:
    def says(position: int) -> Tensor:
        place = position + 1
        return ranked([other(place) if place in wrong else text(place)], VOCAB)

    return says


def states_of(run: EngineCore) -> Iterator[str]:
    """The states that are entered, one after another; pools and book agree after each.

    The first `schedule` is left out: nobody has begun there.
    """
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
def test_a_run_ends_where_the_vectors_say(tiny: Make, graphs: Graphs, case: Any) -> None:
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


def draft_of(run: EngineCore) -> list[int]:
    proposal: Proposal = run.board["proposal"]
    (tokens,), (valid,) = proposal.tokens_SN.tolist(), proposal.valid_SN.tolist()
    assert proposal.parents_SN[0].tolist()[: sum(valid)] == list(range(-1, sum(valid) - 1))
    return [token for token, real in zip(tokens, valid, strict=True) if real]


LOOKED_UP = [
    one
    for one in cases("prompt_lookup")
    if one["ids"][-1] not in one["eos"]  # such a root token ends the answer at once
    and one["max_length"] > len(one["ids"]) + 1  # here the target's own token is cut, not drafts
]


@pytest.mark.parametrize("case", LOOKED_UP)
def test_prompt_lookup_drafts_what_transformers_drafts(
    tiny: Make, graphs: Graphs, case: Any
) -> None:
    """The context is a prompt and the root token that the target says behind it."""
    *prompt, root = case["ids"]
    run = begin(
        graphs,
        tiny(),
        prompt,
        case["max_length"] - len(prompt),
        "drafter.kind=ngram",
        "drafter.method=lookup",
        "drafter.width=1",
        f"drafter.longest={case['max_ngram']}",
        f"drafter.num_draft_tokens={case['num_output_tokens']}",
        f"drafter.draft_depth={case['num_output_tokens']}",
        stop_ids=case["eos"],
        target=lambda position: ranked([root], VOCAB),
    )
    assert "grow_tree" in states_of(run)  # and no further
    assert draft_of(run) == case["draft"]


COUNTED = [one for one in cases("nasd") if one["min_context"] == 1 and not one["one_level"]]


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: f"order-{case['n']}")
def test_count_tables_learn_and_draft_as_the_trace_says(
    tiny: Make, graphs: Graphs, case: Any
) -> None:
    """Each step of the trace is a token that the target says, with its three best as fillers.

    Our tables always hold contexts from one token on; the trace's drafts within a round (of a
    context whose last token was accepted) are never asked for.
    """
    trace = case["trace"]
    (first,) = (op["seq"] for op in trace if op["op"] == "initialize")
    fillers = [op["tokens"] for op in trace if op["op"] == "update"][1::2]
    drafts = {tuple(op["seq"]): op["draft"] for op in trace if op["op"] == "draft"}
    end = len(first) + len(fillers)

    def target(position: int) -> Tensor:
        place = position + 1 - len(first)
        if place < 0:
            return ranked([first[-1]], VOCAB)
        return ranked(fillers[place] if place < len(fillers) else [99], VOCAB)

    most = max(map(len, drafts.values()))
    run = begin(
        graphs,
        tiny(),
        first[:-1],
        len(fillers) + 20,
        "drafter.kind=ngram",
        "drafter.method=nasd",
        "drafter.width=1",
        "drafter.filler_top_k=3",
        f"drafter.longest={case['n'] - 1}",
        f"drafter.num_draft_tokens={most}",
        f"drafter.draft_depth={most}",
        target=target,
    )
    seen = 0
    for state in states_of(run):
        if state != "grow_tree":
            continue
        context = [*first[:-1], *branch_of(run).tokens]
        if (wanted := drafts.get(tuple(context))) is not None:
            seen += 1
            assert draft_of(run)[: len(wanted)] == wanted
        if len(context) >= end:
            break
    assert seen > len(drafts) // 2
    assert counts(run) == case["final"]


def counts(run: EngineCore) -> list[Any]:
    """The tables as the trace shows them, without the token that ended the run."""
    table = run.manager.drafter.tables.tables["0",]
    found = []
    for key, one in sorted(table.followers.items()):
        real = sorted([token, count] for token, count in one.counts.items() if token != 99)
        if real and 99 not in key:
            found.append([list(key), real, one.ranked[0]])
    return found

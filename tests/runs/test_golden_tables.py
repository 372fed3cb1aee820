"""Golden drafts that need no model, through the engine: prompt lookup and count tables."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.scripted import VOCAB, begin, branch_of, ranked, states_of
from helpers.support import Graphs, Tiny
from helpers.vectors import cases
from torch import Tensor

from specsot.ops.types import Proposal
from specsot.states.machine import Run


def draft_of(run: Run) -> list[int]:
    """The chain that is offered to the only branch."""
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
    tiny: Callable[..., Tiny], graphs: Graphs, case: Any
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
    tiny: Callable[..., Tiny], graphs: Graphs, case: Any
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


def counts(run: Run) -> list[Any]:
    """The tables as the trace shows them, without the token that ended the run."""
    table = run.board["branches"].drafter.tables.requests["0"]
    found = []
    for key, one in sorted(table.followers.items()):
        real = sorted([token, count] for token, count in one.counts.items() if token != 99)
        if real and 99 not in key:
            found.append([list(key), real, one.ranked[0]])
    return found

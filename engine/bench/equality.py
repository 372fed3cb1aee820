"""Which graphs promise the same tokens, and whether they gave them.

Two branches are compared where both were decoded behind the same token ids. A branch whose context
already differs follows from a difference that is counted where it first occurs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any

from ...states.request import Branch, Finish
from ..run.scoring import contexts, next_scores
from .sides import ComparedPrompt, Side

TIE = 1e-4  # logits nearer than this may come out in either order in float32
EXACT = ("float32", "float64")  # what the promise holds for
END = -1  # instead of a token: the answer stopped here
CUT = -2  # the answer is not longer
SHOWN = 24  # tokens before a difference that are shown with it


class BranchAnswer(StrEnum):
    EQUAL = "equal"
    TIE = "tie"
    DIFFERENT = "different"
    FOLLOWS = "follows"  # its context differs because of a difference elsewhere
    UNFINISHED = "unfinished"  # refused or stopped on one side


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers first differ.

    position: number of tokens before it in the branch's answer; before: text that ends there.
    reference, other: token ids, END or CUT. margin: of their scores (`scoring.next_scores`) by the
    target alone; None where one side has no token.
    """

    position: int
    before: str
    reference: int
    other: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class GraphPair:
    """why_not: why the answers of the two are not compared; empty if they are."""

    reference: Side
    other: Side
    why_not: str = ""

    @property
    def promised(self) -> bool:
        """Whether a difference is a failure."""
        return not self.why_not and self.other.job.options.dtype in EXACT


@dataclass(frozen=True, slots=True)
class BranchComparison:
    """One branch of one prompt, on two sides. tokens: of the reference's answer."""

    pair: GraphPair
    prompt: ComparedPrompt
    branch: str
    result: BranchAnswer
    tokens: int
    difference: Difference | None


def pairs_of(sides: Sequence[Side]) -> list[GraphPair]:
    """Every graph with the first one that promises the same; and these first ones, not compared."""
    firsts: list[Side] = []
    pairs: list[GraphPair] = []
    for side in sides:
        candidates = [GraphPair(first, side, _reason(first, side)) for first in firsts]
        same = [pair for pair in candidates if not pair.why_not]
        pairs += same[:1] or candidates
        firsts += [] if same else [side]
    return pairs


def _reason(first: Side, second: Side) -> str:
    """Why two graphs need not give the same tokens; empty if they must."""
    sides = (first, second)
    samplings = [side.job.program.graph.sampling for side in sides]
    without = [side.letter for side in sides if side.job.program.graph.skeleton is None]
    if len(without) == 1:
        return f"{without[0]} has no skeleton: its answers stand behind another context"
    drawn = any(sampling.temperature for sampling in samplings)
    if drawn and any(side.peer is not None for side in sides):
        return "transformers draws with coins of its own"
    if not all(sampling.exact for sampling in samplings):
        return "accept: rejection keeps the distribution, not the tokens"
    facts, others = map(_facts, sides)
    unlike = [key for key in facts if facts[key] != others[key]]
    return ", ".join(f"{key}: {_short(facts[key])} and {_short(others[key])}" for key in unlike)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _facts(side: Side) -> dict[str, Any]:
    """Everything that decides which tokens are the right ones."""
    graph = side.job.program.graph
    codes = side.peer.codes if side.peer is not None else ""
    facts: dict[str, Any] = {
        "model": side.target,
        "dtype": side.job.options.dtype,
        "weights": codes or side.job.options.weights.partition("@")[0],
        "budget": side.session.budget,
        "beam": graph.beam,
        "blend": graph.blend,
    }
    # How drafts are accepted decides on no token: what is compared is exact.
    sampling = graph.sampling.model_dump(exclude={"accept", "rule"})
    facts |= {f"sampling.{key}": value for key, value in sampling.items()}
    if graph.skeleton is not None:
        facts["outline"] = side.job.outline
        facts |= {f"skeleton.{key}": value for key, value in graph.skeleton.model_dump().items()}
    return facts


def compare_branches(pair: GraphPair, prompt: ComparedPrompt) -> list[BranchComparison]:
    """All branches of a prompt, the outline first; none of a pair that is not compared."""
    # By name (`outline`, or the number), with the ids before the answer.
    decoded: list[dict[str, tuple[Branch, list[int]]]] = []
    complete = True
    for side in (pair.reference, pair.other) if not pair.why_not else ():
        request = prompt.runs[side.letter].request
        complete = complete and all(map(_finished, request.all_branches()))
        branches = contexts(request, side.session.prompts)
        named = {"outline" if b.is_root else str(b.index + 1): (b, ids) for b, ids in branches}
        decoded.append(named)
    results = []
    for name in dict.fromkeys(chain.from_iterable(decoded)):
        reference, other = (branches.get(name) for branches in decoded)
        result = BranchAnswer.EQUAL
        difference = None
        if not all(_finished(one[0]) for one in (reference, other) if one is not None):
            result = BranchAnswer.UNFINISHED
        elif reference is None or other is None or reference[1] != other[1]:
            result = BranchAnswer.FOLLOWS
        elif difference := _first_difference(pair.reference, reference[0], other[0], reference[1]):
            near = difference.margin is not None and difference.margin < TIE
            result = BranchAnswer.TIE if near else BranchAnswer.DIFFERENT
        tokens = len(reference[0].tokens) if reference is not None else 0
        one = BranchComparison(pair, prompt, name, result, tokens=tokens, difference=difference)
        results.append(one)
    if any(result.difference for result in results):
        return results
    # Nothing to follow from: contexts differ that must not, unless one side was not finished.
    fault = BranchAnswer.DIFFERENT if complete else BranchAnswer.UNFINISHED
    follows = BranchAnswer.FOLLOWS
    return [replace(r, result=fault) if r.result is follows else r for r in results]


def _finished(branch: Branch) -> bool:
    return branch.finish in (Finish.STOP, Finish.LENGTH)


def _first_difference(
    side: Side, reference: Branch, other: Branch, context: Sequence[int]
) -> Difference | None:
    # With how they ended, so that unequal answers differ at some position.
    mine, theirs = (
        [*b.tokens, END if b.finish is Finish.STOP else CUT] for b in (reference, other)
    )
    if mine == theirs:
        return None
    both = enumerate(zip(mine, theirs, strict=False))
    place, tokens = next((place, pair) for place, pair in both if pair[0] != pair[1])
    before = side.session.prompts.decode([*context, *reference.tokens[:place]][-SHOWN:])
    margin = None
    if CUT not in tokens:
        order_V = next_scores(side.session.models, reference, context, place)
        stops = reference.request.stop_ids
        ends = [order_V[[*stops] if token == END else token].max() for token in tokens]
        margin = abs(float(ends[0]) - float(ends[1]))
    return Difference(place, before, *tokens, margin)


def counts(branches: Sequence[BranchComparison]) -> dict[str, int]:
    """Branches by result, and the reference's tokens in those that are equal."""
    number = Counter(branch.result for branch in branches)
    tokens = sum(branch.tokens for branch in branches if branch.result is BranchAnswer.EQUAL)
    by_result = {str(kind): number[kind] for kind in BranchAnswer}
    return {"branches": len(branches), **by_result, "equal_tokens": tokens}

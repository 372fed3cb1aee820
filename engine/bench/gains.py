"""What each graph gains against the first: ratios within prompts, where both saw one machine."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from ..record.metrics import Meter, ratio
from .equal import BranchAnswer
from .report import Comparison
from .sides import Side

PER_TOKEN = "speedup_per_token"
COSTS: Mapping[str, Callable[[Meter], float]] = {  # by the name of the gain; docs/metrics.md
    PER_TOKEN: lambda meter: ratio(meter.seconds, meter.tokens),
    "fewer_rounds": lambda meter: meter.rounds,
    "more_tokens_per_round": lambda meter: ratio(meter.rounds, meter.tokens),
}


@dataclass(frozen=True, slots=True)
class Gain:
    """The first graph's cost / this graph's, over so many prompts: above 1 this one is better."""

    median: float
    lowest: float
    highest: float
    prompts: int


def gains(comparison: Comparison, side: Side) -> dict[str, Gain]:
    """By name; without those that no prompt tells."""
    found: dict[str, Gain] = {}
    for name, cost in COSTS.items():
        pairs = _pairs(comparison, side, cost)
        if ratios := [first / own for first, own in pairs if first and own]:
            found[name] = Gain(median(ratios), min(ratios), max(ratios), len(ratios))
    return found


def _pairs(
    comparison: Comparison, side: Side, cost: Callable[[Meter], float]
) -> Iterator[tuple[float, float]]:
    """The costs of the first graph and of this one, for each prompt that both have answered."""
    for prompt in comparison.prompts:
        runs = [prompt.runs[one.letter] for one in (comparison.sides[0], side)]
        if not any(run.problems for run in runs):
            first, own = (cost(run.cost.meter) for run in runs)
            yield first, own


def best_line(comparison: Comparison) -> str:
    """Which graph takes the least time per token, and how surely; empty if none can be named.

    One that writes other tokens than it must, or leaves an answer unfinished, is not named.
    """
    bad = (BranchAnswer.DIFFERENT, BranchAnswer.UNFINISHED)
    unlike = {one.pair.other.letter for one in comparison.results if one.result in bad}
    rated = [
        (gain.median, side)
        for side in comparison.sides
        if side.letter not in unlike and (gain := gains(comparison, side).get(PER_TOKEN))
    ]
    if len(rated) < 2:
        return ""
    (speed, best), (_, second), *_ = sorted(rated, key=lambda one: -one[0])
    both = [
        [COSTS[PER_TOKEN](prompt.runs[side.letter].cost.meter) for side in (best, second)]
        for prompt in comparison.prompts
    ]
    wins = sum(0 < own < other for own, other in both)
    first = comparison.sides[0].letter
    name = f"{best.letter} {best.name}"
    line = f"best: {name}: {speed:.2f} x {first} in time per token"
    return f"{line}, faster than {second.letter} in {wins} of {len(both)} prompts"

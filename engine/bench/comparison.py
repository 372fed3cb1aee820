"""The result of a comparison: costs and ratios of each side, equality, and the exit code."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ..errors import Code
from ..prepare.environment import redact, threads_of
from ..record.metrics import Meter, ratio
from ..run.runner import STATUS_CODES, Status
from .equality import CUT, END, BranchAnswer, BranchComparison, GraphPair, compare_branches, counts
from .sides import ComparedPrompt, Cost, Side, total

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result, complete or up to an interruption.

    status: OK, INTERRUPTED or TERMINATED; prompts: those that every graph has answered.
    """

    status: Status
    sides: list[Side]
    pairs: list[GraphPair]
    prompts: list[ComparedPrompt]
    results: list[BranchComparison]

    def branches(self, pair: GraphPair) -> list[BranchComparison]:
        """Every branch of every prompt of one pair."""
        return [branch for branch in self.results if branch.pair is pair]

    def of(self, prompt: ComparedPrompt) -> "Comparison":
        """The same of one prompt alone."""
        results = [branch for branch in self.results if branch.prompt is prompt]
        return replace(self, prompts=[prompt], results=results)

    def total(self, side: Side) -> Cost:
        """One graph's cost of all prompts, of which there is one at least."""
        return total([prompt.runs[side.letter].cost for prompt in self.prompts])

    @property
    def differences(self) -> list[BranchComparison]:
        """Every branch that differs by itself, numeric ties included."""
        kinds = (BranchAnswer.DIFFERENT, BranchAnswer.TIE)
        return [branch for branch in self.results if branch.result in kinds]

    @property
    def failures(self) -> int:
        """Branches that differ though equality was promised."""
        different = BranchAnswer.DIFFERENT
        return sum(branch.pair.promised for branch in self.results if branch.result is different)

    @property
    def problems(self) -> list[str]:
        """Answers that are not complete, a line each."""
        runs = [run for prompt in self.prompts for run in prompt.runs.values()]
        return [line for run in runs for line in run.problems]

    @property
    def cpu_share(self) -> float:
        """What a busy loop got of a CPU before each prompt, the median."""
        return median([prompt.cpu_share for prompt in self.prompts] or [1.0])

    @property
    def code(self) -> int:
        """The exit code: a stopped comparison, then a broken promise, then refused answers."""
        if self.status is not Status.OK:
            return STATUS_CODES[self.status]
        return Code.UNEQUAL if self.failures else Code.FAILED if self.problems else Code.OK

    def document(self) -> dict[str, Any]:
        """The one JSON document of `--json`; its keys are documented in docs/cli.md."""
        return {
            "schema_version": SCHEMA,
            "status": str(self.status),
            "exit_code": int(self.code),
            "graphs": {side.letter: graph_facts(side) for side in self.sides},
            "equality": [_pair(self, pair) for pair in self.pairs],
            "prompts": [_prompt(self, prompt) for prompt in self.prompts],
            "total": {s.letter: self.total(s).document() for s in self.sides if self.prompts},
            "problems": self.problems,
            "cpu_share": round(self.cpu_share, 3),
        }


def judge_prompt(prompt: ComparedPrompt, pairs: Sequence[GraphPair]) -> list[BranchComparison]:
    """The answers to one prompt alone."""
    compared = (pair for pair in pairs if not pair.why_not)
    return [branch for pair in compared for branch in compare_branches(pair, prompt)]


def graph_facts(side: Side) -> dict[str, Any]:
    """What a side is, in the words of its options."""
    graph = side.job.program.graph
    options = side.job.options
    return {
        "name": side.title,
        "file": redact(options.graph),
        "sets": list(options.sets),
        "layout": graph.layout.kind,
        "drafter": graph.drafter.kind,
        "model": redact(options.model),
        "drafter_model": redact(options.drafter_model) if graph.drafter.has_model else None,
        "dtype": options.dtype,
        "weights": options.weights,
        "device": options.device,
        "threads": threads_of(side.job),
        "max_new_tokens": side.session.budget,
    }


def _letters(pair: GraphPair) -> dict[str, Any]:
    return {"reference": pair.reference.letter, "graph": pair.other.letter}


def _pair(comparison: Comparison, pair: GraphPair) -> dict[str, Any]:
    if pair.why_not:
        return {**_letters(pair), "compared": False, "reason": pair.why_not}
    number = counts(comparison.branches(pair))
    return {**_letters(pair), "compared": True, "promised": pair.promised, **number}


def _prompt(comparison: Comparison, prompt: ComparedPrompt) -> dict[str, Any]:
    branches = comparison.of(prompt).branches
    runs = prompt.runs.items()
    return {
        "id": prompt.prompt.key,
        "prompt": prompt.prompt.text,
        "graphs": {k: {"status": str(run.status), **run.cost.document()} for k, run in runs},
        "equality": [
            {**_letters(pair), "branches": list(map(_branch, branches(pair)))}
            for pair in comparison.pairs
            if not pair.why_not
        ],
    }


def _branch(comparison: BranchComparison) -> dict[str, Any]:
    plain = {
        "branch": comparison.branch,
        "result": str(comparison.result),
        "tokens": comparison.tokens,
    }
    if comparison.difference is None:
        return plain
    difference = asdict(comparison.difference)
    side = comparison.pair.reference
    difference["reference"] = _token(side, difference["reference"])
    difference["graph"] = _token(side, difference.pop("other"))
    return {**plain, "difference": difference}


def _token(side: Side, token: int) -> dict[str, Any]:
    """A token, or how the answer ended instead."""
    if token in (END, CUT):
        return {"id": None, "text": None, "end": "stop" if token == END else "length"}
    return {"id": token, "text": side.session.prompts.decode([token]), "end": None}


PER_TOKEN = "speedup_per_token"
COSTS: Mapping[str, Callable[[Meter], float]] = {  # by the name of the gain; docs/metrics.md
    PER_TOKEN: lambda meter: ratio(meter.seconds, meter.tokens),
    "fewer_rounds": lambda meter: meter.rounds,
    "more_tokens_per_round": lambda meter: ratio(meter.rounds, meter.tokens),
}


@dataclass(frozen=True, slots=True)
class Gain:
    """Cost of the first graph / cost of this graph, over `prompts` prompts.

    Above 1 this graph is better.
    """

    median: float
    lowest: float
    highest: float
    prompts: int


def gains(comparison: Comparison, side: Side) -> dict[str, Gain]:
    """By name; without those that no prompt tells."""
    by_name: dict[str, Gain] = {}
    for name, cost in COSTS.items():
        pairs = _cost_pairs(comparison, side, cost)
        if ratios := [first / other for first, other in pairs if first and other]:
            by_name[name] = Gain(median(ratios), min(ratios), max(ratios), len(ratios))
    return by_name


def _cost_pairs(
    comparison: Comparison, side: Side, cost: Callable[[Meter], float]
) -> Iterator[tuple[float, float]]:
    """The costs of the first graph and of this one, for each prompt that both have answered."""
    for prompt in comparison.prompts:
        runs = [prompt.runs[member.letter] for member in (comparison.sides[0], side)]
        if not any(run.problems for run in runs):
            first, other = (cost(run.cost.meter) for run in runs)
            yield first, other


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


def rows_of(comparison: Comparison) -> list[dict[str, Any]]:
    """A row of figures for each graph, if any prompt was answered; the same keys in all."""
    if not comparison.prompts:
        return []
    paths = dict.fromkeys(path for side in comparison.sides for path in own_settings(side))
    return [_row(comparison, side, tuple(paths)) for side in comparison.sides]


def document(comparison: Comparison) -> dict[str, Any]:
    """The whole result as plain data."""
    return {**comparison.document(), "table": rows_of(comparison)}


def own_settings(side: Side) -> dict[str, str]:
    """By path, what was set for this graph and not for all."""
    pairs = (setting.partition("=") for setting in side.sets)
    return {path: value for path, _, value in pairs}


def _row(comparison: Comparison, side: Side, paths: Sequence[str]) -> dict[str, Any]:
    cost = comparison.total(side)
    settings = own_settings(side)
    meter = cost.meter
    pools = cost.pools.values()
    per_token = 1000 * meter.seconds / meter.tokens if meter.tokens else None
    row: dict[str, Any] = {"side": side.letter, "graph": side.title}
    row |= {path: settings.get(path, "") for path in paths}
    row |= {"prompts": len(comparison.prompts), "equal": equal_branches(comparison, side)}
    row |= {"tau_step": meter.tau_step, "target_forwards": meter.forwards, "rounds": meter.rounds}
    row |= {"tokens": meter.tokens, "seconds": meter.seconds, "milliseconds_per_token": per_token}
    for name, gain in gains(comparison, side).items():
        row |= {name: gain.median, f"{name}_lowest": gain.lowest, f"{name}_highest": gain.highest}
    row["kv_peak_bytes"] = sum(pool.peak_bytes for pool in pools)
    row["kv_moved_bytes"] = sum(pool.moved_bytes.total() for pool in pools)
    return {**row, "padding_waste": meter.padding_waste}


def equal_branches(comparison: Comparison, side: Side) -> str:
    """The number of branches equal to those of the reference, in words; `-` for a reference."""
    for pair in comparison.pairs:
        if pair.other is side and not pair.why_not:
            number = counts(comparison.branches(pair))
            bad = "!" if number["different"] else ""
            return f"{bad}{number['equal']}/{number['branches']} ={pair.reference.letter}"
    return "-"

"""A comparison's results: everything judged, as plain data, and its exit code."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from ..errors import Code
from ..run.runner import STATUS_CODES, Status
from .cost import Cost, total
from .equal import (
    CUT,
    END,
    BranchAnswer,
    BranchComparison,
    GraphPair,
    compare_branches,
    counts,
    pairs_of,
)
from .sides import ComparedPrompt, Side

SCHEMA = 1
WORDS = {
    BranchAnswer.DIFFERENT: "DIFFERENT",
    BranchAnswer.TIE: "by a numeric tie",
    BranchAnswer.FOLLOWS: "behind these",
    BranchAnswer.UNFINISHED: "not finished",
}


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """One prompt's answers on two sides against each other, branch by branch."""

    pair: GraphPair
    prompt: ComparedPrompt
    branches: list[BranchComparison]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that came out, complete or as far as it got.

    status: OK, INTERRUPTED or TERMINATED; prompts: those that every graph has answered.
    """

    status: Status
    sides: list[Side]
    pairs: list[GraphPair]
    prompts: list[ComparedPrompt]
    results: list[PromptComparison]

    def branches(self, pair: GraphPair) -> list[BranchComparison]:
        """Every branch of every prompt of one pair."""
        return [one for result in self.results if result.pair is pair for one in result.branches]

    def total(self, side: Side) -> Cost:
        """One graph's cost of all prompts, of which there is one at least."""
        return total([prompt.runs[side.letter].cost for prompt in self.prompts])

    @property
    def differences(self) -> list[tuple[PromptComparison, BranchComparison]]:
        """Every branch that differs by itself, numeric ties included."""
        kinds = (BranchAnswer.DIFFERENT, BranchAnswer.TIE)
        return [(r, one) for r in self.results for one in r.branches if one.result in kinds]

    @property
    def failures(self) -> int:
        """Branches that differ though equality was promised."""
        different = BranchAnswer.DIFFERENT
        return sum(r.pair.promised for r, one in self.differences if one.result is different)

    @property
    def problems(self) -> list[str]:
        """Answers that are not complete, a line each."""
        return [
            f"{side.letter} {side.name}: {line}"
            for prompt in self.prompts
            for side in self.sides
            for line in prompt.runs[side.letter].problems
        ]

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
            "graphs": {side.letter: _graph(side) for side in self.sides},
            "equality": [_pair(self, pair) for pair in self.pairs],
            "prompts": [_prompt(self, prompt) for prompt in self.prompts],
            "total": {s.letter: self.total(s).document() for s in self.sides if self.prompts},
            "problems": self.problems,
        }


def judge(status: Status, sides: list[Side], prompts: list[ComparedPrompt]) -> Comparison:
    """Hold the answers against each other; a difference costs one forward of the target."""
    pairs = pairs_of(sides)
    compared = [pair for pair in pairs if not pair.why_not]
    both = product(prompts, compared)
    results = [PromptComparison(pair, one, compare_branches(pair, one)) for one, pair in both]
    return Comparison(status, sides, pairs, prompts, results)


def _graph(side: Side) -> dict[str, Any]:
    graph, options = side.job.program.graph, side.job.options
    return {
        "name": graph.name,
        "file": options.graph,
        "sets": list(options.sets),
        "layout": graph.layout.kind,
        "drafter": graph.drafter.kind,
        "model": options.model,
        "drafter_model": options.drafter_model if graph.drafter.has_model else None,
        "dtype": options.dtype,
        "device": options.device,
        "threads": side.job.threads,
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
    results = [(r.pair, r.branches) for r in comparison.results if r.prompt is prompt]
    return {
        "id": prompt.prompt.key,
        "prompt": prompt.prompt.text,
        "graphs": {
            letter: {"status": str(run.status), **run.cost.document()}
            for letter, run in prompt.runs.items()
        },
        "equality": [
            {**_letters(pair), "branches": [_branch(pair.reference, one) for one in branches]}
            for pair, branches in results
        ],
    }


def _branch(side: Side, one: BranchComparison) -> dict[str, Any]:
    plain = {"branch": one.branch, "result": str(one.result), "tokens": one.tokens}
    if one.difference is None:
        return plain
    difference = asdict(one.difference)
    difference["reference"] = _token(side, one.difference.reference)
    difference["graph"] = _token(side, difference.pop("other"))
    return {**plain, "difference": difference}


def _token(side: Side, token: int) -> dict[str, Any]:
    """A token, or how the answer ended instead."""
    if token in (END, CUT):
        return {"id": None, "text": None, "end": "stop" if token == END else "length"}
    return {"id": token, "text": side.session.prompts.decode([token]), "end": None}


def count_words(branches: Sequence[BranchComparison]) -> str:
    """What came of some branches: `5 of 6 branches equal, 1 numeric tie`."""
    number = counts(branches)
    words = [f"{number['equal']} of {number['branches']} branches equal"]
    words += [f"{number[result]} {name}" for result, name in WORDS.items() if number[result]]
    return ", ".join(words)

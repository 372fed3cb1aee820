"""A comparison's results: everything judged, as plain data, and its exit code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Code
from ..run.runner import STATUS_CODES, Status
from .cost import Cost, total
from .equal import (
    CUT,
    END,
    BranchAnswer,
    BranchComparison,
    Difference,
    GraphPair,
    counts,
    pairs_of,
    verdicts,
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
    """One prompt's answers on two sides held against each other."""

    pair: GraphPair
    asked: ComparedPrompt
    verdicts: list[BranchComparison]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was found out, complete or as far as it got.

    status: OK, INTERRUPTED or TERMINATED; asked: the prompts that every graph has answered.
    """

    status: Status
    sides: list[Side]
    pairs: list[GraphPair]
    asked: list[ComparedPrompt]
    held: list[PromptComparison]

    def of(self, pair: GraphPair) -> list[BranchComparison]:
        """Every branch of every prompt of one pair."""
        return [verdict for held in self.held if held.pair is pair for verdict in held.verdicts]

    def costs(self, side: Side) -> list[Cost]:
        """One graph's cost of each prompt."""
        return [asked.ran[self.sides.index(side)].cost for asked in self.asked]

    @property
    def differences(self) -> list[tuple[PromptComparison, BranchComparison]]:
        """Every branch that differs by itself, numeric ties included."""
        kinds = (BranchAnswer.DIFFERENT, BranchAnswer.TIE)
        return [(held, v) for held in self.held for v in held.verdicts if v.result in kinds]

    @property
    def failures(self) -> int:
        """Branches that differ though equality was promised."""
        broken = [held.pair for held, v in self.differences if v.result is BranchAnswer.DIFFERENT]
        return sum(pair.promised for pair in broken)

    @property
    def problems(self) -> list[str]:
        """Answers that are not complete, a line each."""
        return [
            f"{side.letter} {side.name}: {line}"
            for asked in self.asked
            for side, ran in zip(self.sides, asked.ran, strict=True)
            for line in ran.problems
        ]

    @property
    def code(self) -> int:
        """The exit code: a stopped comparison, then a broken promise, then refused answers."""
        if self.status is not Status.OK:
            return STATUS_CODES[self.status]
        return Code.UNEQUAL if self.failures else Code.FAILED if self.problems else Code.OK


def judge(status: Status, sides: list[Side], asked: list[ComparedPrompt]) -> Comparison:
    """Hold the answers against each other; a difference costs one forward of the target."""
    pairs = pairs_of(sides)
    compared = [pair for pair in pairs if not pair.why_not]
    held = [
        PromptComparison(pair, one, verdicts(pair, one, sides))
        for one in asked
        for pair in compared
    ]
    return Comparison(status, sides, pairs, asked, held)


def document(found: Comparison) -> dict[str, Any]:
    """The one JSON document of `--json`; its keys are documented in docs/cli.md."""
    return {
        "schema_version": SCHEMA,
        "status": str(found.status),
        "exit_code": int(found.code),
        "graphs": {side.letter: _graph(side) for side in found.sides},
        "equality": [_pair(found, pair) for pair in found.pairs],
        "prompts": [_prompt(found, asked) for asked in found.asked],
        "total": {
            side.letter: total(costs).document()
            for side in found.sides
            if (costs := found.costs(side))
        },
        "problems": found.problems,
    }


def _graph(side: Side) -> dict[str, Any]:
    graph, config = side.job.program.graph, side.job.options
    return {
        "name": graph.name,
        "file": side.job.options.graph,
        "layout": graph.layout.kind,
        "drafter": graph.drafter.kind,
        "model": config.model,
        "drafter_model": config.drafter_model if graph.drafter.has_model else None,
        "dtype": config.dtype,
        "device": config.device,
        "threads": side.job.threads,
        "max_new_tokens": side.session.budget,
    }


def _pair(found: Comparison, pair: GraphPair) -> dict[str, Any]:
    letters = {"reference": pair.reference.letter, "graph": pair.other.letter}
    if pair.why_not:
        return {**letters, "compared": False, "reason": pair.why_not}
    return {**letters, "compared": True, "promised": pair.promised, **counts(found.of(pair))}


def _prompt(found: Comparison, asked: ComparedPrompt) -> dict[str, Any]:
    held = [one for one in found.held if one.asked is asked]
    return {
        "id": asked.prompt.key,
        "prompt": asked.prompt.text,
        "graphs": {
            side.letter: {"status": str(ran.status), **ran.cost.document()}
            for side, ran in zip(found.sides, asked.ran, strict=True)
        },
        "equality": [
            {
                "reference": one.pair.reference.letter,
                "graph": one.pair.other.letter,
                "branches": [_verdict(one, verdict) for verdict in one.verdicts],
            }
            for one in held
        ],
    }


def _verdict(held: PromptComparison, verdict: BranchComparison) -> dict[str, Any]:
    plain = {
        "branch": verdict.branch,
        "result": str(verdict.result),
        "tokens": verdict.tokens,
    }
    if verdict.difference is None:
        return plain
    return {**plain, "difference": _difference(held.pair.reference, verdict.difference)}


def _difference(side: Side, found: Difference) -> dict[str, Any]:
    return {
        "position": found.position,
        "before": found.before,
        "reference": _token(side, found.reference),
        "graph": _token(side, found.other),
        "margin": found.margin,
    }


def _token(side: Side, token: int) -> dict[str, Any]:
    """A token, or how the answer ended instead."""
    if token in (END, CUT):
        return {"id": None, "text": None, "end": "stop" if token == END else "length"}
    return {"id": token, "text": side.session.prompts.decode([token]), "end": None}


def compared_words(found: Sequence[BranchComparison]) -> str:
    """What came of some branches: `5 of 6 branches equal, 1 numeric tie`."""
    number = counts(found)
    words = [f"{number['equal']} of {number['branches']} branches equal"]
    words += [f"{number[result]} {name}" for result, name in WORDS.items() if number[result]]
    return ", ".join(words)

"""A comparison's results: everything judged, as plain data, and its exit code."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ..errors import Code
from ..prepare.environment import redact, threads_of
from ..run.runner import STATUS_CODES, Status
from .costs import Cost, total
from .equal import CUT, END, BranchAnswer, BranchComparison, GraphPair, compare_branches, counts
from .sides import ComparedPrompt, Side

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that came out, complete or as far as it got.

    status: OK, INTERRUPTED or TERMINATED; prompts: those that every graph has answered.
    """

    status: Status
    sides: list[Side]
    pairs: list[GraphPair]
    prompts: list[ComparedPrompt]
    results: list[BranchComparison]

    def branches(self, pair: GraphPair) -> list[BranchComparison]:
        """Every branch of every prompt of one pair."""
        return [one for one in self.results if one.pair is pair]

    def of(self, prompt: ComparedPrompt) -> "Comparison":
        """The same of one prompt alone."""
        results = [one for one in self.results if one.prompt is prompt]
        return replace(self, prompts=[prompt], results=results)

    def total(self, side: Side) -> Cost:
        """One graph's cost of all prompts, of which there is one at least."""
        return total([prompt.runs[side.letter].cost for prompt in self.prompts])

    @property
    def differences(self) -> list[BranchComparison]:
        """Every branch that differs by itself, numeric ties included."""
        kinds = (BranchAnswer.DIFFERENT, BranchAnswer.TIE)
        return [one for one in self.results if one.result in kinds]

    @property
    def failures(self) -> int:
        """Branches that differ though equality was promised."""
        different = BranchAnswer.DIFFERENT
        return sum(one.pair.promised for one in self.results if one.result is different)

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


def _branch(one: BranchComparison) -> dict[str, Any]:
    plain = {"branch": one.branch, "result": str(one.result), "tokens": one.tokens}
    if one.difference is None:
        return plain
    difference = asdict(one.difference)
    side = one.pair.reference
    difference["reference"] = _token(side, difference["reference"])
    difference["graph"] = _token(side, difference.pop("other"))
    return {**plain, "difference": difference}


def _token(side: Side, token: int) -> dict[str, Any]:
    """A token, or how the answer ended instead."""
    if token in (END, CUT):
        return {"id": None, "text": None, "end": "stop" if token == END else "length"}
    return {"id": token, "text": side.session.prompts.decode([token]), "end": None}

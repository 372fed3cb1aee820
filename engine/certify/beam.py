"""Beam search held to transformers' own: the same tokens and the same scores."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from ...states.request import Branch, Finish
from .probe import ProbedRun, Trial, probe
from .teacher import TeacherTally
from .workbench import Bench, Check

NEAR = {"float32": 1e-4, "float64": 1e-9}
"""How far scores may lie apart, absolutely."""
BUDGETS = (1, 2, 7)


def beam_checks(bench: Bench) -> Iterator[Check]:
    """Whole prompts, then small budgets, and searches that end early."""
    bench.tell("beam search ...")
    own = bench.changed().options.max_new_tokens or bench.extent.gate_tokens
    # All prompts together: searches come and go.
    whole = Trial(tokens=min(own, bench.extent.tokens or own), prompts=bench.prompts, stops=None)
    yield _check(bench, "beam/prompts", "beam search of transformers", [whole])
    pair = Trial(prompts=bench.prompts[:2])
    budgets = [replace(pair, tokens=budget) for budget in BUDGETS]
    yield _check(bench, "beam/budgets", f"budgets of {BUDGETS} tokens", budgets)
    answer = probe(bench, Trial(prompts=bench.prompts[:1])).branches[0].tokens
    half = len(answer) // 2
    stops = [answer[len(answer) // 3 :: 5], answer[half : half + 1]]
    early = [replace(pair, stops=frozenset(ids)) for ids in stops]
    yield _check(bench, "beam/stops", "an answer's own tokens as stop ids", early)


def _check(bench: Bench, name: str, title: str, trials: list[Trial]) -> Check:
    tally = TeacherTally(bench.reference, bench.dtype)
    worst = 0.0
    near = NEAR[bench.dtype]
    for run in (probe(bench, trial) for trial in trials):
        tally.prompts += len(run.requests)
        for branch, context in run.answers():
            tally.branches += 1
            tally.tokens += len(branch.tokens)
            bench.tell(f"beam search of transformers: search {tally.branches} ...")
            off = _off(bench, branch, context, bench.dtype)
            if off == inf and bench.dtype == "float32" and _ties(run, branch, context):
                tally.ties += 1
            elif not off <= near:
                why = "other tokens" if off == inf else f"a score {off:.1e} apart"
                tally.wrong.append(f"{branch.name}: transformers finds {why}")
            worst = max(worst, 0.0 if off == inf else off)
    more = f"; scores differ by {worst:.1e} at most"
    return tally.check(name, title, more, worst_score=worst, score_tolerance=near)


def _off(bench: Bench, branch: Branch, context: list[int], dtype: str) -> float:
    """How far the scores lie apart; inf if the tokens differ."""
    beam = bench.job.program.graph.beam
    assert beam is not None
    tokens, score = bench.reference.generate(branch, context, dtype, **beam.model_dump())
    if branch.finish is Finish.STOP and tokens[-1] in branch.request.stop_ids:
        tokens = tokens[:-1]
    if tokens != branch.tokens:
        return inf
    return 0.0 if score is None or branch.score is None else abs(score - branch.score)


def _ties(run: ProbedRun, branch: Branch, context: list[int]) -> bool:
    """Whether the same search in float64 is that of transformers in float64."""
    twin = next(other for other in run.again().branches if other.name == branch.name)
    return _off(run.bench, twin, context, "float64") <= NEAR["float64"]

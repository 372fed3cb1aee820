"""Beam search held to transformers' own: the same tokens and the same scores."""

from collections.abc import Iterator
from dataclasses import replace

from ...states.requests.branch import Branch, Finish
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
    tally, worst = TeacherTally(), 0.0
    for run in (probe(bench, trial) for trial in trials):
        tally.prompts += len(run.requests)
        for branch, context in run.answers():
            worst = max(worst, _hold(bench, run, branch, context, tally))
    figures = {**tally.figures, "worst_score": worst, "score_tolerance": NEAR[bench.dtype]}
    text = f"{title}: {tally.words}; scores differ by {worst:.1e} at most"
    return Check(name, tally.good, figures, text)


def _hold(
    bench: Bench, run: ProbedRun, branch: Branch, context: list[int], tally: TeacherTally
) -> float:
    """Compare one search; returns how far its score is off."""
    tally.branches += 1
    tally.tokens += len(branch.tokens)
    bench.tell(f"beam search of transformers: search {tally.branches} ...")
    off = _off(bench, branch, context, bench.dtype)
    if off is not None and off <= NEAR[bench.dtype]:
        return off
    if off is None and bench.dtype == "float32" and _ties(bench, run, branch, context):
        tally.ties += 1
        return 0.0
    why = "other tokens" if off is None else f"a score {off:.1e} apart"
    tally.wrong.append(f"{branch.name}: transformers finds {why}")
    return off or 0.0


def _off(bench: Bench, branch: Branch, context: list[int], dtype: str) -> float | None:
    """How far the scores lie apart; None if the tokens differ."""
    beam = bench.job.program.graph.beam
    assert beam is not None
    tokens, score = bench.reference.beams(branch, context, dtype, **beam.model_dump())
    if branch.finish is Finish.STOP and tokens[-1] in branch.request.stop_ids:
        tokens = tokens[:-1]
    if tokens != branch.tokens:
        return None
    return 0.0 if score is None or branch.score is None else abs(score - branch.score)


def _ties(bench: Bench, run: ProbedRun, branch: Branch, context: list[int]) -> bool:
    """Whether the same search in float64 is that of transformers in float64."""
    twin = next(other for other in run.again().branches if other.name == branch.name)
    off = _off(bench, twin, context, "float64")
    return off is not None and off <= NEAR["float64"]

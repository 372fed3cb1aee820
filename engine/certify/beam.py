"""Beam search held to transformers' own: the same tokens and the same scores."""

from collections.abc import Iterator

from ...states.requests.branch import Branch, Finish
from ..run.contexts import contexts
from .probe import ProbedRun, probe
from .teacher import TeacherTally
from .toys import Check
from .workbench import Bench

NEAR = {"float32": 1e-4, "float64": 1e-9}
"""How far scores may lie apart, absolutely."""
BUDGETS = (1, 2, 7)


def beam_checks(bench: Bench) -> Iterator[Check]:
    """Whole prompts, then small budgets, and searches that end early."""
    yield _check(bench, "beam/prompts", "beam search of transformers", _prompts(bench))
    cut = [probe(bench, tokens=budget, prompts=bench.prompts[:2]) for budget in BUDGETS]
    yield _check(bench, "beam/budgets", f"budgets of {BUDGETS} tokens", cut)
    yield _check(bench, "beam/stops", "an answer's own tokens as stop ids", _stopping(bench))


def _prompts(bench: Bench) -> list[ProbedRun]:
    """All prompts together: searches come and go."""
    own = bench.changed().options.max_new_tokens or bench.extent.gate_tokens
    bench.tell("beam search ...")
    tokens = min(own, bench.extent.tokens or own)
    return [probe(bench, tokens=tokens, prompts=bench.prompts, stops=None)]


def _stopping(bench: Bench) -> list[ProbedRun]:
    free = probe(bench, prompts=bench.prompts[:1])
    written = free.branches[0].tokens
    chosen = [written[len(written) // 3 :: 5], written[len(written) // 2 : len(written) // 2 + 1]]
    return [probe(bench, prompts=bench.prompts[:2], stops=frozenset(ids)) for ids in chosen]


def _check(bench: Bench, name: str, title: str, probes: list[ProbedRun]) -> Check:
    tally, worst = TeacherTally(), 0.0
    for one in probes:
        for request in one.requests:
            tally.requests += 1
            for branch, context in contexts(request, one.side.session.prompts):
                worst = max(worst, _hold(bench, one, branch, context, tally))
    figures = {**tally.figures, "worst_score": worst, "score_tolerance": NEAR[bench.dtype]}
    text = f"{title}: {tally.words}; scores differ by {worst:.1e} at most"
    return Check(name, tally.good, figures, text)


def _hold(
    bench: Bench, one: ProbedRun, branch: Branch, context: list[int], tally: TeacherTally
) -> float:
    """Compare one search; returns how far its score is off."""
    tally.branches += 1
    tally.tokens += len(branch.tokens)
    bench.tell(f"beam search of transformers: search {tally.branches} ...")
    off = _off(bench, branch, context, bench.dtype)
    if off is not None and off <= NEAR[bench.dtype]:
        return off
    if off is None and bench.dtype == "float32" and _again(bench, one, branch, context):
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
    ended = branch.finish is Finish.STOP
    said = tokens[:-1] if ended and tokens[-1] in branch.request.stop_ids else tokens
    if said != branch.tokens:
        return None
    return 0.0 if score is None or branch.score is None else abs(score - branch.score)


def _again(bench: Bench, one: ProbedRun, branch: Branch, context: list[int]) -> bool:
    """Whether the same search in float64 is that of transformers in float64."""
    again = one.again()
    twin = next(other for other in again.branches if other.name == branch.name)
    off = _off(bench, twin, context, "float64")
    return off is not None and off <= NEAR["float64"]

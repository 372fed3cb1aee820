"""Sampled text under ``accept: match``: one seed gives one text, and it is the target's own.

The twin of a graph decodes without a drafter, one branch after another. Its tokens are held to
transformers' logits with the processors and coins of the ops, the graph's tokens to the twin's.
"""

from collections.abc import Iterator

from ..bench.equal import BranchAnswer, BranchComparison, GraphPair, compare_branches
from ..bench.sides import answer_all
from ..run.runner import Halt
from .greedy import repeated
from .teacher import SHOWN, TeacherForcing, TeacherTally
from .workbench import Bench, Check

MATCH = ("sampling.accept=match", "sampling.skip_sample_adjustment=false")
FILTERS = ("sampling.top_k=20", "sampling.top_p=0.9")
FIRST_SEED = 1


Sets = tuple[str, ...]  # as of `--set`


def settings_of(bench: Bench) -> dict[str, Sets]:
    """By name: the graph's own sampling, with filters, and a temperature of exactly 1."""
    own = bench.job.program.graph.sampling
    one = "sampling.temperature=1.0"
    base = MATCH if own.temperature > 0 else (*MATCH, one)
    name = f"temperature {own.temperature or 1.0:g}"
    cases: dict[str, Sets] = {name: base, f"{name}, top_k 20, top_p 0.9": (*base, *FILTERS)}
    if own.temperature not in (0, 1):
        cases["temperature 1"] = (*MATCH, one)
    return cases


def sampled_checks(bench: Bench) -> Iterator[Check]:
    """Two findings for every setting: the graph and its twin, the twin and transformers."""
    seeds = bench.extent.seeds
    for name, sets in settings_of(bench).items():
        forced = TeacherTally()
        yield _twins(bench, name, sets, forced)
        text = f"{name}, {seeds} seeds, drawn from transformers' logits: {forced.words}"
        yield Check(f"sampled/{name}/own", forced.good, {**forced.figures, "seeds": seeds}, text)
    skeleton = bench.job.program.graph.skeleton
    if skeleton is not None and skeleton.merge == "blend":
        sets = (*MATCH, "sampling.temperature=1.0", "skeleton.merge=blend")
        yield _twins(bench, "combined on a blended cache", sets, None)


def twin_of(bench: Bench) -> tuple[str, ...]:
    """No drafter, one branch after another in one sequence, in reading order."""
    capacity = bench.job.program.graph.layout.capacity
    layout = ("kind=bim", f"capacity={capacity}", "max_active=1", "order=fcfs")
    return ("drafter.kind=none", *(f"layout.{one}" for one in layout))


def _twins(bench: Bench, name: str, sets: Sets, forced: TeacherTally | None) -> Check:
    """The graph and its twin; the twin is held to transformers if there is a tally for that."""
    extent, comparisons = bench.extent, list[BranchComparison]()
    teacher = TeacherForcing(bench.reference, bench.dtype)
    for seed in range(FIRST_SEED, FIRST_SEED + extent.seeds):
        most = extent.drawn_tokens
        own = bench.changed(*sets, seed=seed, tokens=most)
        alone = bench.changed(*sets, *twin_of(bench), seed=seed, tokens=most)
        sides = [bench.side(alone, "A"), bench.side(own, "B")]
        prompts = bench.prompts[: extent.drawn_prompts]
        for answer in answer_all(sides, prompts, Halt(), bench.tell):
            comparisons += compare_branches(GraphPair(sides[0], sides[1]), answer)
            if forced is not None:
                repeat = repeated(bench, alone, answer.prompt)
                teacher.hold(sides[0], answer.runs["A"].request, forced, repeat)
    return _equal(bench, name, comparisons)


def _equal(bench: Bench, name: str, comparisons: list[BranchComparison]) -> Check:
    exact = bench.dtype == "float64"
    ties = [v for v in comparisons if v.result is BranchAnswer.TIE]
    wrong = [v for v in comparisons if v.result is BranchAnswer.DIFFERENT] + (ties if exact else [])
    alike = [v for v in comparisons if v.result is BranchAnswer.EQUAL]
    tokens = sum(v.tokens for v in alike)
    figures = {
        "seeds": bench.extent.seeds,
        "branches": len(comparisons),
        "equal": len(alike),
        "tokens": tokens,
        "ties": 0 if exact else len(ties),
        "refused": sum(v.result is BranchAnswer.UNFINISHED for v in comparisons),
        "differences": len(wrong),
    }
    text = (
        f"{name}, {bench.extent.seeds} seeds, with its drafter and without one: {tokens} "
        f"tokens in {len(alike)} of {len(comparisons)} branches are equal"
    )
    text += f", {len(ties)} numeric ties" if ties and not exact else ""
    text = "; ".join([text, *map(_difference, wrong[:SHOWN])])
    return Check(f"sampled/{name}/twin", not wrong and tokens > 0, figures, text)


def _difference(verdict: BranchComparison) -> str:
    there = verdict.difference
    if there is None:
        return f"branch {verdict.branch} stands behind other ids"
    margin = "" if there.margin is None else f" (margin {there.margin:.1e})"
    tokens = f"{there.other} and not {there.reference}"
    return f"branch {verdict.branch}, token {there.position + 1}: {tokens}{margin}"

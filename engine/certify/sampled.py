"""Sampled text under ``accept: match``: one seed gives one text, and it is the target's own.

The twin of a graph decodes without a drafter, one branch after another. Its tokens are held to
transformers' logits with the processors and coins of the ops, the graph's tokens to the twin's.
"""

from collections.abc import Iterator

from ..bench.equal import BranchAnswer, BranchComparison, GraphPair, compare_branches, counts
from ..bench.sides import answer_all
from ..run.runner import Halt
from .greedy import repeated
from .teacher import TeacherTally
from .workbench import SHOWN, Bench, Check

MATCH = ("sampling.accept=match", "sampling.skip_sample_adjustment=false")
FILTERS = ("sampling.top_k=20", "sampling.top_p=0.9")
HEATED = (*MATCH, "sampling.temperature=1.0")
FIRST_SEED = 1


def sampled_checks(bench: Bench) -> Iterator[Check]:
    """Two findings for every setting: the graph and its twin, the twin and transformers.

    Settings are the graph's own sampling, the same with filters, and a temperature of exactly 1.
    """
    heat, seeds = bench.job.program.graph.sampling.temperature or 1.0, bench.extent.seeds
    name, own = f"temperature {heat:g}", (*MATCH, f"sampling.temperature={heat}")
    filtered = f"{name}, top_k 20, top_p 0.9"
    settings = {name: own, filtered: (*own, *FILTERS), "temperature 1": HEATED}
    for name, sets in settings.items():
        forced = TeacherTally(bench.reference, bench.dtype)
        yield _twins(bench, name, sets, forced)
        title = f"{name}, {seeds} seeds, drawn from transformers' logits"
        yield forced.check(f"sampled/{name}/own", title, seeds=seeds)
    skeleton = bench.job.program.graph.skeleton
    if skeleton is not None and skeleton.merge == "blend":
        sets = (*HEATED, "skeleton.merge=blend")
        yield _twins(bench, "combined on a blended cache", sets, None)


def _twins(bench: Bench, name: str, sets: tuple[str, ...], forced: TeacherTally | None) -> Check:
    """The graph and its twin; the twin is held to transformers if there is a tally for that.

    The twin has no drafter, and one branch after another in one sequence, in reading order.
    """
    extent, results = bench.extent, list[BranchComparison]()
    capacity = f"layout.capacity={bench.job.program.graph.layout.capacity}"
    order = ("layout.kind=bim", capacity, "layout.max_active=1", "layout.order=fcfs")
    for seed in range(FIRST_SEED, FIRST_SEED + extent.seeds):
        most = extent.drawn_tokens
        own = bench.changed(*sets, seed=seed, tokens=most)
        alone = bench.changed(*sets, "drafter.kind=none", *order, seed=seed, tokens=most)
        twin, graph = bench.side(alone, "A"), bench.side(own, "B")
        prompts = bench.prompts[: extent.drawn_prompts]
        for answer in answer_all([twin, graph], prompts, Halt(), bench.tell):
            results += compare_branches(GraphPair(twin, graph), answer)
            if forced is not None:
                repeat = repeated(bench, alone, answer.prompt)
                forced.hold(twin, answer.runs["A"].request, repeat)
    return _equal(bench, name, results)


def _equal(bench: Bench, name: str, results: list[BranchComparison]) -> Check:
    number, exact = counts(results), bench.dtype == "float64"
    ties = 0 if exact else number["tie"]
    faults = (BranchAnswer.DIFFERENT, *([BranchAnswer.TIE] if exact else []))
    wrong = [_difference(one) for one in results if one.result in faults]
    tokens, seeds = number["equal_tokens"], bench.extent.seeds
    figures = {
        "seeds": seeds,
        "branches": number["branches"],
        "equal": number["equal"],
        "tokens": tokens,
        "ties": ties,
        "refused": number["unfinished"],
        "differences": len(wrong),
    }
    text = f"{name}, {seeds} seeds, with its drafter and without one: {tokens} tokens in "
    text += f"{number['equal']} of {number['branches']} branches are equal"
    text += f", {ties} numeric ties" if ties else ""
    passed = not wrong and tokens > 0
    return Check(f"sampled/{name}/twin", passed, figures, "; ".join([text, *wrong[:SHOWN]]))


def _difference(one: BranchComparison) -> str:
    there = one.difference
    if there is None:
        return f"branch {one.branch} stands behind other ids"
    margin = "" if there.margin is None else f" (margin {there.margin:.1e})"
    tokens = f"{there.other} and not {there.reference}"
    return f"branch {one.branch}, token {there.position + 1}: {tokens}{margin}"

"""Answers from documents whose keys and values are reused: what they are held to.

A blended cache is an approximation of the prompt, so transformers has nothing to hold its text to.
What is promised is that speculation and layout change no token of it: the same graph without a
drafter, one branch after another, on the same blended cache. With every row computed anew the
text is transformers' own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..bench.equal import BranchComparison, compare_branches
from ..bench.sides import answer_all
from ..prepare.files import SHIPPED
from ..prepare.inputs import Prompt, read_file
from ..run.runner import Halt
from .teacher import TeacherTally
from .texts import FIRST_SEED, GREEDY, equality, repeated, twin_answers
from .workbench import Bench, Check

DOCUMENTS = SHIPPED / "prompts" / "documents.jsonl"  # prompts that bring what holds their answers


def blended_checks(bench: Bench) -> Iterator[Check]:
    """Two findings for every place that documents may have in prompts."""
    prompts = read_file(DOCUMENTS).items[: bench.extent.drawn_prompts]
    outlined = bench.job.program.graph.skeleton is not None
    for place in ("prefix", "branches") if outlined else ("prompt",):
        sets = (GREEDY, f"skeleton.documents={place}") if outlined else (GREEDY,)
        yield _computed(bench, place, sets, prompts)
        yield _reused(bench, place, sets, prompts)


def _computed(bench: Bench, place: str, sets: tuple[str, ...], prompts: Sequence[Prompt]) -> Check:
    tally, most = TeacherTally(bench.reference, bench.dtype), bench.extent.drawn_tokens
    side = bench.side(bench.changed(*sets, "blend.plan=plain", tokens=most))
    for answer in answer_all([side], prompts, Halt(), bench.tell):
        repeat = repeated(bench, side, answer.prompt)
        tally.hold(side, answer.runs["A"].request, repeat)
    title = f"documents in the {place}, every row computed: greedy decoding of transformers"
    return tally.check(f"blended/{place}, nothing reused", title)


def _reused(bench: Bench, place: str, sets: tuple[str, ...], prompts: Sequence[Prompt]) -> Check:
    results, reused = list[BranchComparison](), 0
    for pair, answer in twin_answers(bench, sets, FIRST_SEED, prompts):
        results += compare_branches(pair, answer)
        blends = answer.runs[pair.other.letter].cost.meter.blends
        reused += sum(summary.reused for summary in blends)
    title = f"documents in the {place}, {reused} of their rows reused, with its drafter and without"
    check = equality(bench, f"blended/{place}", title, results, reused=reused)
    # Parts search for documents only where the outline says so.
    return check if reused or place == "branches" else replace(check, passed=False)

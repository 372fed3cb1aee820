"""Text behind reused keys and values, of documents and of finished parts: what it is held to.

A blended cache is an approximation of the prompt, so transformers has nothing to hold its text to.
What is promised is that speculation and layout change no token of it: the same graph without a
drafter, one branch after another, on the same blended cache. With every row computed anew the
text is transformers' own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...states.text.outline import Outline, Point
from ..bench.equal import BranchComparison, GraphPair, compare_branches
from ..bench.sides import ComparedPrompt, answer_all
from ..prepare.files import SHIPPED
from ..prepare.inputs import Prompt, read_file
from ..run.runner import StopSignal
from .teacher import TeacherTally
from .texts import FIRST_SEED, GREEDY, HEATED, equality, repeated, twin_answers
from .workbench import Bench, Check

DOCUMENTS = SHIPPED / "prompts" / "documents.jsonl"  # prompts that bring what holds their answers
PARTS = 4  # of the outline that is given where parts search


@dataclass(slots=True)
class Reuse:
    """Answers of a graph and its twin, and how many rows the graph took from what was cached."""

    results: list[BranchComparison] = field(default_factory=list)
    reused: int = 0
    recomputed: int = 0

    def add(self, pair: GraphPair, answer: ComparedPrompt) -> None:
        self.results += compare_branches(pair, answer)
        for blend in answer.runs[pair.other.letter].cost.meter.blends:
            self.reused += blend.reused
            self.recomputed += blend.picked[0] if blend.picked else 0

    def check(self, bench: Bench, name: str, title: str) -> Check:
        """Equal tokens; without a reused row they would prove nothing."""
        rows = f"{self.reused} rows reused, {self.recomputed} of them recomputed"
        title = f"{title}, {rows}, with its drafter and without"
        figures = {"reused": self.reused, "recomputed": self.recomputed}
        check = equality(bench, f"blended/{name}", title, self.results, **figures)
        return check if self.reused else replace(check, passed=False)


def blended_checks(bench: Bench) -> Iterator[Check]:
    """Two findings for every place that documents may have in prompts, one for folded parts."""
    prompts = read_file(DOCUMENTS).items[: bench.extent.drawn_prompts]
    skeleton = bench.job.program.graph.skeleton
    for place in ("prompt",) if skeleton is None else ("prefix", "branches"):
        sets = (GREEDY,) if skeleton is None else (GREEDY, f"skeleton.documents={place}")
        # Whether the model's own outlines search is its own affair; here every part does.
        outline = _searching(prompts) if place == "branches" else None
        made = bench if outline is None else replace(bench, job=replace(bench.job, outline=outline))
        yield _computed(made, place, sets, prompts)
        yield _reused(made, place, sets, prompts)
    if skeleton is not None and skeleton.merge == "blend":
        yield _combined(bench)


def _searching(prompts: Sequence[Prompt]) -> Outline:
    """Parts that are named as the documents are, each with the tool that searches for them."""
    titles = dict.fromkeys(one.title for prompt in prompts for one in prompt.documents)
    some = enumerate(list(titles)[:PARTS], 1)
    return Outline("plan", tuple(Point(n, 60, "Search", (), title) for n, title in some), (), "ok")


def _computed(bench: Bench, place: str, sets: tuple[str, ...], prompts: Sequence[Prompt]) -> Check:
    tally = TeacherTally(bench.reference, bench.dtype)
    most = bench.extent.drawn_tokens
    side = bench.side(bench.changed(*sets, "blend.plan=plain", tokens=most))
    for answer in answer_all([side], prompts, StopSignal(), bench.show):
        repeat = repeated(bench, side, answer.prompt)
        tally.hold(side, answer.runs["A"].request, repeat)
    title = f"documents in the {place}, every row computed: greedy decoding of transformers"
    return tally.check(f"blended/{place}, nothing reused", title)


def _reused(bench: Bench, place: str, sets: tuple[str, ...], prompts: Sequence[Prompt]) -> Check:
    reuse = Reuse()
    for pair, answer in twin_answers(bench, sets, FIRST_SEED, prompts):
        reuse.add(pair, answer)
    return reuse.check(bench, place, f"documents in the {place}")


def _combined(bench: Bench) -> Check:
    """Finished parts, folded and blended, and the answer that is drawn behind them."""
    reuse = Reuse()
    seeds = bench.extent.seeds
    prompts = bench.prompts[: bench.extent.drawn_prompts]
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for pair, answer in twin_answers(bench, (*HEATED, "skeleton.merge=blend"), seed, prompts):
            reuse.add(pair, answer)
    return reuse.check(bench, "combined", f"finished parts folded, temperature 1, {seeds} seeds")

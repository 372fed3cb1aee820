"""Whole answers, greedy and sampled: every branch holds the tokens that transformers decodes.

Sampled text is that of ``accept: match``: one seed gives one text. The twin of a graph decodes
without a drafter, one branch after another. Its tokens are compared with
transformers' logits under the processors and random numbers of the ops, the graph's tokens with
the twin's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from ...states.request import Branch, Finish, Request
from ...states.sampling import rules_of
from ...states.text.outline import Outline, Point
from ..bench.equality import BranchAnswer, BranchComparison, GraphPair, compare_branches, counts
from ..bench.sides import ComparedPrompt, Side, answer_all
from ..prepare.files import SHIPPED
from ..prepare.inputs import Prompt, read_file
from ..record.report import answers_of
from ..run.runner import StopSignal
from ..run.scoring import contexts
from ..workers.start import divided, on_workers
from .probe import ProbedRun, Trial, probe
from .reference import SHOWN, Bench, Check, Repeat, TeacherTally, number_of, repeat_in_float64

GREEDY = "sampling.temperature=0"
MATCH = ("sampling.accept=match", "sampling.skip_sample_adjustment=false")
HEATED = (*MATCH, "sampling.temperature=1.0")
SAMPLING_FILTERS = ("sampling.top_k=20", "sampling.top_p=0.9")
FIRST_SEED = 1


def greedy_checks(bench: Bench) -> Iterator[Check]:
    """The graph as it is, but greedy: by teacher forcing, and by `generate` on a few prompts."""
    by_teacher, by_generate = (TeacherTally(bench.reference, bench.dtype) for _ in range(2))
    side = bench.side(bench.changed(GREEDY, tokens=bench.extent.tokens))
    requests: list[Request] = []
    for answer in answer_all([side], bench.prompts, StopSignal(), bench.show):
        requests.append(answer.runs["A"].request)
        repeat = repeated(bench, side, answer.prompt)
        by_teacher.hold(side, requests[-1], repeat)
        if len(requests) <= bench.extent.generated:
            bench.tell(f"generate: prompt {len(requests)} ...")
            _hold_generated(side, requests[-1], by_generate, repeat)
    title = "greedy decoding of transformers, token by token"
    yield by_teacher.check("greedy/teacher forcing", title)
    title = "`generate` of transformers, outlines with their grammar"
    yield by_generate.check("greedy/generate", title)
    yield _markers(side, requests)


def repeated(bench: Bench, side: Side, prompt: Prompt) -> Repeat | None:
    """The same prompt in float64."""

    def rerun() -> Iterator[tuple[Side, Request]]:
        job = replace(side.job, options=replace(side.job.options, dtype="float64"))
        exact = bench.side(job)
        for answer in answer_all([exact], [prompt], StopSignal(), bench.show):
            yield exact, answer.runs["A"].request

    return repeat_in_float64(bench, rerun)


def _hold_generated(
    side: Side, request: Request, tally: TeacherTally, repeat: Repeat | None
) -> None:
    """Branches whose rules and sight `generate` has too; teacher forcing alone holds the others."""
    tally.prompts += 1
    for branch, context in contexts(request, side.session.prompts):
        simple = branch.matcher is not None or rules_of(branch).plain
        if not simple or branch.reads or branch.finish not in (Finish.STOP, Finish.LENGTH):
            continue
        text, _ = tally.reference.generate(branch, context, tally.dtype)
        ended = branch.finish is Finish.STOP and text[-1] in branch.request.stop_ids
        if branch.tokens in (text, text[:-1] if ended else text):
            tally.branches += 1
            tally.tokens += len(branch.tokens)
            continue
        before = len(tally.wrong), tally.ties
        tally.hold_branch(branch, context, repeat)
        if before == (len(tally.wrong), tally.ties):  # one forward and many do not agree
            tally.wrong.append(f"{branch.name}: `generate` writes {_unlike(branch, text)}")


def _unlike(branch: Branch, text: Sequence[int]) -> str:
    for place, (answered, token) in enumerate(zip(branch.tokens, text, strict=False), 1):
        if answered != token:
            return f"{token} at {place}, the answer has {answered}"
    return f"{len(text)} tokens, the answer has {len(branch.tokens)}"


def _markers(side: Side, requests: Sequence[Request]) -> Check:
    """What people read holds no text of control tokens."""
    markers = list(getattr(side.session.models.tokenizer, "all_special_tokens", ()))
    answers = answers_of(requests, side.session.prompts)
    texts = [section.text for answer in answers for section in answer.sections]
    texts += [answer.text for answer in answers]
    wrong = sorted({marker for marker in markers for text in texts if marker in text})
    text = f"no text of {len(markers)} control tokens in {len(texts)} texts"
    text += f"; found {', '.join(wrong)}" if wrong else ""
    figures = {"texts": len(texts), "markers": len(markers), "found": len(wrong)}
    return Check("greedy/no marker text", not wrong, figures, text)


def sampled_checks(bench: Bench) -> Iterator[Check]:
    """Two findings for every setting: the graph and its twin, the twin and transformers.

    Settings are the graph's own sampling, the same with filters, and a temperature of exactly 1.
    """
    heat = bench.job.program.graph.sampling.temperature or 1.0
    seeds = bench.extent.seeds
    name = f"temperature {heat:g}"
    graph_sets = (*MATCH, f"sampling.temperature={heat}")
    filtered = f"{name}, top_k 20, top_p 0.9"
    settings = {
        name: graph_sets,
        filtered: (*graph_sets, *SAMPLING_FILTERS),
        "temperature 1": HEATED,
    }
    for name, sets in settings.items():
        tally = TeacherTally(bench.reference, bench.dtype)
        yield _twins(bench, name, sets, tally)
        title = f"{name}, {seeds} seeds, drawn from transformers' logits"
        yield tally.check(f"sampled/{name}/own", title, seeds=seeds)


def _twins(bench: Bench, name: str, sets: tuple[str, ...], tally: TeacherTally) -> Check:
    """Compare the graph with its twin, and the twin with transformers."""
    extent = bench.extent
    results = list[BranchComparison]()
    for seed in range(FIRST_SEED, FIRST_SEED + extent.seeds):
        for pair, answer in twin_answers(bench, sets, seed, bench.prompts[: extent.drawn_prompts]):
            results += compare_branches(pair, answer)
            twin = pair.reference
            repeat = repeated(bench, twin, answer.prompt)
            tally.hold(twin, answer.runs[twin.letter].request, repeat)
    title = f"{name}, {extent.seeds} seeds, with its drafter and without one"
    return equality(bench, f"sampled/{name}/twin", title, results, seeds=extent.seeds)


def twin_answers(
    bench: Bench, sets: tuple[str, ...], seed: int, prompts: Sequence[Prompt]
) -> Iterator[tuple[GraphPair, ComparedPrompt]]:
    """Prompts answered by the graph, and by its twin, which is the reference.

    The twin has no drafter, and one branch after another in one sequence, in reading order.
    """
    most = bench.extent.drawn_tokens
    capacity = bench.job.program.graph.layout.kv_slots
    order = ("layout.kind=bim", f"layout.kv_slots={capacity}", "layout.max_num_branches=1")
    plain = ("drafter.kind=none", *order, "layout.order=fcfs")
    twin = bench.side(bench.changed(*sets, *plain, seed=seed, tokens=most), "A")
    graph = bench.side(bench.changed(*sets, seed=seed, tokens=most), "B")
    for answer in answer_all([twin, graph], prompts, StopSignal(), bench.show):
        yield GraphPair(twin, graph), answer


def equality(
    bench: Bench, name: str, title: str, results: Sequence[BranchComparison], **figures: float
) -> Check:
    """Whether all branches that were compared are equal; in float32 but for numeric ties."""
    number = counts(results)
    tokens = number["equal_tokens"]
    ties = number["tie"]
    faults = {BranchAnswer.DIFFERENT}
    if bench.dtype == "float64":
        ties = 0
        faults = {BranchAnswer.DIFFERENT, BranchAnswer.TIE}
    wrong = [_difference(result) for result in results if result.result in faults]
    figures |= {
        "branches": number["branches"],
        "equal": number["equal"],
        "tokens": tokens,
        "ties": ties,
        "refused": number["unfinished"],
        "differences": len(wrong),
    }
    text = (
        f"{title}: {tokens} tokens in {number['equal']} of {number['branches']} branches are equal"
    )
    text += f", {ties} numeric ties" if ties else ""
    passed = not wrong and tokens > 0
    return Check(name, passed, figures, "; ".join([text, *wrong[:SHOWN]]))


def _difference(result: BranchComparison) -> str:
    there = result.difference
    if there is None:
        return f"branch {result.branch} stands behind other ids"
    margin = "" if there.margin is None else f" (margin {there.margin:.1e})"
    tokens = f"{there.other} and not {there.reference}"
    return f"branch {result.branch}, token {there.position + 1}: {tokens}{margin}"


NEAR = {"float32": 1e-4, "float64": 1e-9}
"""How far scores may lie apart, absolutely."""
BUDGETS = (1, 2, 7)


def beam_checks(bench: Bench) -> Iterator[Check]:
    """Whole prompts, then small budgets, and searches that end early."""
    bench.tell("beam search ...")
    budget = bench.changed().options.max_new_tokens or bench.extent.gate_tokens
    # All prompts together: searches come and go.
    whole = Trial(
        tokens=min(budget, bench.extent.tokens or budget), prompts=bench.prompts, stops=None
    )
    yield _beam_check(bench, "beam/prompts", "beam search of transformers", [whole])
    pair = Trial(prompts=bench.prompts[:2])
    budgets = [replace(pair, tokens=budget) for budget in BUDGETS]
    yield _beam_check(bench, "beam/budgets", f"budgets of {BUDGETS} tokens", budgets)
    answer = probe(bench, Trial(prompts=bench.prompts[:1])).branches[0].tokens
    half = len(answer) // 2
    stops = [answer[len(answer) // 3 :: 5], answer[half : half + 1]]
    early = [replace(pair, stops=frozenset(ids)) for ids in stops]
    yield _beam_check(bench, "beam/stops", "an answer's own tokens as stop ids", early)


def _beam_check(bench: Bench, name: str, title: str, trials: list[Trial]) -> Check:
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
    """The difference of the scores; inf if the tokens differ."""
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
    titles = dict.fromkeys(document.title for prompt in prompts for document in prompt.documents)
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


def worker_checks(bench: Bench) -> Iterator[Check]:
    """Greedy, and sampled with one seed; all prompts at once.

    Raises:
        ClusterError: the workers cannot begin, or are lost.
    """
    heat = bench.job.program.graph.sampling.temperature or 1.0
    sampled = (*MATCH, f"sampling.temperature={heat}")
    extent = bench.extent
    prompts = [*bench.prompts[: bench.extent.drawn_prompts]]
    # One whose prefix is long enough to be brought to others instead of being read by each.
    prompts.append(Prompt("long", " ".join(one.text for one in bench.prompts)))
    for name, sets in {"greedy": (GREEDY,), f"temperature {heat:g}": sampled}.items():
        bench.tell(f"on workers, {name} ...")
        job = bench.changed(*sets, tokens=extent.drawn_tokens, seed=FIRST_SEED)
        side = bench.side(job)
        tally = TeacherTally(bench.reference, bench.dtype)
        requests, figures = _answered(side, prompts)
        for prompt, request in zip(prompts, requests, strict=True):
            tally.hold(side, request, repeated(bench, side, prompt))
        title = f"{name}, transformers, token by token"
        moved = figures["regroup"]["bytes"]
        lost = figures["lost"]
        more = f"; {moved} bytes of prefixes brought, {number_of(lost, 'worker')} lost"
        counted = {"workers": len(figures["workers"]), "regroup_bytes": moved, "lost": lost}
        yield tally.check(f"workers/{name}", title, more, **counted)


def _answered(side: Side, prompts: Sequence[Prompt]) -> tuple[list[Request], dict[str, Any]]:
    """What workers have written, and `cluster` of its metrics."""
    with on_workers(divided(side.job)) as (session, directed):
        run, recorder = directed(session, prompts, None)
        while run.step():
            pass
        return run.board["branches"].requests, recorder.figures(run.board)["cluster"]

"""Whole answers, greedy and sampled: every branch holds the tokens that transformers decodes.

Sampled text is that of ``accept: match``: one seed gives one text. The twin of a graph decodes
without a drafter, one branch after another. Its tokens are held to transformers' logits with the
processors and coins of the ops, the graph's tokens to the twin's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...states.request import Branch, Finish, Request
from ...states.sampling import rules_of
from ..bench.equal import BranchAnswer, BranchComparison, GraphPair, compare_branches, counts
from ..bench.sides import ComparedPrompt, Side, answer_all
from ..prepare.inputs import Prompt
from ..record.report import answers_of
from ..run.runner import StopSignal
from ..run.scoring import contexts
from .teacher import Repeat, TeacherTally, repeat_in_float64
from .workbench import SHOWN, Bench, Check

GREEDY = "sampling.temperature=0"
MATCH = ("sampling.accept=match", "sampling.skip_sample_adjustment=false")
HEATED = (*MATCH, "sampling.temperature=1.0")
FILTERS = ("sampling.top_k=20", "sampling.top_p=0.9")
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
    for place, (own, token) in enumerate(zip(branch.tokens, text, strict=False), 1):
        if own != token:
            return f"{token} at {place}, the answer has {own}"
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
    own = (*MATCH, f"sampling.temperature={heat}")
    filtered = f"{name}, top_k 20, top_p 0.9"
    settings = {name: own, filtered: (*own, *FILTERS), "temperature 1": HEATED}
    for name, sets in settings.items():
        tally = TeacherTally(bench.reference, bench.dtype)
        yield _twins(bench, name, sets, tally)
        title = f"{name}, {seeds} seeds, drawn from transformers' logits"
        yield tally.check(f"sampled/{name}/own", title, seeds=seeds)


def _twins(bench: Bench, name: str, sets: tuple[str, ...], tally: TeacherTally) -> Check:
    """The graph and its twin; the twin is held to transformers."""
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
    alone = ("drafter.kind=none", *order, "layout.order=fcfs")
    twin = bench.side(bench.changed(*sets, *alone, seed=seed, tokens=most), "A")
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
    wrong = [_difference(one) for one in results if one.result in faults]
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


def _difference(one: BranchComparison) -> str:
    there = one.difference
    if there is None:
        return f"branch {one.branch} stands behind other ids"
    margin = "" if there.margin is None else f" (margin {there.margin:.1e})"
    tokens = f"{there.other} and not {there.reference}"
    return f"branch {one.branch}, token {there.position + 1}: {tokens}{margin}"

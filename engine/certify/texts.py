"""Whole answers, greedy and sampled: every branch holds the tokens that transformers decodes.

Sampled text (``accept: match``) is compared with that of the graph's twin, which has no drafter,
and the twin's with transformers' logits under the processors and random numbers of the ops."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from scipy.special import gammaincc  # type: ignore[import-untyped]
from torch import Tensor

from ...states.request import Branch, Finish, Request
from ...states.sampling import rules_of
from ...states.text.tokens import PromptTokens
from ...states.yaml.source import number_of
from ..bench.experiment import outline_of
from ..bench.sides import (
    BranchAnswer,
    BranchComparison,
    ComparedPrompt,
    GraphPair,
    Side,
    compare_branches,
    counts,
)
from ..prepare.files import SHIPPED
from ..prepare.inputs import Prompt, read_file
from ..run.scoring import contexts
from ..run.writer import answers_of
from ..workers.start import divided, on_workers
from .gates import Rig, Trial, neutral_sampling
from .reference import Bench, Check, Repeat, TeacherTally, judged

GREEDY = "sampling.temperature=0"
MATCH = ("sampling.accept=match", "sampling.skip_sample_adjustment=false")
HEATED = (*MATCH, "sampling.temperature=1.0")
SAMPLING_FILTERS = ("sampling.top_k=20", "sampling.top_p=0.9")
FIRST_SEED = 1
Answered = Iterable[tuple[GraphPair, ComparedPrompt]]  # by a graph and its twin


def greedy_checks(bench: Bench) -> Iterator[Check]:
    """The graph as it is, but greedy: by teacher forcing, and by `generate` on a few prompts."""
    by_teacher, by_generate = (bench.tally() for _ in range(2))
    side = bench.side(bench.changed(GREEDY, tokens=bench.extent.tokens))
    requests: list[Request] = []
    for answer in bench.answers([side], bench.prompts):
        requests.append(answer.runs["A"].requests[0])
        repeat = bench.repeated(side, answer.prompt)
        by_teacher.hold(side, requests[-1], repeat)
        if len(requests) <= bench.extent.generated:
            bench.tell(f"generate: prompt {len(requests)} ...")
            _hold_generated(side, requests[-1], by_generate, repeat)
    title = "greedy decoding of transformers, token by token"
    yield by_teacher.check("greedy/teacher forcing", title)
    title = "`generate` of transformers, outlines with their grammar"
    yield by_generate.check("greedy/generate", title)
    # What people read holds no text of control tokens.
    markers = list(getattr(side.session.models.tokenizer, "all_special_tokens", ()))
    answers = answers_of(requests, side.session.prompts)
    texts = [section.text for answer in answers for section in answer.sections]
    texts += [answer.text for answer in answers]
    found = sorted({marker for marker in markers for text in texts if marker in text})
    words = f"no text of {len(markers)} control tokens in {len(texts)} texts"
    figures = {"texts": len(texts), "markers": len(markers), "found": len(found)}
    wrong = [f"found {', '.join(found)}"] if found else []
    yield judged("greedy/no marker text", words, figures, wrong)


def _hold_generated(side: Side, request: Request, tally: TeacherTally, repeat: Repeat) -> None:
    """Branches whose rules and visibility `generate` has too."""
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
            pairs = enumerate(zip(branch.tokens, text, strict=False), 1)
            unequal = (f"{b} at {at}, the answer has {a}" for at, (a, b) in pairs if a != b)
            unlike = next(unequal, f"{len(text)} tokens, the answer has {len(branch.tokens)}")
            tally.wrong.append(f"{branch.name}: `generate` writes {unlike}")


def sampled_checks(bench: Bench) -> Iterator[Check]:
    """The graph against its twin, the twin against transformers: own sampling, filtered, heat 1."""
    heat = bench.graph.sampling.temperature or 1.0
    seeds = bench.extent.seeds
    own = (*MATCH, f"sampling.temperature={heat}")
    settings: dict[str, Sequence[str]] = {f"temperature {heat:g}": own}
    settings[f"temperature {heat:g}, top_k 20, top_p 0.9"] = (*own, *SAMPLING_FILTERS)
    settings["temperature 1"] = HEATED
    for name, sets in settings.items():
        tally = bench.tally()
        results: list[BranchComparison] = []
        for pair, answer in _answered(bench, sets, seeds, bench.drawn_prompts):
            results += compare_branches(pair, answer)
            repeat = bench.repeated(pair.reference, answer.prompt)
            tally.hold(pair.reference, answer.runs["A"].requests[0], repeat)
        title = f"{name}, {seeds} seeds, with its drafter and without one"
        yield _equality(bench, f"sampled/{name}/twin", title, results, seeds=seeds)
        title = f"{name}, {seeds} seeds, drawn from transformers' logits"
        yield tally.check(f"sampled/{name}/own", title, seeds=seeds)


def _answered(bench: Bench, sets: Sequence[str], seeds: int, prompts: Sequence[Prompt]) -> Answered:
    """Prompts answered with each seed by the graph, and by its twin, the reference: without a
    drafter, one branch after another in one sequence, in reading order."""
    most = bench.extent.drawn_tokens
    slots = f"layout.kv_slots={bench.graph.layout.kv_slots}"
    order = ("layout.max_num_branches=1", "layout.order=fcfs")
    plain = ("drafter.kind=none", "layout.kind=bim", slots, *order)
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        twin = bench.side(bench.changed(*sets, *plain, seed=seed, tokens=most), "A")
        graph = bench.side(bench.changed(*sets, seed=seed, tokens=most), "B")
        for answer in bench.answers([twin, graph], prompts):
            yield GraphPair(twin, graph), answer


def _equality(
    bench: Bench, name: str, title: str, results: Sequence[BranchComparison], **figures: float
) -> Check:
    number = counts(results)
    tokens = number["equal_tokens"]
    exact = bench.dtype == "float64"
    faults = [BranchAnswer.DIFFERENT, BranchAnswer.TIE] if exact else [BranchAnswer.DIFFERENT]
    ties = 0 if exact else number["tie"]
    wrong = []
    for result in (result for result in results if result.result in faults):
        there = result.difference
        if there is None:
            wrong.append(f"branch {result.branch} has another context")
            continue
        margin = "" if there.margin is None else f" (margin {there.margin:.1e})"
        differing = f"{there.other} and not {there.reference}{margin}"
        wrong.append(f"branch {result.branch}, token {there.position + 1}: {differing}")
    figures |= {"branches": number["branches"], "equal": number["equal"], "tokens": tokens}
    figures |= {"ties": ties, "refused": number["unfinished"], "differences": len(wrong)}
    equal = f"{number['equal']} of {number['branches']} branches are equal"
    same = f", {number_of(ties, 'numeric tie')}" if ties else ""
    text = f"{title}: {number_of(tokens, 'token')} in {equal}{same}"
    return replace(judged(name, text, figures, wrong), passed=not wrong and tokens > 0)


NEAR = {"float32": 1e-4, "float64": 1e-9}  # of a score's difference
BUDGETS = (1, 2, 7)


def beam_checks(bench: Bench) -> Iterator[Check]:
    """Whole prompts, then small budgets, and searches that end early."""
    bench.tell("beam search ...")
    budget = bench.changed().options.max_new_tokens or bench.extent.gate_tokens
    # All prompts together: searches come and go.
    most = min(budget, bench.extent.tokens or budget)
    whole = Trial(tokens=most, prompts=bench.prompts, stops=None)
    yield _beam_check(bench, "beam/prompts", "beam search of transformers", [whole])
    pair = Trial(prompts=bench.prompts[:2])
    budgets = [replace(pair, tokens=budget) for budget in BUDGETS]
    yield _beam_check(bench, "beam/budgets", f"budgets of {BUDGETS} tokens", budgets)
    answer = Rig(bench).probe(Trial(prompts=bench.prompts[:1])).branches[0].tokens
    half = len(answer) // 2
    stops = [answer[len(answer) // 3 :: 5], answer[half : half + 1]]
    early = [replace(pair, stops=frozenset(ids)) for ids in stops]
    yield _beam_check(bench, "beam/stops", "an answer's own tokens as stop ids", early)


def _beam_check(bench: Bench, name: str, title: str, trials: list[Trial]) -> Check:
    tally = bench.tally()
    worst = 0.0
    near = NEAR.get(bench.dtype, NEAR["float32"])
    for run in (Rig(bench).probe(trial) for trial in trials):
        tally.prompts += len(run.requests)
        for branch, context in run.answers():
            tally.branches += 1
            tally.tokens += len(branch.tokens)
            bench.tell(f"beam search of transformers: search {tally.branches} ...")
            off = _off(bench, branch, context, bench.dtype)
            if off == inf and bench.dtype == "float32":
                # A tie, if the same search in float64 is that of transformers in float64.
                twin = next(twin for twin in run.again().branches if twin.name == branch.name)
                if _off(bench, twin, context, "float64") <= NEAR["float64"]:
                    tally.ties += 1
                    continue
            if not off <= near:
                why = "other tokens" if off == inf else f"a score {off:.1e} apart"
                tally.wrong.append(f"{branch.name}: transformers finds {why}")
            worst = max(worst, 0.0 if off == inf else off)
    more = f"; scores differ by {worst:.1e} at most"
    return tally.check(name, title, more, worst_score=worst, score_tolerance=near)


def _off(bench: Bench, branch: Branch, context: list[int], dtype: str) -> float:
    assert bench.graph.beam is not None
    search = bench.graph.beam.model_dump()
    tokens, score = bench.reference.generate(branch, context, dtype, **search)
    if branch.finish is Finish.STOP and tokens[-1] in branch.request.stop_ids:
        tokens = tokens[:-1]
    if tokens != branch.tokens:
        return inf
    return 0.0 if score is None or branch.score is None else abs(score - branch.score)


DOCUMENTS = SHIPPED / "prompts" / "documents.jsonl"  # prompts that bring what holds their answers
PARTS = 4  # of the outline that is given where parts search


def blended_checks(bench: Bench) -> Iterator[Check]:
    """For every place that documents may have in prompts, and for folded parts."""
    prompts = read_file(DOCUMENTS).items[: bench.extent.drawn_prompts]
    skeleton = bench.graph.skeleton
    for place in ("prompt",) if skeleton is None else ("prefix", "branches"):
        sets = (GREEDY, *([] if skeleton is None else [f"skeleton.documents={place}"]))
        made = bench
        if place == "branches":
            # The model's own outlines may not search; here every part does.
            titles = dict.fromkeys(document.title for p in prompts for document in p.documents)
            outline = outline_of(list(titles)[:PARTS], 60, "Search")
            made = replace(bench, job=replace(bench.job, outline=outline))
        tally = bench.tally()
        side = made.side(made.changed(*sets, "blend.plan=plain", tokens=bench.extent.drawn_tokens))
        for answer in made.answers([side], prompts):
            tally.hold(side, answer.runs["A"].requests[0], made.repeated(side, answer.prompt))
        title = f"documents in the {place}, every row computed: greedy decoding of transformers"
        yield tally.check(f"blended/{place}, nothing reused", title)
        answers = _answered(made, sets, 1, prompts)
        yield _reuse(made, place, f"documents in the {place}", answers)
    if skeleton is not None and skeleton.merge == "blend":
        # Finished parts, folded and blended, and the answer that is drawn behind them.
        seeds = bench.extent.seeds
        sets = (*HEATED, "skeleton.merge=blend")
        drawn = _answered(bench, sets, seeds, bench.drawn_prompts)
        title = f"finished parts folded, temperature 1, {seeds} seeds"
        yield _reuse(bench, "combined", title, drawn)


def _reuse(bench: Bench, name: str, title: str, answers: Answered) -> Check:
    """Equal tokens of a graph and its twin; without a reused row they prove nothing."""
    results: list[BranchComparison] = []
    reused = recomputed = 0
    for pair, answer in answers:
        results += compare_branches(pair, answer)
        for blend in answer.runs[pair.other.letter].meter.blends:
            reused += blend.reused
            recomputed += blend.picked[0] if blend.picked else 0
    title = f"{title}, {reused} rows reused, {recomputed} of them recomputed"
    title += ", with its drafter and without"
    figures = {"reused": reused, "recomputed": recomputed}
    check = _equality(bench, f"blended/{name}", title, results, **figures)
    return check if reused else replace(check, passed=False)


def worker_checks(bench: Bench) -> Iterator[Check]:
    """Greedy, and sampled with one seed; all prompts at once; raises ClusterError."""
    heat = bench.graph.sampling.temperature or 1.0
    sampled = (*MATCH, f"sampling.temperature={heat}")
    # One whose prefix is long enough to be brought to others instead of being read by each.
    long = Prompt("long", " ".join(prompt.text for prompt in bench.prompts))
    prompts = [*bench.drawn_prompts, long]
    for name, sets in {"greedy": (GREEDY,), f"temperature {heat:g}": sampled}.items():
        bench.tell(f"on workers, {name} ...")
        side = bench.side(bench.changed(*sets, tokens=bench.extent.drawn_tokens, seed=FIRST_SEED))
        tally = bench.tally()
        with on_workers(divided(side.job)) as (session, directed):
            run, recorder = directed(session, prompts, None)
            while run.step():
                pass
            requests = run.requests
            figures = recorder.figures(run.board)["cluster"]
        for prompt, request in zip(prompts, requests, strict=True):
            tally.hold(side, request, bench.repeated(side, prompt))
        title = f"{name}, transformers, token by token"
        moved = figures["regroup"]["bytes"]
        lost = figures["lost"]
        more = f"; {moved} bytes of prefixes brought, {number_of(lost, 'worker')} lost"
        counted = {"workers": len(figures["workers"]), "regroup_bytes": moved, "lost": lost}
        yield tally.check(f"workers/{name}", title, more, **counted)


# -- acceptance by rejection -----------------------------------------------------------------------
# Every answer is a request with a seed of its own, so nothing but the engine's coins is random. The
# law is put together from transformers' distributions behind every possible beginning; a high
# temperature over few tokens leaves no beginning rare, and makes drafts wrong often enough.

HEAT = 30.0
CHOICES = 3
LENGTH = 4  # the first token, a round of up to three, and what a shorter round leaves to the next
AT_ONCE = 200  # answers of a run
BEHIND = 8  # tokens of the prompt before the answers
ALPHA = 1e-6  # a correct rule has a smaller p-value once in a million changes of the seed
FEWEST = 5.0  # expected samples in a cell; rarer ones are counted together

Answer = tuple[int, ...]


def acceptance_checks(bench: Bench) -> Iterator[Check]:
    """A chi-square test over all answers of `LENGTH` tokens, for acceptance by rejection."""
    sampling = bench.graph.sampling
    if not sampling.lossless:
        text = "sampling.skip_sample_adjustment: no residual is drawn from after a rejection"
        yield Check("rejection/adjusted", False, {}, text)
    if sampling.exact:
        return
    sets = neutral_sampling(f"temperature={HEAT}", f"top_k={CHOICES}")
    side = bench.side(bench.changed(*sets, tokens=LENGTH))
    request = side.session.request(bench.prompts[0])
    ids = [*request.prefix, *request.tail][-BEHIND:]
    law: dict[Answer, float] = {(): 1.0}
    for _ in range(LENGTH):
        for beginning in [*law]:
            chance = law.pop(beginning)
            logits_V = bench.reference.logits([*ids, *beginning], bench.dtype)[-1]
            best = logits_V.double().topk(CHOICES)
            chances = (best.values / HEAT).softmax(-1).tolist()
            for token, share in zip(best.indices.tolist(), chances, strict=True):
                law[*beginning, token] = chance * share
    counts, accepted = _answers(bench, side, ids)
    strange = sum(count for answer, count in counts.items() if answer not in law)
    counts_X = torch.tensor([counts[answer] for answer in law], dtype=torch.float64)
    chances_X = torch.tensor(list(law.values()), dtype=torch.float64)
    answers = bench.extent.answers
    statistic, df = chi_square(counts_X, answers * chances_X)
    p = p_value(statistic, df)
    figures = {"statistic": statistic, "df": df, "p_value": p, "samples": answers, "alpha": ALPHA}
    figures |= {"impossible": strange, "accepted": accepted}
    text = (
        f"{answers} answers of {LENGTH} tokens through whole runs, {accepted} drafts accepted, "
        f"against the law from transformers' logits: chi2 {statistic:.1f} (df {df}), p {p:.1e}"
    )
    text += f"; {strange} answers cannot be" if strange else ""
    yield Check("rejection/whole runs", p >= ALPHA and not strange, figures, text)


def _answers(bench: Bench, side: Side, ids: Sequence[int]) -> tuple[Counter[Answer], int]:
    counts: Counter[Answer] = Counter()
    accepted = 0
    answers = bench.extent.answers
    shared: Any = {"prefix": PromptTokens(), "tail": PromptTokens(tuple(ids))}
    shared |= {"stop_ids": frozenset(), "budget": LENGTH, "outline_budget": 0}
    shared["sampling"] = side.session.sampling
    for first in range(0, answers, AT_ONCE):
        bench.tell(f"whole runs: answer {first} of {answers} ...")
        seeds = range(first, min(first + AT_ONCE, answers))
        requests = [Request(str(seed), seed, "?", **shared) for seed in seeds]
        core = side.session.start(requests, lambda event: None)
        while core.step():
            pass
        for branch in (b for request in core.requests for b in request.branches):
            counts[tuple(branch.tokens)] += 1
            accepted += sum(branch.accepted)
    return counts, accepted


def chi_square(seen_X: Tensor, expected_X: Tensor) -> tuple[float, int]:
    """Pearson's (statistic, degrees of freedom) of counts; infinite if the impossible was seen. The
    rarest cells are joined until they expect `FEWEST` samples."""
    possible_X = expected_X > 0
    if (seen_X[~possible_X] > 0).any():
        return float("inf"), int(possible_X.sum().item()) - 1
    expected_C, order_C = expected_X[possible_X].sort()
    seen_C = seen_X[possible_X][order_C]
    rare = int((expected_C < FEWEST).sum().item())
    if rare:
        rare = max(rare, int((expected_C.cumsum(0) < FEWEST).sum().item()) + 1)
        seen_C = torch.cat([seen_C[:rare].sum(0, keepdim=True), seen_C[rare:]])
        expected_C = torch.cat([expected_C[:rare].sum(0, keepdim=True), expected_C[rare:]])
    return ((seen_C - expected_C) ** 2 / expected_C).sum().item(), len(expected_C) - 1


def p_value(statistic: float, df: int) -> float:
    return float(gammaincc(df / 2, statistic / 2))

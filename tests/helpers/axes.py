"""Whole runs as rows of one table, and the one property that every row has.

A `Case` is a row: its fields are the axes, its defaults the plainest run. `draw_cases` draws rows
in which any two values of two axes meet; regression tests name the few fields that matter to them.
`check_case` runs a row and holds it to the property:

* every branch's tokens are the target's plain decoding of the branch's context under the same
  settings: transformers' scores behind ids that are put together here, the sampling rules, and the
  coins of the positions; where cached rows are reused or a mask is special, a run without drafter;
* the pools are intact after every phase, and hold nothing but cached rows at the end;
* the counters add up: one read per forward, and every token in one round of one branch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from helpers import support
from helpers.drafters import SETTINGS, drafting
from helpers.folds import FoldBook, fold_of
from helpers.reading import DOCUMENTS
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.recorder import Recorder
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.ops.sampling.coins import branch_key, perturbed, token_keys
from specsot.ops.sampling.processors import Sampler, columns, process, take_in_
from specsot.ops.sampling.settings import SamplingRules
from specsot.states.request import COMPLETE, Branch, Finish, Request
from specsot.states.text.outline import Outline, Point
from specsot.states.text.prompts import NOTHING
from specsot.states.text.tokens import PromptTokens

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"seed": 1, "context": 2.0},
    "qwen2": {"context": 1.5},
    "qwen3": {"context": 1.5},
    "mistral": {"context": 1.5, "window": 17},
    "mistral, narrow": {"context": 1.5, "window": 5},
    "phi3": {"context": 1.5, "window": 17},
    "gemma3_text": {"context": 1.5, "window": 17},
    "olmo2": {"context": 1.5},
    "qwen3_moe": {"context": 1.5},
    "smollm3": {"context": 1.5},
}
"""Models whose text hangs on what they read, so that wrong rows and positions show."""
GRAPHS = {
    "answer": "autoregressive",
    "samples": "autoregressive",
    "parts": "bim_plain",
    "written": "bim_plain",
    "documents": "bim_plain",
    "read": "bim_plain",
    "blended": "bim_blend_eagle",
    "combined": "bim_blend_merge",
    "folded": "bim_blend_merge",
    "attended": "bim_attend_merge",
}
"""What is decoded -> the graph: `documents` are found by parts, `read` by the outline. The target's
own scores cannot judge the last ones but `combined`: their rows are not those of one text."""
FORWARDS = ("prefill", "skeleton", "parallel_prefill", "verify", "continuous_decode")
TWINNED = ("blended", "folded", "attended")
DOCUMENTED = ("documents", "read", "blended")
PROMPT_SIZES = {"one": (1, 1), "short": (1, 12), "long": (60, 120)}
RULES: dict[str, tuple[str, ...]] = {
    "all": (),
    "top_k": ("top_k=3",),
    "top_p": ("top_p=0.8",),
    "min_p": ("min_p=0.05",),
    "filters": ("top_k=12", "top_p=0.95", "min_p=0.01", "filter_order=filters_first"),
    "penalties": ("repetition_penalty=1.3", "presence_penalty=0.4", "frequency_penalty=0.3"),
    "biases": ("logit_bias={3: 2.5, 7: -1.0}", "banned=[5, 11]", "min_new_tokens=4"),
    "everything": ("top_k=20", "top_p=0.9", "repetition_penalty=1.2", "forced=[9, 4]"),
}
REJECTING = {
    ("vanilla", 0): ("chain", "sampled"),
    ("adaptive", 2): ("block", "sampled"),
    ("dflash", 0): ("block", "sampled"),
    ("dflash", 1): ("topk", ""),
    ("eagle3", 0): ("topk", ""),
    ("eagle3", 2): ("topk", ""),
    ("eagle1", 0): ("without_replacement", "distinct"),
    ("eagle1", 1): ("with_replacement", "sampled"),
    ("ngram", 1): ("topk", ""),
    ("recycle", 1): ("topk", ""),
    ("suffix", 0): ("topk", ""),
    ("medusa", 0): ("topk", ""),
    ("mtp", 0): ("topk", ""),
}
"""Drafters whose drafts can be judged by rejection: the rule, and how they draw."""
OF_OTHERS = (("eagle3", 2), ("recycle", 1), ("suffix", 0))
"""Those of REJECTING whose drafts depend on the branches that run at the same time, or ran before;
with several requests these differ between layouts, and with rejection so does the text."""
CHOICES = (("none", 0), *((kind, n) for kind, sets in SETTINGS.items() for n in range(len(sets))))
PLAN = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\n3|50|-|-|Three\nEND"
STOP = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table.

    drafter: a kind and the number of its settings. rows_per_round: shared by all trees; 0: none.
    arrivals: `together`; the last request `late`; `busy`: six requests at random steps, of which
    some are cancelled. admission: `forced` preempts at random. chunk: rows of a forward; 0: all."""

    family: str = "llama"
    dtype: str = "float32"
    work: str = "parts"
    parts: int = 3
    deps: str = "none"
    share: str = "outline"
    prompts: str = "short"
    drafter: tuple[str, int] = ("none", 0)
    rows_per_round: int = 0
    layout: str = "bim"
    block_size: int = 1
    attention: str = "auto"
    order: str = "fcfs"
    max_num_branches: int = 8
    kv_slots: int = 3000
    policy: str = "fcfs"
    admission: str = "reserved"
    chunk: int = 0
    prefix_cache: bool = True
    arrivals: str = "together"
    requests: int = 2
    stops: tuple[int, ...] = (STOP,)
    budget: int = 10
    temperature: float = 0.0
    rules: str = "all"
    accept: str = "match"

    def __str__(self) -> str:
        own = [getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default]
        return "-".join(str(value).replace(" ", "") for value in own) or "plain"

    @property
    def is_exact(self) -> bool:
        """Whether transformers' scores judge every token."""
        return self.work not in TWINNED and self.accept == "match"

    def plain(self) -> "Case":
        case = replace(self, layout="bim", block_size=1, attention="dense")
        if self.accept == "rejection":  # the text depends on what is drafted
            return case
        case = replace(case, drafter=("none", 0), rows_per_round=0, order="fcfs", policy="fcfs")
        case = replace(case, max_num_branches=8, kv_slots=3000, admission="reserved", chunk=0)
        return replace(case, prefix_cache=False, arrivals="together")


AXES: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "dtype": ("float32", "float64"),
    "work": tuple(GRAPHS),
    "parts": (1, 2, 3, 5, 8),
    "deps": ("none", "chain", "fan"),
    "share": ("outline", "prompt"),
    "prompts": tuple(PROMPT_SIZES),
    "drafter": CHOICES,
    "rows_per_round": (0, 7),
    "layout": ("bim", "batching", "paged"),
    "block_size": (1, 16, 64),
    "attention": ("auto", "dense", "grouped", "cascade"),
    "order": ("fcfs", "longest_first", "shortest_first"),
    "max_num_branches": (1, 2, 3, 8),
    "kv_slots": (360, 3000),
    "policy": ("fcfs", "max_throughput", "sot_priority"),
    "admission": ("reserved", "optimistic", "forced"),
    "chunk": (0, 7, 64),
    "prefix_cache": (True, False),
    "arrivals": ("together", "late", "busy"),
    "requests": (1, 2, 4),
    "stops": ((STOP,), (), (0, STOP, 3, 17), (*range(4, 130),)),
    "budget": (1, 2, 3, 4, 7, 10, 16, 24),
    "temperature": (0.0, 0.8, 2.0),
    "rules": tuple(RULES),
    "accept": ("match", "rejection"),
}


def settled(case: Case) -> Case:
    """The nearest case that a graph can express, and whose text its settings do not change."""
    if case.work in TWINNED:  # rows are blended by the forward that computes them
        case = replace(case, admission="reserved", chunk=0, prompts="short", kv_slots=3000)
        case = replace(case, arrivals="together" if case.arrivals == "busy" else case.arrivals)
    if case.work == "combined":
        case = replace(case, admission="reserved", kv_slots=3000)
    if case.work == "read":  # by a prompt with all documents
        case = replace(case, kv_slots=3000)
    if case.work == "samples" and not case.temperature:
        case = replace(case, temperature=0.8)
    if case.work == "written":
        case = replace(case, parts=3)
    if case.layout == "batching":
        case = replace(case, block_size=1)
    if case.kv_slots < 3000:
        case = replace(case, parts=min(case.parts, 3), prompts="short", budget=min(case.budget, 10))
    trees = case.drafter[0] not in ("none", "vanilla", "adaptive") and "auto" not in str(
        _drafter_sets(case)
    )
    if not trees:
        case = replace(case, rows_per_round=0)
    if not case.temperature:
        case = replace(case, rules="all", accept="match")
    if case.accept == "rejection" and case.drafter not in REJECTING:
        case = replace(case, accept="match")
    if case.accept == "rejection":  # a round's coins are those of its root and its tree
        case = replace(case, work="parts", admission="reserved", chunk=0, arrivals="together")
        case = replace(case, rows_per_round=0, prefix_cache=False, kv_slots=3000)
        case = replace(case, requests=1) if case.drafter in OF_OTHERS else case
    return replace(case, dtype="float64") if case.temperature else case


def draw_cases(seed: int = support.SEED, **axes: Sequence[Any]) -> list[Case]:
    """Rows in which any two values of two axes meet; axes: instead of those of the table."""
    drawn = (settled(Case(**row)) for row in support.pairwise(AXES | axes, seed))
    return list({str(case): case for case in drawn}.values())


# -- sessions -------------------------------------------------------------------------------------


class CaseBook(FoldBook):
    """Questions `stem/end` begin with the ids of their stem; part prompts have the case's size."""

    size = PROMPT_SIZES["short"]
    plan = ""

    def skeleton(self, question: str, documents: PromptTokens = NOTHING) -> support.Halves:
        stem = question.partition("/")[0]
        prefix, tail = super().skeleton(question, documents)
        return NOTHING + self.ids(f"stem {stem}", 70, 76) + prefix, tail

    def own(self, point: Point) -> list[int]:
        return self.ids(f"own {point.id} {point.title}", *self.size)

    def decode(self, ids: Sequence[int]) -> str:
        return self.plan or super().decode(ids)


def book_of(case: Case, made: support.Tiny) -> CaseBook:
    book = CaseBook(made.models.target.vocab_size, case.share, case.stops)
    book.size = PROMPT_SIZES[case.prompts]
    book.plan = PLAN if case.work == "written" else ""
    return book


def outline_for(case: Case) -> Outline | None:
    """chain: 3 needs 2, 2 needs 1; fan: the last part needs all that are odd."""
    if case.work in ("answer", "samples", "written"):
        return None
    needs: dict[int, tuple[int, ...]] = {}
    if case.deps == "chain":
        needs = {i: (i - 1,) for i in range(2, min(case.parts, 4) + 1)}
    elif case.deps == "fan" and case.parts > 1:
        needs = {case.parts: tuple(range(1, case.parts, 2))}
    titles = ["Part"] * case.parts
    tool = None
    if case.work in DOCUMENTED:
        titles = ["bees rain", "rain tea", "iron", "tea iron", "bees", "salt", "moss", "rain"]
        tool = "Search"
    points = tuple(
        Point(i, 10 + i * 50 % 80, tool, needs.get(i, ()), f"{titles[i - 1]} {i}")
        for i in range(1, case.parts + 1)
    )
    return Outline("plan", points, (), "ok")


def _drafter_sets(case: Case) -> tuple[str, ...]:
    kind, number = case.drafter
    return () if kind == "none" else SETTINGS[kind][number]


def sets_of(case: Case) -> list[str]:
    sets = ["limits.max_new_tokens=1"]  # the session has its own budget
    sets += [f"layout.{key}={getattr(case, key)}" for key in ("order", "max_num_branches")]
    sets += [f"layout.kind={case.layout}", f"layout.kv_slots={case.kv_slots}"]
    sets += [f"attention={case.attention}", f"drafter.kind={case.drafter[0]}"]
    sets += [*_drafter_sets(case), f"scheduler.policy={case.policy}"]
    sets += [f"drafter.rows_per_round={case.rows_per_round}"] if case.rows_per_round else []
    sets += [f"layout.block_size={case.block_size}"] if case.layout != "batching" else []
    sets.append(f"scheduler.prefix_cache={str(case.prefix_cache).lower()}")
    if case.admission == "optimistic":
        sets.append("scheduler.admission=optimistic")
    if case.chunk:
        sets.append(f"scheduler.max_num_batched_tokens={case.chunk}")
    if case.temperature:
        rules = (f"temperature={case.temperature}", *RULES[case.rules])
        sets += [f"sampling.{rule}" for rule in rules]
    if case.accept == "rejection":
        rule, draws = REJECTING[case.drafter]
        sets += ["sampling.accept=rejection", f"sampling.rule={rule}"]
        sets += [f"drafter.draws={draws}"] if draws else []
    if case.work == "samples":
        sets.append("limits.n=3")
    if GRAPHS[case.work] != "autoregressive":
        sets += [f"skeleton.share={case.share}", "skeleton.grammar=false"]
        sets += ["skeleton.max_tokens=20", "skeleton.direct_tokens=13"]
    if case.work in ("documents", "read"):
        sets.append(f"skeleton.documents={'branches' if case.work == 'documents' else 'prefix'}")
    if case.work in ("blended", "folded"):
        sets += ["blend.min_tokens=0", "blend.ratios=[0.3]"]
    if case.work == "combined":
        sets.append("skeleton.merge=plain")
    return sets


def target_of(case: Case, make: support.Make) -> support.Tiny:
    return make(case.family.partition(",")[0], case.dtype, **FAMILIES[case.family])


def session_of(case: Case, made: support.Tiny, book: Any = None) -> Session:
    kind = case.drafter[0]
    return Session(
        open_graph(GRAPHS[case.work], tuple(sets_of(case)), support.graphs.table),
        made.models if kind == "none" else drafting(made, kind),
        max_new_tokens=case.budget,
        outline=outline_for(case),
        prompts=book or book_of(case, made),
    )


def prompts_of(case: Case) -> list[Prompt]:
    """Prompts with equal beginnings, budgets that differ, and documents where some are read."""
    texts = ["a/7", "a/7", "b/2", "a/8", "b/2", "c/1"][: 6 if case.arrivals == "busy" else None]
    number = len(texts) if case.arrivals == "busy" else case.requests
    documents = DOCUMENTS[:6] if case.work in DOCUMENTED else ()
    return [
        Prompt(
            str(n),
            texts[n],
            seed=n % 3,
            max_new_tokens=None if n % 2 == 0 else min(7, case.budget),
            documents=documents,
        )
        for n in range(number)
    ]


# -- runs -----------------------------------------------------------------------------------------


def play(session: Session, case: Case) -> tuple[EngineCore, Recorder]:
    """A whole run of a case; pools are checked after every phase."""
    prompts, recorder = prompts_of(case), Recorder(str, None)
    draw = random.Random(str(case))
    first = {"together": len(prompts), "late": max(len(prompts) - 1, 1), "busy": 1}
    run = support.start(session, prompts[: first[case.arrivals]], recorder)
    recorder.attach(run)
    if case.admission == "forced":
        preempt_at_random(run, draw)
    coming = prompts[first[case.arrivals] :]
    while not run.finished:
        if coming and run.state != "idle" and _is_time(run, case, draw):
            run.manager.lifecycle.submit(session.request(coming.pop(0)))
        if case.arrivals == "busy" and draw.random() < 0.02:
            run.manager.table.cancel(draw.choice(run.requests).key)
        support.drive(run, until=lambda run, steps=run.steps: run.steps > steps)
    return run, recorder


def _is_time(run: EngineCore, case: Case, draw: random.Random) -> bool:
    if case.arrivals == "busy":
        return draw.random() < 0.15 or run.state == "merge"
    return run.state == "merge" or any(len(branch.tokens) > 3 for branch in run.branches)


def preempt_at_random(run: EngineCore, draw: random.Random, chance: float = 0.3) -> None:
    """As if rows ran out before some rounds."""
    scheduler = run.manager.scheduler
    scheduler.admission.optimistic = True
    fits = scheduler._free_rows_for_round_

    def free_rows() -> None:
        while draw.random() < chance and scheduler._free_rows_():
            pass
        fits()

    scheduler._free_rows_for_round_ = free_rows  # type: ignore[method-assign]


def tokens_by_branch(run: EngineCore) -> dict[str, list[tuple[list[int], str]]]:
    return {
        request.key: [(list(b.tokens), str(b.finish)) for b in request.all_branches()]
        for request in run.requests
        if not request.cancelled
    }


# -- the property ---------------------------------------------------------------------------------


def check_case(case: Case, make: support.Make) -> EngineCore:
    """Run a case and raise AssertionError where it has not the property."""
    made = target_of(case, make)
    session = session_of(case, made)
    run, recorder = play(session, case)
    check_counters(run, recorder, case)
    if case.is_exact:
        for request in run.requests:
            if not request.cancelled:
                check_request(request, session, made.reference, read=case.work in DOCUMENTED)
        return run
    twin, _ = play(session_of(case.plain(), made), case.plain())
    expected = tokens_by_branch(twin)
    found = tokens_by_branch(run)
    assert found == {key: expected[key] for key in found}
    made.reference.tally.tokens += sum(len(ids) for each in found.values() for ids, _ in each)
    return run


def check_counters(run: EngineCore, recorder: Recorder, case: Case) -> None:
    meter, branches = recorder.meter, [b for r in run.requests for b in r.all_branches()]
    support.check_rows(run)
    for pool in run.manager.pools:
        assert pool.needed_length == 0, "a finished run holds rows"
        causes = {"fork", "keep", "prefix", "attend"} if case.layout == "batching" else set()
        assert set(pool.ledger.bytes) <= causes | {"fold"}, pool.ledger.bytes
    forwards = [*FORWARDS, *(["merge"] if "merge" in GRAPHS[case.work] else [])]
    assert run.board["host"].reads == sum(meter.visits[state] for state in forwards)
    assert run.board["host"].full_reads == 0
    if not any(request.cancelled for request in run.requests):
        assert meter.tokens == sum(len(branch.tokens) for branch in branches)
        assert meter.accepted == sum(sum(branch.accepted) for branch in branches)
    assert meter.accepted <= meter.drafted
    assert len(run.answers) == len(run.requests) and all(r.finished for r in run.requests)
    for branch in branches:
        if branch.finish is Finish.CANCELLED:
            continue
        assert branch.finish in COMPLETE, f"{branch.name}: {branch.note}"
        assert len(branch.tokens) <= branch.budget
        rounds = list(zip(branch.accepted, branch.emitted, strict=True))
        assert all(emitted == accepted + 1 for accepted, emitted in rounds[:-1])
        assert all(emitted <= accepted + 1 for accepted, emitted in rounds)
        first = bool(branch.tokens)  # drawn behind the prompt
        assert len(branch.tokens) == first + sum(branch.emitted)


def check_request(
    request: Request, session: Session, reference: support.Reference, *, read: bool
) -> None:
    """read: its documents are among its rows, where the engine put them."""
    book, skeleton = session.prompts, session.program.graph.skeleton
    rules = session.program.graph.sampling.rules()
    if read:
        pairs = [(b, [*request.context, *b.prompt]) for b in request.branches]
    else:
        pairs = support.contexts(request, book, skeleton is None)
    for branch, context in pairs:
        if branch.combines:
            context = [*request.context, *fold_of(request, book)]
        if rules.temperature:
            drawn = replace(rules, forced=(), min_new_tokens=0) if branch.is_root else rules
            check_drawn(branch, context, drawn, reference)
        else:
            reference.check(branch, context, book.stop_ids)


def check_drawn(
    branch: Branch, context: Sequence[int], rules: SamplingRules, reference: support.Reference
) -> None:
    """Every token is the best of the target's processed scores plus its coins' noise."""
    logits_QV = reference.logits([*context, *branch.tokens], reference.dtype)[len(context) - 1 :]
    stops = branch.request.stop_ids
    for place, logits_V in enumerate(logits_QV):
        best = int(_order(branch, context, rules, logits_V, place=place).argmax())
        if place < len(branch.tokens):
            assert branch.tokens[place] == best, f"{branch.name}: token {place}"
        elif branch.finish is Finish.STOP:
            assert best in stops, f"{branch.name}: stopped too early"
    assert not set(branch.tokens) & set(stops)
    reference.tally.tokens += len(branch.tokens)


def _order(
    branch: Branch,
    context: Sequence[int],
    rules: SamplingRules,
    logits_V: torch.Tensor,
    *,
    place: int,
) -> torch.Tensor:
    """[V]: the values whose best id is the token at a place of the answer."""
    size, row = len(logits_V), torch.zeros(1, dtype=torch.int64)
    seen_1V, counts_1V = torch.zeros(1, size).bool(), torch.zeros(1, size).int()
    seen_1V[0, list(context)] = True
    answer = torch.tensor(branch.tokens[:place], dtype=torch.int64)
    take_in_(seen_1V, counts_1V, torch.zeros_like(answer), answer)
    none_11 = row[:, None][:, :0]
    rows = columns([rules], [branch.request.stop_ids], size, torch.device("cpu"))
    sampler = Sampler(rows, row, seen_1V, counts_1V, answered_S=row + place)
    scores_1V = process(logits_V[None], sampler, row, tokens_RC=none_11, path_RC=none_11.bool())
    if rows.all_greedy:
        return scores_1V[0]
    key = row + branch_key(branch.request.seed, branch.index)
    return perturbed(scores_1V, token_keys(key, row + len(context) + place))[0]

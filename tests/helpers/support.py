"""What several tests share: prompts as ids, models, and the reference that answers are held to."""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from specsot.engine.models import Models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.models.drafters.eagle import Eagle3
from specsot.models.load.weights import load_eagle3, load_target
from specsot.ops.kv.pool import FREE
from specsot.ops.registry import OpTable, read_table
from specsot.states.graph.load import rooms
from specsot.states.request import OPEN_STAGES, Branch, Finish, Request, Stage
from specsot.states.text.outline import Outline, Point, parse_outline
from specsot.states.text.prompts import NOTHING
from specsot.states.text.tokens import PromptTokens

SEED = int(os.environ.get("SPECSOT_TEST_SEED", "20"))  # what the grids' parts are drawn by
GOLDEN = Path(__file__).parents[1] / "golden"
PLAIN = ("autoregressive", "eagle")  # graphs without a skeleton
FULL = ("bim_plain", "bim_eagle", "batching_plain", "batching_eagle")
PAGED = ("paged_plain", "paged_eagle")
GRAPHS = (*PLAIN, *FULL)
# The same tree in every round.
FIXED = ("drafter.num_draft_tokens=6", "drafter.draft_depth=3", "drafter.top_k=4")
TREES = ("drafter.num_draft_tokens={1: 10, 2: 6, 4: 3}", "drafter.draft_depth=4", "drafter.top_k=4")
MOST_STEPS = 20_000  # transitions after which a run counts as hanging


Halves = tuple[PromptTokens, PromptTokens]


class TokenBook:
    """Prompts for models without a tokenizer: ids drawn from the text itself, so repeatable."""

    def __init__(self, vocab: int, share: str, stop_ids: Sequence[int], hoist: int = 3) -> None:
        self.vocab, self.share, self.hoist = vocab, share, hoist
        self.stop_ids = tuple(stop_ids)

    def ids(self, text: str, low: int, high: int) -> list[int]:
        draw = random.Random(text)
        return [draw.randrange(self.vocab) for _ in range(draw.randint(low, high))]

    def plain(self, question: str, documents: PromptTokens = NOTHING) -> PromptTokens:
        return self.skeleton(question)[0] + self.direct("prompt")

    def skeleton(self, question: str, documents: PromptTokens = NOTHING) -> Halves:
        tail = NOTHING + self.ids(f"tail {question}", 1, 9)
        return NOTHING + self.ids(f"prefix {question}", 3, 40), tail

    def branch(
        self,
        point: Point,
        outline: Outline,
        dep_ids: Sequence[tuple[int, Sequence[int]]],
        shared: PromptTokens = NOTHING,
        own: PromptTokens = NOTHING,
    ) -> Halves:
        quoted = [i for dep, ids in dep_ids for i in (dep, *ids)]
        return NOTHING + self.ids("hoist", 1, 1) * self.hoist, NOTHING + self.own(point) + quoted

    def own(self, point: Point) -> list[int]:
        return self.ids(f"own {point.id} {point.title}", 1, 12)

    def direct(self, share: str | None = None, documents: PromptTokens = NOTHING) -> PromptTokens:
        return NOTHING + self.ids(f"direct {share or self.share}", 1, 9)

    def outline_ids(self, points: Sequence[Point]) -> list[int]:
        return self.ids(f"outline {len(points)}", 5, 30)

    def opening(self, question: str, documents: PromptTokens = NOTHING) -> PromptTokens:
        return NOTHING

    def read_outline(self, ids: Sequence[int], **limits: Any) -> Outline:
        return parse_outline(self.decode(ids), **limits)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class FixedBook(TokenBook):
    """Plain prompts that are given: question -> ids."""

    def __init__(self, prompts: dict[str, Sequence[int]], stop_ids: Sequence[int] = ()) -> None:
        super().__init__(0, "outline", stop_ids)
        self.prompts = prompts

    def plain(self, question: str, documents: PromptTokens = NOTHING) -> PromptTokens:
        return NOTHING + self.prompts[question]


class SizedBook(TokenBook):
    """A branch's own prompt is as long as its point says."""

    def own(self, point: Point) -> list[int]:
        return self.ids(f"own {point.id}", point.length, point.length)


class PlanBook(TokenBook):
    """Reads one fixed text out of whatever ids an outline was written with."""

    text = ""

    def decode(self, ids: Sequence[int]) -> str:
        return self.text


def outline_of(count: int, deps: dict[int, tuple[int, ...]] | None = None) -> Outline:
    """A given outline of `count` branches."""
    return outline_with([10 + i * 50 % 80 for i in range(1, count + 1)], deps)


def outline_with(lengths: Sequence[int], deps: dict[int, tuple[int, ...]] | None = None) -> Outline:
    """A given outline of branches that are expected to have these lengths."""
    points = tuple(
        Point(i, length, None, (deps or {}).get(i, ()), f"Part {i}")
        for i, length in enumerate(lengths, 1)
    )
    return Outline("plan", points, (), "ok")


# -- models -----------------------------------------------------------------------------------


def tiny_models(
    target_dir: Path, drafter_dir: Path | None, stop_ids: Sequence[int], dtype: str = "float32"
) -> Models:
    kind = getattr(torch, dtype)
    target = load_target(target_dir, dtype=kind)
    drafter: Eagle3 | None = None
    if drafter_dir is not None:
        drafter = load_eagle3(drafter_dir, target, dtype=kind)
    return Models(target, drafter, None, tuple(stop_ids), torch.device("cpu"), kind)


@dataclass
class Tally:
    """How many tokens were held to transformers' own, and how many of them were numeric ties."""

    tokens: int = 0
    ties: int = 0


@dataclass
class Reference:
    """Greedy decoding by transformers, checked by teacher forcing: one forward per answer."""

    folder: Path
    dtype: torch.dtype = torch.float32
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.models: dict[torch.dtype, Any] = {}

    def model(self, dtype: torch.dtype) -> Any:
        if dtype not in self.models:
            own: Any = {"dtype": dtype, "experts_implementation": "eager"}  # for float64
            model = AutoModelForCausalLM.from_pretrained(self.folder, **own)
            self.models[dtype] = model.eval()
        return self.models[dtype]

    def logits(self, ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(dtype)(torch.tensor([list(ids)])).logits[0]

    def generate(self, context: Sequence[int], stop_ids: Sequence[int], budget: int) -> list[int]:
        """What `generate` of transformers writes after the context, the stop token included."""
        ids = torch.tensor([list(context)])
        with torch.inference_mode():
            written = self.model(self.dtype).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=budget,
                do_sample=False,
                eos_token_id=list(stop_ids),
                pad_token_id=0,
            )
        return written[0, len(context) :].tolist()

    def check(self, branch: Branch, context: Sequence[int], stop_ids: Sequence[int]) -> None:
        """Raise AssertionError at the first token that is not the target's own."""
        answer = [*branch.tokens]
        assert not set(answer) & set(stop_ids), "a stop token inside the answer"
        assert branch.finish in (Finish.STOP, Finish.LENGTH), branch.finish
        logits_QV = self.logits([*context, *answer], self.dtype)[len(context) - 1 :]
        own = logits_QV.argmax(-1).tolist()
        for place, token in enumerate(answer):
            assert own[place] == token or self.tie(context, answer[:place], token), (
                f"{branch.name}: token {place} is {token}, the target says {own[place]}"
            )
        if branch.finish is Finish.STOP:
            assert own[len(answer)] in stop_ids or any(
                self.tie(context, answer, stop) for stop in stop_ids
            ), f"{branch.name}: stopped too early"
        else:
            assert len(answer) == branch.budget
        self.tally.tokens += len(answer) + (branch.finish is Finish.STOP)

    def tie(self, context: Sequence[int], before: Sequence[int], token: int) -> bool:
        """A numeric tie: the token of float64, with a margin below 1e-4 in float32."""
        ids = [*context, *before]
        top = self.logits(ids, torch.float32)[-1].topk(2).values
        exact = int(self.logits(ids, torch.float64)[-1].argmax())
        near = bool(top[0] - top[1] < 1e-4) and exact == token
        self.tally.ties += near
        return near


@dataclass
class Tiny:
    """A random target of one family with a drafter for it, and what transformers makes of it."""

    folder: Path
    drafter_folder: Path
    models: Models
    reference: Reference

    def book(self, share: str = "outline", stop_ids: Sequence[int] = (2,)) -> TokenBook:
        return TokenBook(self.models.target.vocab_size, share, stop_ids)


Make = Callable[..., Tiny]
"""make(family, dtype, ...): models of these settings, built once."""


# -- runs -------------------------------------------------------------------------------------


class Graphs:
    """Shipped graphs, opened with test settings; the op table is read once."""

    @cached_property
    def table(self) -> OpTable:
        return read_table(rooms())

    def session(
        self,
        graph: str,
        models: Models,
        book: Any,
        *,
        outline: Outline | None = None,
        budget: int | None = 10,
        sets: Iterable[str] = (),
    ) -> Session:
        """A session on a shipped graph with a small pool, small budgets and no grammar."""
        own = ["layout.kv_slots=2000", "limits.max_new_tokens=1"]  # the session has its own budget
        if "eagle" in graph:  # what a graph ships may be tuned at any time
            own += TREES
        if graph in (*FULL, *PAGED):
            own += [f"skeleton.share={book.share}", "skeleton.grammar=false"]
            own += ["skeleton.max_tokens=20", "skeleton.direct_tokens=13"]
        program = open_graph(graph, sets=(*own, *sets), table=self.table)
        given = outline if graph in (*FULL, *PAGED) else None
        return Session(program, models, max_new_tokens=budget, outline=given, prompts=book)


graphs = Graphs()


def start(session: Session, texts: Sequence[str | Prompt], sink: Any = None) -> EngineCore:
    """A run whose pools hold a large number wherever nothing was written yet."""
    prompts = [t if isinstance(t, Prompt) else Prompt(str(i), t) for i, t in enumerate(texts)]
    run = session.start(prompts, sink or (lambda event: None))
    for pool in run.manager.pools:
        pool.data.fill_(1e3)
    return run


def drive(
    run: EngineCore, check: bool = True, until: Callable[[EngineCore], bool] | None = None
) -> EngineCore:
    """Advance to the end, or until something holds; everything is checked after every phase."""
    while not run.finished and not (until and until(run)):
        assert run.steps < MOST_STEPS, "the run does not come to an end"
        run.advance()
        if check:
            check_rows(run)
    return run


def run_all(session: Session, texts: Sequence[str | Prompt], check: bool = True) -> EngineCore:
    return drive(start(session, texts), check)


def requests_of(run: EngineCore) -> list[Request]:
    return list(run.requests)


def branches_of(run: EngineCore) -> list[Branch]:
    """All branches of all requests, the root branches left out."""
    return [b for r in requests_of(run) for b in r.branches]


def tokens_of(run: EngineCore) -> dict[str, list[list[int]]]:
    return {r.key: [list(b.tokens) for b in r.all_branches()] for r in requests_of(run)}


def accepted_of(run: EngineCore) -> dict[str, list[list[int]]]:
    """Accepted drafts of each round, by request and branch."""
    return {r.key: [list(b.accepted) for b in r.all_branches()] for r in requests_of(run)}


# -- what holds after every phase -------------------------------------------------------------


def check_rows(run: EngineCore) -> None:
    """Pools and book agree: nothing is missing, nothing is held twice, nothing is left over."""
    for pool in run.manager.pools:
        pool.check_integrity()
    _check_target_rows(run)
    if run.manager.kv_draft is not None:
        _check_draft_rows(run)
    _check_keys(run)


def _check_keys(run: EngineCore) -> None:
    """What a forward reads of a request in the shared row is all that it has there."""
    book = run.manager
    segments = book.table.segments
    for pool in (pool for pool in book.pools if pool.rows == 1):
        used = np.flatnonzero(pool.owner != FREE)
        by_owner = used[np.argsort(pool.owner[used], kind="stable")]
        owners, first = np.unique(pool.owner[by_owner], return_index=True)
        own = dict(zip(owners.tolist(), np.split(by_owner, first)[1:], strict=True))
        read = np.zeros(pool.slots, np.bool_)
        for request in book.table.unfinished:
            for owner in (request.prefix_owner, *(b.owner for b in _in_pools(request))):
                keys = pool.keys_of(segments.homes(owner))
                seen = slice(keys[0], sum(keys)) if isinstance(keys, tuple) else keys
                read[seen] = True
                mine = [own[one] for one in segments.lineage(owner) if one in own]
                assert all(read[slots].all() for slots in mine), (
                    "rows of a request that its forwards do not read"
                )
                read[seen] = False


def _check_target_rows(run: EngineCore) -> None:
    book, pool = run.manager, run.manager.kv
    expected = 0
    for request in book.requests:
        if request.stage in OPEN_STAGES:
            expected += request.prefix_length * len(book.layout.rows_of(request.prefix_owner))
            expected -= request.shared
        if request.stage is Stage.OUTLINE:
            expected += request.root.row_count
        expected += sum(b.row_count for b in _in_pools(request) if not b.is_root)
    if book.prefixes is not None:
        book.prefixes.check_integrity()
    expected += book.kv_cache.num_cached_rows
    assert pool.current_length == expected, f"{pool.current_length} slots for {expected} rows"
    for branch in book.active:
        assert branch.stage is Stage.RUNNING
        assert len(branch.pending) == 1, "a running branch has exactly its root token pending"
        held = _positions(run, pool, branch)
        assert held == _seen(branch, branch.length), f"{branch.name} has a gap"


def _check_draft_rows(run: EngineCore) -> None:
    """The drafter's row j is for token j + 1, so a branch sees its rows 0 .. length - 1."""
    book, pool = run.manager, run.manager.kv_draft
    alive = set(book.prefixes.nodes) if book.prefixes is not None else set[int]()
    for request in book.requests:
        if request.stage in OPEN_STAGES:
            alive.add(request.prefix_owner)
        if request.stage is Stage.OUTLINE:
            alive.add(request.root.owner)
        alive |= {b.owner for b in _in_pools(request)}
    assert set(pool.owner[pool.owner >= 0].tolist()) <= alive, "rows of a finished branch"
    for part in book.drafter.parts:
        assert {s.owner for s in part.inbox} <= alive, "queued rows of a finished branch"
    drafter = next((part for part in book.drafter.parts if part.kv is pool), book.drafter.parts[0])
    if run.state == "expand_root" and not drafter.waits:
        drafts = drafter.num_nodes(len(drafter.active))
        for branch in drafter.active:
            held = _positions(run, pool, branch)
            rows = branch.length + drafter.reads_root
            if not drafts:  # rows of an answer wait until a round has drafts
                path = book.table.segments.lineage(branch.owner)
                queued = [part for part in drafter.inbox if part.owner in path]
                held += [part.position + i for part in queued for i in range(len(part.tokens))]
            if not branch.reads:  # drafters have of ended parts what they had to draft for them
                assert sorted(held) == list(range(rows)), f"{branch.name} drafts from {held}"


def _in_pools(request: Request) -> list[Branch]:
    """Branches with rows of their own: those that run, and parts that are held."""
    running = not request.finished
    return [
        b for b in request.all_branches() if b.stage is Stage.RUNNING or (b.retained and running)
    ]


def _seen(branch: Branch, length: int) -> list[int]:
    """The positions of the rows that a branch sees: its path's, and those of parts beside it."""
    prefix = range(branch.request.prefix_length)
    parts = [i for part in branch.reads for i in range(part.start, part.length)]
    own = range(branch.start if branch.reads else len(prefix), length)
    return sorted([*prefix, *parts, *own])


def _positions(run: EngineCore, pool: Any, branch: Branch) -> list[int]:
    """Positions of the committed rows that a branch sees in its row of the pool, increasing."""
    (row,) = run.manager.layout.rows_of(branch.owner)
    path = run.manager.table.segments.lineage(branch.owner)
    part = slice(row * pool.capacity, (row + 1) * pool.capacity)
    kept = pool.committed[part]
    own = np.isin(pool.owner[part][kept], path)
    return sorted(pool.position[part][kept][own].tolist())


# -- lossless ---------------------------------------------------------------------------------


def contexts(request: Request, book: Any, plain: bool) -> list[tuple[Branch, list[int]]]:
    if plain:
        return [(branch, list(book.plain(request.question))) for branch in request.branches]
    prefix, tail = book.skeleton(request.question)
    shared, found = [*prefix], []
    root = request.root
    assert root is not None and request.outline is not None
    if request.given_outline is None:
        found.append((root, [*prefix, *tail]))
    if book.share == "outline":
        shared += [*tail, *(request.given_ids or root.tokens)]
    done = {b.point.id: b.tokens for b in request.branches if b.point}
    for branch in request.branches:
        if branch.point is None:
            found.append((branch, [*shared, *book.direct()]))
            continue
        quoted = [(dep, done[dep]) for dep in branch.point.deps]
        hoist, own = book.branch(branch.point, request.outline, quoted)
        found.append((branch, [*shared, *hoist, *own]))
    return found


def check_lossless(run: EngineCore, book: Any, reference: Reference, plain: bool) -> None:
    """Every branch of every request (the outline too) holds the target's own tokens."""
    for request in requests_of(run):
        for branch, context in contexts(request, book, plain):
            reference.check(branch, context, book.stop_ids)


def outlined(made: Tiny, graph: str, stop_ids: Sequence[int] = (), **more: Any) -> EngineCore:
    """A run over one question, held to the reference. more: `share`, `parts`, Graphs.session's."""
    book = made.book(more.pop("share", "outline"), stop_ids)
    outline = outline_of(more.pop("parts", 4))
    run = run_all(graphs.session(graph, made.models, book, outline=outline, **more), ["hello"])
    check_lossless(run, book, made.reference, graph in PLAIN)
    return run


def taking_turns(many: Sequence[Any], few: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each of many with one of few, in turn; with another seed, other pairs."""
    return [(one, few[(at + SEED) % len(few)]) for at, one in enumerate(many)]


def pairwise(factors: dict[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Cases, drawn by seed, in which every two values of two factors meet at least once."""
    draw, names = random.Random(seed), list(factors)
    places = {item: at for at, item in enumerate((n, v) for n in names for v in factors[n])}
    missing = sorted(
        (
            ((a, x), (b, y))
            for a, b in combinations(names, 2)
            for x in factors[a]
            for y in factors[b]
        ),
        key=repr,
    )
    is_missing = np.zeros((len(places), len(places)), bool)
    for one, other in missing:
        is_missing[places[one], places[other]] = True
    cases = []
    while missing:
        pinned = dict(draw.choice(missing))
        drawn = [
            {name: draw.choice(list(factors[name])) for name in names} | pinned for _ in range(40)
        ]
        at_CF = np.array([[places[item] for item in case.items()] for case in drawn])
        best = int(is_missing[at_CF[:, :, None], at_CF[:, None]].sum((1, 2)).argmax())
        is_missing[np.ix_(at_CF[best], at_CF[best])] = False
        missing = [(one, two) for one, two in missing if is_missing[places[one], places[two]]]
        cases.append(drawn[best])
    return cases


def named(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())


def many(
    draw: Callable[[int], Iterable[Any]], least: int, name: Callable[[Any], str] = named
) -> list[Any]:
    """As many draws, by seed, as give `least` cases of different names."""
    found: dict[str, Any] = {}
    for seed in count(SEED):
        found |= {name(case): case for case in draw(seed)}
        if len(found) >= least:
            return list(found.values())
    raise AssertionError

"""What is kept of prompts and answers: nobody's tokens change, and nothing is computed twice."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers.drafters import KINDS, SETTINGS, drafting
from helpers.support import (
    SEED,
    FixedBook,
    Graphs,
    Tiny,
    TokenBook,
    branches_of,
    check_lossless,
    drive,
    memory_of,
    named,
    outline_of,
    pairwise,
    requests_of,
    run_all,
    start,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.ops.kv.pool import KVCache
from specsot.states.machine import Run
from specsot.states.text.outline import Outline
from specsot.states.text.prompts import NOTHING
from specsot.states.text.tokens import PromptTokens

Make = Callable[..., Tiny]
CHOICES = tuple((kind, SEED % len(SETTINGS[kind])) for kind in KINDS)
PARTS = outline_of(3, {3: (1,)})
OFF = "scheduler.prefix_cache=false"
GRID: dict[str, tuple[Any, ...]] = {
    "drafter": CHOICES,
    "share": ("outline", "prompt"),
    "max_num_branches": (1, 3, 8),
    "kv_slots": (330, 2000),
    "temperature": (0.0, 0.9),
    "attention": ("auto", "dense", "cascade"),
    "layout": ("bim", "batching", "paged"),
    "blocks": (1, 16, 64),
    "long_half": ("first", "second"),
    "chunk": (None, 20),
    "policy": ("fcfs", "max_throughput", "sot_priority"),
    "admission": ("reserved", "optimistic"),
}


class StemBook(TokenBook):
    """Questions `stem/own` begin with the ids of their stem; the other half is short. Whatever an
    outline's ids are, it has three parts, the last of which waits for the first."""

    long_half = "first"

    def skeleton(
        self, question: str, documents: PromptTokens = NOTHING
    ) -> tuple[PromptTokens, PromptTokens]:
        stem, _, own = question.partition("/")
        whole = [*self.ids(f"stem {stem}", 80, 90), *self.ids(f"own {own}", 2, 5)]
        if self.long_half == "second":
            return NOTHING + whole[:7], NOTHING + whole[7:]
        return NOTHING + whole, NOTHING + self.ids(f"tail {own}", 1, 4)

    def read_outline(
        self, ids: Sequence[int], *, max_branches: int, tools: Sequence[str]
    ) -> Outline:
        return PARTS


QUESTIONS = ("a/1", "a/1", "b/1", "a/2", "a/1", "b/2", "a/3")


def reused(run: Run) -> int:
    return int(run.board["branches"].prefixes.figures.reused)


def late(session: Session, texts: tuple[str, ...]) -> Run:
    """A run whose last question comes when all others have ended, but not yet the run."""
    run = start(session, texts[:-1])
    drive(run, until=lambda run: run.state == "merge")
    request = session.request(Prompt(str(len(texts) - 1), texts[-1]))
    run.board["branches"].lifecycle.submit(request)
    return drive(run)


@pytest.mark.parametrize("case", pairwise(GRID, 14), ids=named)
def test_with_and_without_it_the_tokens_are_the_same(
    case: dict[str, Any], tiny: Make, graphs: Graphs
) -> None:
    made, (kind, number) = tiny("llama"), case["drafter"]
    book = StemBook(130, case["share"], (2,))
    book.long_half = case["long_half"]
    sets = [f"drafter.kind={kind}", *SETTINGS[kind][number], *memory_of(case)]
    sets += [f"layout.{key}={case[key]}" for key in ("max_num_branches", "kv_slots")]
    sets += [f"sampling.temperature={case['temperature']}"]
    sets += [f"scheduler.max_num_batched_tokens={case['chunk']}"] if case["chunk"] else []
    sets += [f"scheduler.{key}={case[key]}" for key in ("policy", "admission")]
    models = drafting(made, kind)

    def made_with(*more: str) -> Session:
        given = None if book.long_half == "second" else PARTS  # who has one does not ask for it
        own = {"outline": given, "budget": 8, "sets": (*sets, *more)}
        return graphs.session("bim_plain", models, book, **own)

    run = late(made_with(), QUESTIONS)
    assert tokens_of(run) == tokens_of(run_all(made_with(OFF), QUESTIONS))
    if case["temperature"] == 0.0:
        check_lossless(run, book, made.reference, plain=False)
    least = 4 * 80 if case["kv_slots"] > 330 else 80  # in a small pool most of it is evicted
    assert reused(run) >= least, "equal beginnings were computed again"
    pools: list[KVCache] = run.board["branches"].pools
    assert all(pool.needed_length == 0 for pool in pools)
    moved = {cause for pool in pools for cause in pool.ledger.bytes}
    copied = {"keep", "prefix", "fork"} if case["layout"] == "batching" else set()
    assert moved <= copied, "rows were moved"


@pytest.mark.parametrize(
    ("graph", "sets"),
    [
        ("autoregressive", ()),
        ("eagle", ()),
        ("eagle", ("layout.kind=paged", "layout.block_size=16")),
        ("eagle", ("layout.kind=batching",)),
    ],
)
def test_eight_equal_prompts_that_arrive_together_are_prefilled_once(
    graph: str, sets: tuple[str, ...], tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    text = TokenBook(130, "outline", ()).ids("long", 489, 489)
    session = graphs.session(graph, made.models, FixedBook({"q": text}), budget=6, sets=sets)
    run = run_all(session, ["q"] * 8)
    computed = [len(one.branches[0].prompt) for one in requests_of(run)]
    assert computed[0] == 489 and max(computed[1:]) <= 2, "one prefill, and a row or two"
    assert len({tuple(branch.tokens) for branch in branches_of(run)}) == 1
    assert reused(run) >= 7 * 487
    pool, blocks = run.board["kv"], run.board["kv"].blocks
    if pool.rows > 1:  # everybody has a copy
        return
    assert pool.peak_length < 489 + 8 * 40, "the prompt's rows are held once"
    assert blocks.high_water * blocks.size < 489 + 8 * (40 + 2 * blocks.size), "and their blocks"


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("graph", ["autoregressive", "eagle"])
def test_the_next_turn_of_a_chat_prefills_only_what_is_new(
    graph: str, layout: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    first = TokenBook(130, "outline", ()).ids("turn", 80, 80)
    book = FixedBook({"first": first})
    sets = (f"layout.kind={layout}",)
    session = graphs.session(graph, made.models, book, budget=12, sets=sets)
    run = start(session, ["first"])
    drive(run, until=lambda run: run.state == "merge")
    answer = requests_of(run)[0].branches[0].tokens
    book.prompts["second"] = [*first, *answer, 7, 8, 9]
    run.board["branches"].lifecycle.submit(session.request(Prompt("1", "second")))
    drive(run)
    # What the last round committed has no row in a drafter's pool, its last token in none.
    last = requests_of(run)[0].branches[0].emitted[-1]
    reused = requests_of(run)[1].reused
    assert reused >= len(first) + len(answer) - 2 - last
    kv, copied = run.board["kv"], reused if layout == "batching" else 0
    assert kv.ledger.bytes["prefix"] == copied * kv.slot_bytes
    check_lossless(run, book, made.reference, plain=True)


def test_a_full_pool_evicts_what_was_not_used_for_longest(tiny: Make, graphs: Graphs) -> None:
    made, book = tiny("llama"), StemBook(130, "outline", ())
    questions = [f"{stem}/{own}" for stem in "abcdef" for own in (1, 2)]
    sets = ("layout.kv_slots=260", "layout.max_num_branches=2")
    session = graphs.session("bim_eagle", made.models, book, budget=8, sets=sets)
    run = run_all(session, questions)
    check_lossless(run, book, made.reference, plain=False)
    figures = run.board["branches"].prefixes.figures
    assert figures.evicted > 0 and figures.reused > 0
    assert all(branch.tokens for branch in branches_of(run)), "nobody was refused"


def test_blended_rows_and_beams_are_not_kept(tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama")
    session = graphs.session("beam", made.models, TokenBook(130, "outline", ()))
    assert start(session, ["q"]).board["branches"].prefixes is None


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", ["none", "eagle3"])
def test_other_salts_share_nothing(kind: str, together: bool, tiny: Make, graphs: Graphs) -> None:
    """Whether they run side by side or one after another; those of one salt do."""
    made = tiny("llama", context=2.0)
    book = StemBook(made.models.target.vocab_size, "outline", (2,))
    graph = "autoregressive" if kind == "none" else "eagle"
    salts = ("", "a", "b", "a", "")
    prompts = [Prompt(str(n), "a/1", cache_salt=salt) for n, salt in enumerate(salts)]
    sets = () if together else ("layout.max_num_branches=1",)
    opened = graphs.session(graph, made.models, book, sets=sets)
    run = start(opened, prompts)
    cache, tops = run.board["branches"].prefixes, list[dict[str, int]]()

    def looked(run: Run) -> bool:
        tops.append({salt: len(shelf) for salt, shelf in cache._roots.items()})
        for request in run.board["branches"].unfinished:
            path = run.board["branches"].table.segments.path(request.prefix_owner)
            assert all(cache.nodes[s].salt == request.cache_salt for s in path if s in cache.nodes)
        return False

    drive(run, until=looked)
    size = len(book.plain("a/1"))
    assert reused(run) == 2 * (size - 1), "each salt computed the prompt once"
    assert set(tops[-1]) == {"", "a", "b"}
    unsalted = run_all(graphs.session(graph, made.models, book, sets=sets), ["a/1"] * 5)
    assert tokens_of(run) == tokens_of(unsalted)

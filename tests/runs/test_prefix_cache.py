"""What is kept of prompts and answers: nobody's tokens change, and nothing is computed twice."""

from collections.abc import Sequence

import pytest
from helpers import support
from helpers.support import FixedBook, graphs

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.core import EngineCore
from specsot.states.text.outline import Outline
from specsot.states.text.prompts import NOTHING
from specsot.states.text.tokens import PromptTokens

PARTS = support.outline_of(3, {3: (1,)})


class StemBook(support.TokenBook):
    """Questions `stem/own` begin with the ids of their stem. Every outline is read as three parts,
    the last of which waits for the first."""

    def skeleton(
        self, question: str, documents: PromptTokens = NOTHING
    ) -> tuple[PromptTokens, PromptTokens]:
        stem, _, own = question.partition("/")
        whole = [*self.ids(f"stem {stem}", 80, 90), *self.ids(f"own {own}", 2, 5)]
        return NOTHING + whole, NOTHING + self.ids(f"tail {own}", 1, 4)

    def read_outline(
        self, ids: Sequence[int], *, max_branches: int, tools: Sequence[str]
    ) -> Outline:
        return PARTS


def reused(run: EngineCore) -> int:
    return int(run.manager.prefixes.figures.reused)


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
    graph: str, sets: tuple[str, ...], made: support.Tiny
) -> None:
    text = support.TokenBook(130, "outline", ()).ids("long", 489, 489)
    session = graphs.session(graph, made.models, FixedBook({"q": text}), budget=6, sets=sets)
    run = support.run_all(session, ["q"] * 8)
    computed = [len(one.branches[0].prompt) for one in support.requests_of(run)]
    assert computed[0] == 489 and max(computed[1:]) <= 2, "one prefill, and a row or two"
    assert len({tuple(branch.tokens) for branch in support.branches_of(run)}) == 1
    assert reused(run) >= 7 * 487
    pool, blocks = run.manager.kv, run.manager.kv.blocks
    if pool.rows > 1:  # everybody has a copy
        return
    assert pool.peak_length < 489 + 8 * 40, "the prompt's rows are held once"
    assert blocks.high_water * blocks.size < 489 + 8 * (40 + 2 * blocks.size), "and their blocks"


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("graph", ["autoregressive", "eagle"])
def test_the_next_turn_of_a_chat_prefills_only_what_is_new(
    graph: str, layout: str, made: support.Tiny
) -> None:
    first = support.TokenBook(130, "outline", ()).ids("turn", 80, 80)
    book = FixedBook({"first": first})
    sets = (f"layout.kind={layout}",)
    session = graphs.session(graph, made.models, book, budget=12, sets=sets)
    run = support.start(session, ["first"])
    support.drive(run, until=lambda run: run.state == "merge")
    answer = support.requests_of(run)[0].branches[0].tokens
    book.prompts["second"] = [*first, *answer, 7, 8, 9]
    run.manager.lifecycle.submit(session.request(Prompt("1", "second")))
    support.drive(run)
    # What the last round committed has no row in a drafter's pool, its last token in none.
    last = support.requests_of(run)[0].branches[0].emitted[-1]
    reused = support.requests_of(run)[1].reused
    assert reused >= len(first) + len(answer) - 2 - last
    kv, copied = run.manager.kv, reused if layout == "batching" else 0
    assert kv.ledger.bytes["prefix"] == copied * kv.slot_bytes
    support.check_lossless(run, book, made.reference, plain=True)


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_a_prompt_whose_answer_is_one_token_is_cached(layout: str, made: support.Tiny) -> None:
    """No drafter reads such a prompt, so its rows are in the target's pool alone."""
    book = FixedBook({"q": support.TokenBook(130, "outline", ()).ids("turn", 80, 80)})
    sets = (f"layout.kind={layout}", "layout.max_num_branches=1")
    session = graphs.session("eagle", made.models, book, sets=sets)
    budgets = (1, 1, 9, 9, 1, 2)
    prompts = [Prompt(str(n), "q", max_new_tokens=most) for n, most in enumerate(budgets)]
    run = support.drive(support.start(session, prompts))
    assert [one.reused for one in support.requests_of(run)] == [0, 79, 0, 79, 78, 78]
    assert [len(branch.tokens) for branch in support.branches_of(run)] == list(budgets)
    support.check_lossless(run, book, made.reference, plain=True)
    together = support.start(session, [Prompt(str(n), "q", max_new_tokens=1) for n in range(4)])
    assert reused(support.drive(together)) == 3 * 79


def test_a_full_pool_evicts_what_was_not_used_for_longest(made: support.Tiny) -> None:
    book = StemBook(130, "outline", ())
    questions = [f"{stem}/{own}" for stem in "abcdef" for own in (1, 2)]
    sets = ("layout.kv_slots=260", "layout.max_num_branches=2")
    session = graphs.session("bim_eagle", made.models, book, budget=8, sets=sets)
    run = support.run_all(session, questions)
    support.check_lossless(run, book, made.reference, plain=False)
    figures = run.manager.prefixes.figures
    assert figures.evicted > 0 and figures.reused > 0
    assert all(branch.tokens for branch in support.branches_of(run)), "nobody was refused"


def test_blended_rows_and_beams_are_not_kept(made: support.Tiny) -> None:
    session = graphs.session("beam", made.models, support.TokenBook(130, "outline", ()))
    assert support.start(session, ["q"]).manager.prefixes is None


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", ["none", "eagle3"])
def test_other_salts_share_nothing(kind: str, together: bool, tiny: support.Make) -> None:
    made = tiny("llama", context=2.0)
    book = StemBook(made.models.target.vocab_size, "outline", (2,))
    graph = "autoregressive" if kind == "none" else "eagle"
    salts = ("", "a", "b", "a", "")
    prompts = [Prompt(str(n), "a/1", cache_salt=salt) for n, salt in enumerate(salts)]
    sets = () if together else ("layout.max_num_branches=1",)
    opened = graphs.session(graph, made.models, book, sets=sets)
    run = support.start(opened, prompts)
    cache, tops = run.manager.prefixes, list[dict[str, int]]()

    def looked(run: EngineCore) -> bool:
        tops.append({salt: len(shelf) for salt, shelf in cache._roots.items()})
        for request in run.manager.table.unfinished:
            path = run.manager.table.segments.path(request.prefix_owner)
            assert all(cache.nodes[s].salt == request.cache_salt for s in path if s in cache.nodes)
        return False

    support.drive(run, until=looked)
    size = len(book.plain("a/1"))
    assert reused(run) == 2 * (size - 1), "each salt computed the prompt once"
    assert set(tops[-1]) == {"", "a", "b"}
    unsalted = support.run_all(graphs.session(graph, made.models, book, sets=sets), ["a/1"] * 5)
    assert support.tokens_of(run) == support.tokens_of(unsalted)

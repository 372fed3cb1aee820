"""What broke earlier systems, each as a gate of its own (greedy, BIM, with and without EAGLE-3)."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from support import (
    FULL,
    GRAPHS,
    PLAIN,
    FixedBook,
    Graphs,
    PlanBook,
    Tiny,
    TokenBook,
    accepted_of,
    check_lossless,
    contexts,
    drive,
    outline_of,
    requests_of,
    run_all,
    start,
    tokens_of,
)

from specsot.ops.kv import FREE, KVCache, PoolFullError
from specsot.ops.types import Visibility
from specsot.states.admission import request_slots
from specsot.states.branches import Branch, Finish
from specsot.states.machine import Run
from specsot.states.outline import Outline, Point

Make = Callable[..., Tiny]
FIXED = ("drafter.nodes=6", "drafter.levels=3", "drafter.top_k=4")  # the same tree in every round
WITH_EAGLE = ("eagle", "bim_eagle")


def outlined(graphs: Graphs, made: Tiny, graph: str, stops: Sequence[int] = (), **more: Any) -> Run:
    """A run over one question with four branches, or one plain answer."""
    book = made.book(more.pop("share", "outline"), stops)
    parts = more.pop("parts", 4)
    session = graphs.session(graph, made.models, book, outline=outline_of(parts), **more)
    run = run_all(session, ["hello"])
    check_lossless(run, book, made.reference, graph in PLAIN)
    return run


def branches_of(run: Run) -> list[Branch]:
    return [b for r in requests_of(run) for b in r.branches]


def drafted(branch: Branch) -> list[int]:
    """For each token of an answer: how deep in its tree it was drafted, 0 if the target drew it."""
    depths = [0]
    for accepted, emitted in zip(branch.accepted, branch.emitted, strict=True):
        depths += [d if d <= accepted else 0 for d in range(1, emitted + 1)]
    return depths


# -- the end of an answer ---------------------------------------------------------------------


@pytest.mark.parametrize("graph", WITH_EAGLE)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_end_token_inside_an_accepted_path_ends_the_answer_there(
    graph: str, family: str, tiny: Make, graphs: Graphs
) -> None:
    """The stop id is one that the drafter proposes and the target confirms, not at a path's end."""
    made = tiny(family)
    free = outlined(graphs, made, graph, budget=30)
    stop = _stop_drafted_early(branches_of(free))
    stopped = outlined(graphs, made, graph, (stop,), budget=30)
    inside = 0
    for before, branch in zip(branches_of(free), branches_of(stopped), strict=True):
        cut = before.tokens.index(stop) if stop in before.tokens else len(before.tokens)
        assert branch.tokens == before.tokens[:cut], "nothing after the end, all before it"
        assert (branch.finish is Finish.STOP) == (stop in before.tokens)
        inside += bool(branch.accepted) and branch.accepted[-1] > branch.emitted[-1]
    assert inside, "the end was meant to lie inside an accepted path"


def _stop_drafted_early(branches: list[Branch]) -> int:
    """A token whose first occurrence is a draft that further accepted drafts follow."""
    for branch in branches:
        depths = drafted(branch)
        for place, token in enumerate(branch.tokens[:-1]):
            early = 0 < depths[place] < depths[place + 1]
            if early and branch.tokens.index(token) == place:
                return token
    raise AssertionError("no path of two accepted drafts; choose another model")


@pytest.mark.parametrize("graph", GRAPHS)
def test_any_number_of_stop_ids_ends_an_answer(graph: str, tiny: Make, graphs: Graphs) -> None:
    made = tiny("qwen2")
    free = branches_of(outlined(graphs, made, graph, budget=16))
    for stops in ([free[0].tokens[5]], sorted(set(free[0].tokens[3:])), range(4, 130)):
        for before, branch in zip(
            free, branches_of(outlined(graphs, made, graph, tuple(stops), budget=16)), strict=True
        ):
            cut = next((i for i, t in enumerate(before.tokens) if t in stops), 16)
            assert branch.tokens == before.tokens[:cut]


@pytest.mark.parametrize("graph", GRAPHS)
def test_max_new_tokens_counts_tokens(graph: str, tiny: Make, graphs: Graphs) -> None:
    """Exactly, also where the budget ends inside an accepted path or at the first token."""
    made = tiny("llama")
    longest = branches_of(outlined(graphs, made, graph, budget=12))
    for budget in (1, 2, 3, 4, 7):
        for before, branch in zip(
            longest, branches_of(outlined(graphs, made, graph, budget=budget)), strict=True
        ):
            assert branch.tokens == before.tokens[:budget]
            assert branch.finish is Finish.LENGTH


def test_an_outline_and_a_direct_answer_have_their_own_budgets(tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama")
    sets = ("skeleton.max_tokens=9", "skeleton.direct_tokens=5")
    session = graphs.session("bim_eagle", made.models, made.book(stop_ids=()), sets=sets)
    request = requests_of(run_all(session, ["hello"]))[0]
    assert len(request.root.tokens) == 9 and request.root.finish is Finish.LENGTH
    assert [len(b.tokens) for b in request.branches] == [5]


# -- tokens and models that look like something else -------------------------------------------


@pytest.mark.parametrize("graph", WITH_EAGLE)
def test_token_0_and_the_pad_token_are_drafted_accepted_and_kept(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """Ids 0 and 3 (PAD) are among the likely tokens of the tiny models, and mean nothing here."""
    drafts: set[int] = set()
    for seed in (2, 1, 3, 0):
        run = outlined(graphs, tiny("qwen3", seed=seed), graph, budget=60, parts=5)
        for branch in branches_of(run):
            pairs = zip(branch.tokens, drafted(branch), strict=True)
            drafts |= {token for token, depth in pairs if depth}
        if {0, 3} <= drafts:
            return
    raise AssertionError(f"0 and 3 were meant to be drafted and accepted: {sorted(drafts)}")


# -- branches that run side by side ------------------------------------------------------------


@pytest.mark.parametrize("graph", FULL)
@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_one_branch_alone_is_an_answer(
    graph: str, share: str, tiny: Make, graphs: Graphs
) -> None:
    run = outlined(graphs, tiny("llama"), graph, parts=1, share=share)
    assert [len(b.tokens) for b in branches_of(run)] == [10]


@pytest.mark.parametrize("graph", FULL)
@pytest.mark.parametrize("budget", [1, 2])
def test_all_branches_may_end_in_the_same_round(
    graph: str, budget: int, tiny: Make, graphs: Graphs
) -> None:
    made, rounds = tiny("qwen3"), []
    session = graphs.session(
        graph,
        made.models,
        made.book(stop_ids=()),
        outline=outline_of(5),
        budget=budget,
        sets=("layout.max_active=12",),
    )
    run = start(session, ["hello", "again"])
    drive(run, until=lambda run: bool(rounds.append(len(run.board["branches"].active))))
    assert 10 in rounds or budget == 1
    assert rounds[-1] == 0
    assert all(len(b.accepted) == budget - 1 for b in branches_of(run))


@pytest.mark.parametrize("graph", FULL)
def test_one_endless_branch_does_not_starve_the_others(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """Two may run at once: the others come and go while the endless one runs to its budget."""
    made, stop, endless = _endless(graphs, tiny)
    book = made.book(stop_ids=(stop,))
    session = graphs.session(
        graph,
        made.models,
        book,
        outline=outline_of(5),
        budget=60,
        sets=("layout.max_active=2",),
    )
    run, ended = start(session, ["hello"]), []

    def note(run: Run) -> bool:
        ended.extend(b for b in branches_of(run) if b.finish and b not in ended)
        return False

    drive(run, until=note)
    note(run)
    check_lossless(run, book, made.reference, plain=False)
    assert ended[-1].index == endless, [b.name for b in ended]
    assert ended[-1].finish is Finish.LENGTH and len(ended[-1].tokens) == 60
    assert {b.finish for b in ended[:-1]} == {Finish.STOP}


def _endless(graphs: Graphs, tiny: Make) -> tuple[Tiny, int, int]:
    """(models, stop id, branch): one of the first two never stops, the others soon do."""
    for seed, family in product((2, 3, 1, 0), ("qwen3", "llama")):
        made = tiny(family, seed=seed)
        branches = branches_of(outlined(graphs, made, "bim_eagle", parts=5, budget=60))
        for branch in branches[:2]:
            others = [set(b.tokens[:18]) for b in branches if b is not branch]
            if found := set.intersection(*others) - set(branch.tokens):
                return made, min(found), branch.index
    raise AssertionError("no model with such a token")


@pytest.mark.parametrize("share", ["outline", "prompt"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_newcomer_drafts_as_well_as_one_that_started_at_once(
    family: str, share: str, tiny: Make, graphs: Graphs
) -> None:
    """Its rows in the drafter's pool stand where they would have stood: same acceptance, round by
    round, whether branches start together, join a running round, or follow one another."""
    made, found = tiny(family), []
    for most in (8, 3, 2, 1):
        sets = (*FIXED, f"layout.max_active={most}")
        run = outlined(graphs, made, "bim_eagle", share=share, budget=24, sets=sets)
        found.append((accepted_of(run), tokens_of(run)))
    assert all(one == found[0] for one in found[1:])
    assert sum(map(sum, found[0][0]["0"])) > 20, "little was accepted, so little was tested"


@pytest.mark.parametrize("share", ["outline", "prompt"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_branch_drafts_as_well_as_one_sequence_with_the_same_ids(
    family: str, share: str, tiny: Make, graphs: Graphs
) -> None:
    """The fork leaves the drafter nothing to guess: prefix rows are shared, and each branch owns
    the row that pairs the last shared feature with its own first token."""
    made = tiny(family)
    book = made.book(share, stop_ids=())
    outline = outline_of(3, {3: (1,)})
    full = graphs.session(
        "bim_eagle", made.models, book, outline=outline, budget=24, sets=FIXED
    )
    request = requests_of(run_all(full, ["hello"]))[0]
    alone = FixedBook({b.name: ids for b, ids in contexts(request, book, False)})
    plain = graphs.session("eagle", made.models, alone, budget=24, sets=FIXED)
    for branch in request.branches:
        twin = requests_of(run_all(plain, [branch.name]))[0].branches[0]
        assert branch.tokens == twin.tokens
        assert branch.accepted == twin.accepted


@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_the_drafters_rows_are_those_of_one_sequence(
    share: str, tiny: Make, graphs: Graphs
) -> None:
    """Keys and values, for branches that forked, waited, and joined a running round; the outline
    was written, and cut with a token that had no row yet."""
    made, compared = tiny("llama"), 0
    book = PlanBook(130, share, ())
    book.text = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\n3|50|-|-|Three\nEND"
    for budget in (16, 17, 18):
        sets = (f"skeleton.max_tokens={budget}", "layout.max_active=2")
        session = graphs.session("bim_eagle", made.models, book, sets=sets)
        run = start(session, ["hello", "again"])
        while not run.finished:
            drive(run, until=lambda run: run.state == "expand_root")
            for branch in run.board["branches"].active:
                _compare_drafter_rows(run, branch, _context(branch, book))
                compared += 1
            if not run.finished:
                run.advance()
    assert compared > 60


def _context(branch: Branch, book: TokenBook) -> list[int]:
    request = branch.request
    if branch.is_root:
        return [*request.prefix, *request.tail]
    return dict(contexts(request, book, False))[branch]


def _compare_drafter_rows(run: Run, branch: Branch, context: list[int]) -> None:
    """The pool's rows of a branch against a fresh target and drafter over its ids alone."""
    target, drafter, pool = (run.board[key] for key in ("target", "drafter", "kv_draft"))
    ids = torch.tensor([[*context, *branch.tokens]])
    count = ids.shape[1] - 1
    assert count == branch.length
    visible = Visibility(torch.ones(1, count, count).tril().bool(), torch.arange(count)[None])
    slots = torch.arange(count)[None]
    fresh = KVCache(target.num_layers, target.kv_heads, target.head_dim, count)
    taps = target.forward(
        ids[:, :-1], slots, slots, visible, fresh, target.full_plan, slots[0], run.board["taps"]
    ).taps_QF
    alone = KVCache(drafter.num_layers, drafter.kv_heads, drafter.head_dim, count)
    drafter.forward(ids[:, 1:], drafter.fuse(taps)[None], slots, slots, visible, alone)
    prefix = pool.rows_of(branch.request.prefix_owner)
    own = pool.rows_of(branch.owner)
    held = pool.data[:, :, :, [*prefix.tolist(), *own.tolist()]]
    torch.testing.assert_close(held, alone.data[:, :, :, :count], atol=1e-4, rtol=1e-4)


# -- capacity ----------------------------------------------------------------------------------


class SizedBook(TokenBook):
    """A branch's own prompt is as long as its point says."""

    def branch(
        self, point: Point, outline: Outline, dep_ids: Sequence[tuple[int, Sequence[int]]]
    ) -> tuple[list[int], list[int]]:
        own = self.ids(f"own {point.id}", point.length, point.length)
        return self.ids("hoist", 1, 1) * self.hoist, own


@pytest.mark.parametrize(("graph", "nodes"), [("autoregressive", 0), ("eagle", 6)])
def test_a_plain_request_that_just_fits_runs_and_one_slot_less_refuses_it(
    graph: str, nodes: int, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    book = made.book(stop_ids=())
    prompt, budget = len(book.plain("hello")), 20
    needed = prompt + budget + nodes + 1
    sets = FIXED if nodes else ()
    for capacity in (needed, needed - 1):
        session = graphs.session(
            graph,
            made.models,
            book,
            budget=budget,
            sets=(*sets, f"layout.capacity={capacity}"),
        )
        run = run_all(session, ["hello"])
        (branch,) = branches_of(run)
        if capacity == needed:
            check_lossless(run, book, made.reference, plain=True)
            assert len(branch.tokens) == budget
        else:
            assert branch.finish is Finish.REFUSED and branch.tokens == []
            assert branch.note == f"needs {needed} slots, the pool has {capacity}"
            assert run.board["kv"].peak_length == 0, "nothing was computed for it"
            assert run.board["answers"][0].sections[0].finish == "refused"


@pytest.mark.parametrize(("graph", "nodes"), [("bim_plain", 0), ("bim_eagle", 6)])
def test_a_branch_that_just_fits_runs_and_one_slot_more_refuses_it_alone(
    graph: str, nodes: int, tiny: Make, graphs: Graphs
) -> None:
    """Capacity is counted after the outline was read, for every branch by itself."""
    made = tiny("llama")
    book = SizedBook(130, "outline", ())
    prefix, tail = book.skeleton("hello")
    given = book.outline_ids(outline_of(3).points)
    shared = len(prefix) + len(tail) + len(given)
    capacity, budget = shared + 160, 10
    fits = capacity - shared - book.hoist - budget - nodes - 1
    points = tuple(
        Point(i, size, None, (), f"Part {i}") for i, size in enumerate((7, fits, fits + 1), 1)
    )
    session = graphs.session(
        graph,
        made.models,
        book,
        outline=Outline("plan", points, (), "ok"),
        budget=budget,
        sets=(*(FIXED if nodes else ()), f"layout.capacity={capacity}"),
    )
    run = run_all(session, ["hello"])
    small, exact, large = branches_of(run)
    for branch, context in contexts(requests_of(run)[0], book, False)[:2]:
        made.reference.check(branch, context, ())
    assert (small.finish, exact.finish) == (Finish.LENGTH, Finish.LENGTH)
    assert large.finish is Finish.REFUSED and large.tokens == []
    assert large.note == f"needs {capacity + 1} slots, the pool has {capacity}"


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_pool_may_be_filled_to_its_last_slot(graph: str, tiny: Make, graphs: Graphs) -> None:
    """All slots but those that the run really needs are taken by somebody else."""
    made = tiny("llama")
    book = made.book(stop_ids=())
    session = graphs.session(
        graph, made.models, book, outline=outline_of(4), sets=("layout.capacity=600",)
    )
    free = run_all(session, ["hello"])
    for spare, full in ((0, True), (1, False)):
        run = start(session, ["hello"])
        pool = run.board["kv"]
        _occupy_(pool, 600 - free.board["kv"].peak_length + 1 - full)
        if full:
            drive(run, check=False)
            assert tokens_of(run) == tokens_of(free)
            assert pool.peak_length == 600, spare
        else:
            with pytest.raises(PoolFullError):
                drive(run, check=False)


def _occupy_(pool: KVCache, count: int) -> None:
    """Rows of a stranger, all over the pool."""
    taken = torch.randperm(pool.capacity, generator=torch.Generator().manual_seed(1))[:count]
    assert (pool.owner == FREE).all()
    pool.owner[taken.numpy()] = 10_000


@pytest.mark.parametrize("graph", FULL)
def test_branches_wait_until_the_pool_has_room_and_all_are_decoded(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("qwen3")
    book = made.book(stop_ids=())
    wide = outlined(graphs, made, graph, parts=6, budget=20)
    capacity = request_slots(requests_of(wide)[0]) + 12
    session = graphs.session(
        graph,
        made.models,
        book,
        outline=outline_of(6),
        budget=20,
        sets=(f"layout.capacity={capacity}",),
    )
    run, most = start(session, ["hello"]), 0
    while not run.finished:
        run.advance()
        most = max(most, len(run.board["branches"].active))
    assert tokens_of(run) == tokens_of(wide)
    assert 1 <= most < 6, "the pool was meant to be too small for all at once"


# -- the model's context -----------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_budget_beyond_the_models_context_is_cut_to_it_and_reported(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama", max_positions=90)
    book = made.book(stop_ids=())
    session = graphs.session(graph, made.models, book, outline=outline_of(2), budget=500)
    run = run_all(session, ["hello"])
    check_lossless(run, book, made.reference, graph in PLAIN)
    for branch, context in contexts(requests_of(run)[0], book, graph in PLAIN):
        assert len(context) + len(branch.tokens) == 90
        assert branch.finish is Finish.LENGTH
        assert branch.note == "cut to the model's 90"


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_huge_budget_is_cut_and_not_refused_for_the_pools_sake(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """The cut comes first: what the model can never write needs no slots."""
    made = tiny("llama", max_positions=90)
    book = made.book(stop_ids=())
    session = graphs.session(
        graph, made.models, book, outline=outline_of(2), budget=100_000
    )
    for branch in branches_of(run_all(session, ["hello"])):
        assert branch.finish is Finish.LENGTH, branch.note


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_prompt_without_room_for_one_token_is_refused_and_others_run(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama", max_positions=90)
    book = made.book(stop_ids=())
    book.skeleton = _long_for("long", 60, 30, book.skeleton)
    book.plain = lambda question: [i for part in book.skeleton(question) for i in part]
    session = graphs.session(graph, made.models, book, budget=5)
    run = run_all(session, ["long", "hello"])
    refused, fine = requests_of(run)
    assert refused.branches[0].finish is Finish.REFUSED
    assert refused.branches[0].note == "prompt of 90 tokens, the model takes 90"
    assert [b.finish for b in fine.branches] == [Finish.LENGTH]


def _long_for(question: str, prefix: int, tail: int, otherwise: Callable[..., Any]) -> Any:
    def skeleton(text: str) -> tuple[list[int], list[int]]:
        return ([5] * prefix, [6] * tail) if text == question else otherwise(text)

    return skeleton


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_run_whose_requests_are_all_refused_comes_to_an_end(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    sets = ("layout.capacity=100", "layout.max_active=2")
    session = graphs.session(graph, made.models, made.book(), budget=300, sets=sets)
    run = run_all(session, ["hello", "again"])
    assert [s.finish for a in run.board["answers"] for s in a.sections] == ["refused"] * 2


@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_a_branch_prompt_without_room_is_refused_by_name(
    share: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama", max_positions=120)
    book = SizedBook(130, share, ())
    points = (Point(1, 10, None, (), "Short"), Point(2, 120, None, (), "Long"))
    session = graphs.session(
        "bim_eagle", made.models, book, outline=Outline("plan", points, (), "ok")
    )
    run = run_all(session, ["hello"])
    short, long = branches_of(run)
    assert short.finish is Finish.LENGTH
    assert long.finish is Finish.REFUSED
    assert long.note.startswith("context of ") and long.note.endswith(" tokens, the model takes 120")


# -- outlines that are none ----------------------------------------------------------------------


@pytest.mark.parametrize("share", ["outline", "prompt"])
@pytest.mark.parametrize(
    ("text", "status"), [("DIRECT", "direct"), ("no outline at all", "unparsable"), ("", "unparsable")]
)
def test_without_a_usable_outline_the_answer_is_an_ordinary_one(
    text: str, status: str, share: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("qwen3")
    book = PlanBook(130, share, ())
    book.text = text
    run = run_all(graphs.session("bim_eagle", made.models, book), ["hello"])
    (request,) = requests_of(run)
    assert request.outline.status == status
    (branch,) = request.branches
    assert (len(branch.tokens), branch.budget) == (13, 13), "skeleton.direct_tokens"
    assert sum(branch.accepted), "it is speculated like any other"
    check_lossless(run, book, made.reference, plain=False)


@pytest.mark.parametrize("share", ["outline", "prompt"])
@pytest.mark.parametrize("graph", FULL)
def test_a_written_outline_fans_out_and_a_partial_one_too(
    graph: str, share: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    book = PlanBook(130, share, ())
    for text, status in (
        ("PLAN\n1|50|-|-|One\n2|60|-|1|Two\nEND", "ok"),
        ("PLAN\n1|50|-|-|One\nrubbish\n3|60|-|1|Tw", "partial"),
    ):
        book.text = text
        run = run_all(graphs.session(graph, made.models, book), ["hello", "again"])
        check_lossless(run, book, made.reference, plain=False)
        for request in requests_of(run):
            assert request.outline.status == status
            assert [b.point.deps for b in request.branches] == [(), (1,)]


@pytest.mark.parametrize("graph", FULL)
def test_a_dependency_that_was_cut_is_quoted_as_far_as_it_got(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    book = made.book(stop_ids=())
    session = graphs.session(
        graph, made.models, book, outline=outline_of(2, {2: (1,)}), budget=6
    )
    run = run_all(session, ["hello"])
    first, second = branches_of(run)
    assert first.finish is Finish.LENGTH and len(first.tokens) == 6
    assert second.prompt[-7:] == [1, *first.tokens]
    check_lossless(run, book, made.reference, plain=False)


def test_an_answer_has_its_sections_in_reading_order_with_their_reasons(
    tiny: Make, graphs: Graphs
) -> None:
    """The last part is decoded beside the first, the others wait for each other."""
    made = tiny("llama")
    book = made.book(stop_ids=())
    outline = outline_of(4, {2: (1,), 3: (2,)})
    session = graphs.session("bim_eagle", made.models, book, outline=outline, budget=6)
    run = run_all(session, ["hello"])
    (answer,) = run.board["answers"]
    assert [s.index for s in answer.sections] == [0, 1, 2, 3]
    assert [s.title for s in answer.sections] == [f"Part {i}" for i in range(1, 5)]
    assert [list(s.tokens) for s in answer.sections] == [b.tokens for b in branches_of(run)]
    assert {s.finish for s in answer.sections} == {"length"}
    assert answer.outline_tokens == (), "it was given"


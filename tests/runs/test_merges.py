"""Finished parts combined into one answer: what is folded or attended to, reused, written, told.

`bim_blend_merge` folds the parts into one context whose rows are reused; `bim_attend_merge` reads
their rows in place, under a mask."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from helpers import pools as pool_watch
from helpers.drafters import drafting, settings_of
from helpers.folds import (
    REUSED,
    FoldBook,
    FrontBook,
    OtherBook,
    book_of,
    combined_of,
    fold_of,
)
from helpers.folds import session as combining
from helpers.reading import Rounds, asked, searching, watched
from helpers.support import (
    FIXED,
    Make,
    SizedBook,
    Tiny,
    drive,
    graphs,
    outline_of,
    outline_with,
    requests_of,
    run_all,
    start,
    tokens_of,
)

from specsot.engine.certify.reference import Transformers
from specsot.engine.events import finish_of
from specsot.engine.record.metrics import Meter
from specsot.engine.run.core import EngineCore
from specsot.engine.run.scoring import context_segments
from specsot.engine.run.writer import answers_of, output_digest, outputs, uncombined
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.blend import ChunkKV
from specsot.ops.kv.pool import Ints, KVCache
from specsot.ops.layer_plan import decode_plan
from specsot.states.blend import NEW, common_ends, runs
from specsot.states.request import Branch, Finish, Request, Stage
from specsot.states.text.outline import Outline, Point
from specsot.states.text.tokens import PromptTokens

TEXTS = ("hello", "another question", "a third")
LAYOUTS = ("layout.kind=bim", "layout.kind=batching")
EVERY = pytest.mark.parametrize("layout", (*LAYOUTS, "layout.kind=paged"))
BLEND, ATTEND = "bim_blend_merge", "bim_attend_merge"
GRAPHS = pytest.mark.parametrize("graph", [BLEND, ATTEND])
PLAIN = ("skeleton.merge=plain",)
session = partial(combining, graphs)
attending = partial(session, graph=ATTEND)


@pytest.fixture
def made(tiny: Make) -> Tiny:
    return tiny("llama", context=2.0)


def sets_of(graph: str, layout: str) -> tuple[str, ...]:
    return (*(REUSED if graph == BLEND else ()), layout)


# -- folds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "share"), [(LAYOUTS[0], "prompt"), (LAYOUTS[1], "outline"), (LAYOUTS[0], "outline")]
)
@pytest.mark.parametrize("sets", [("blend.ratios=[1]",), ("blend.plan=plain",)])
def test_nothing_reused_is_plain(
    sets: tuple[str, ...], layout: str, share: str, made: Tiny
) -> None:
    book = book_of(made, share)
    outline = outline_of(4, {3: (1,)})
    plain = run_all(session(made, *PLAIN, layout, outline=outline, book=book), TEXTS)
    run, rounds = watched(session(made, *sets, layout, outline=outline, book=book), TEXTS)
    assert tokens_of(run) == tokens_of(plain) and not rounds.blends


def test_with_concat_the_graph_is_the_one_without_the_phase(made: Tiny) -> None:
    book = book_of(made)
    sets = ("skeleton.merge=concat",)
    run = run_all(session(made, *sets, outline=outline_of(3), book=book), TEXTS)
    assert not any(b.combines for r in requests_of(run) for b in r.branches)
    assert all(answer.combined is None for answer in run.answers)
    assert run.manager.kv.ledger.moves["fold"] == 0


@pytest.mark.parametrize(("graph", "sets"), [(BLEND, ("blend.plan=reuse",)), (ATTEND, ())])
def test_another_context_is_another_answer(graph: str, sets: tuple[str, ...], made: Tiny) -> None:
    found = []
    for own in (sets, PLAIN):
        opened = session(made, *own, outline=outline_of(4), budget=24, graph=graph)
        run = run_all(opened, TEXTS[:2], check=False)
        found.append([combined_of(one).tokens for one in requests_of(run)])
    assert found[0] != found[1]


def folded(run: EngineCore) -> EngineCore:
    return drive(run, until=lambda run: any(b.combines for b in run.branches))


def rows_of(run: EngineCore, branch: Branch, count: int | None = None) -> torch.Tensor:
    """[layers, 2, kv_heads, R, head_dim], of a branch alone, by position."""
    book, kv = run.manager, run.manager.kv
    slots = kv.slots_of(branch.owner, book.layout.rows_of(branch.owner)[0])[:count]
    return kv.data[:, :, :, torch.tensor(slots, dtype=torch.int64)].clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_lie_in_the_fold_as_they_were_written(layout: str, made: Tiny) -> None:
    """Reused whole: each V as it was; the first part, which went on from the prefix, exactly as
    plain computes it; keys of others turned by the distance that they moved."""
    outline, book, target = outline_of(3), book_of(made), made.models.target
    opened = session(made, "blend.plan=reuse", layout, outline=outline, book=book)
    run, lay = start(opened, ["hello"]), {}
    fold = run.manager.fold
    keep = fold.keep_

    def looking(branch: Branch, kv: KVCache, slots: Ints) -> None:
        if branch.point is not None:
            lay[branch.index] = rows_of(run, branch)
        keep(branch, kv, slots)

    fold.keep_ = looking
    folded(run)
    (request,) = requests_of(run)
    combined, at = combined_of(request), 0
    held = rows_of(run, combined)
    plain = folded(start(session(made, *PLAIN, layout, outline=outline), ["hello"]))
    exact = rows_of(plain, combined_of(requests_of(plain)[0]))
    for number, branch in enumerate(request.branches[:-1]):
        at += 3 if number else 0  # what stands between two parts
        count = branch.length - branch.start
        part, old = held[:, :, :, at : at + count], lay[branch.index]
        torch.testing.assert_close(part[:, 1], old[:, 1], rtol=0, atol=0)
        moved = torch.arange(count) + branch.start + at
        keys = [
            target.before_rope(one[:, 0].transpose(1, 2), where)
            for one, where in ((part, moved), (old, moved - at))
        ]
        torch.testing.assert_close(*keys, rtol=1e-4, atol=1e-4)
        if number == 0:
            torch.testing.assert_close(part, exact[:, :, :, at : at + count], rtol=1e-4, atol=1e-4)
        at += len(branch.prompt) + len(branch.tokens)
    assert at + len(book.combine()) == len(combined.prompt)


def features_behind(made: Tiny, ids: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    """[len(ids), F] of the target, by a forward of its own."""
    target, steps = made.models.target, torch.arange(len(ids))[None]
    kv = KVCache(target.num_layers, target.kv_heads, target.head_dim, len(ids))
    visible = AttentionPlan.dense(steps[:, :, None] >= steps[:, None], steps)
    with torch.inference_mode():
        rows = torch.tensor([ids])
        output = target.forward(
            rows, steps, steps, visible, kv, decode_plan(target.num_layers), steps[0], taps
        )
    features: torch.Tensor = output.taps_QF
    return features


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_drafter_gets_the_features_that_the_parts_rows_had(layout: str, made: Tiny) -> None:
    run = start(session(made, *REUSED, layout, outline=outline_of(3)), ["hello"])
    found: list[ChunkKV] = []
    fold = run.manager.fold
    prompt = fold.prompt

    def looking(request: Request) -> PromptTokens | None:
        parts = [fold.parts.get(branch.owner) for branch in request.branches]
        found.extend(part.rows for part in parts if part is not None)
        return prompt(request)

    fold.prompt = looking
    drive(run)
    (request,) = requests_of(run)
    assert len(found) == 3
    for branch, rows in zip(request.branches, found, strict=False):
        ids = [*request.context, *branch.prompt, *branch.tokens]
        wanted = features_behind(made, ids, run.board["taps"])[branch.start :][: rows.rows]
        assert rows.features_RF is not None
        torch.testing.assert_close(rows.features_RF, wanted, rtol=1e-3, atol=1e-3)


def test_the_first_part_is_protected_and_what_asks_is_computed(made: Tiny) -> None:
    outline, book = outline_of(3), book_of(made)
    run, rounds = watched(session(made, *REUSED, outline=outline, book=book), ["hello"])
    (request,), (blend,) = requests_of(run), rounds.blends
    parts = request.branches[:-1]
    sizes = [b.length - b.start for b in parts]
    assert blend.protected == sizes[0] and blend.reused == sum(sizes[1:])
    assert blend.suffix == len(combined_of(request).prompt) - sum(sizes)
    ledger = run.manager.kv.ledger
    assert ledger.moves["fold"] == 3
    assert ledger.bytes["fold"] == sum(sizes) * run.manager.kv.slot_bytes


@EVERY
@GRAPHS
def test_no_byte_leaves_the_pool_that_the_ledger_does_not_name(
    graph: str, layout: str, made: Tiny
) -> None:
    sets = sets_of(graph, layout)
    run = start(session(made, *sets, outline=outline_of(4), graph=graph), TEXTS)
    watch = pool_watch.watched(run)
    moved = sum(sum(pool.ledger.bytes.values()) for pool in pool_watch.pools_of(run))
    assert moved == watch.copied[pool_watch.GATHER] == sum(watch.copied.values())
    kv, requests = run.manager.kv, requests_of(run)
    if graph == BLEND:
        assert kv.ledger.moves["fold"] == 4 * len(TEXTS)
    else:  # in rows of their own, parts are copied once
        assert (0 < kv.ledger.moves["attend"] <= 3 * len(TEXTS)) == ("batching" in layout)
        most = sum(branch.num_tokens for one in requests for branch in one.parts)
        assert kv.ledger.bytes["attend"] <= most * kv.slot_bytes
    assert kv.current_length == kv.idle_length and not getattr(run.manager.layout, "_retained", ())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "before"), [(FoldBook, 1), (FrontBook, 0)])
def test_documents_and_quotes_are_left_out_of_the_fold(
    kind: type[FoldBook], before: int, layout: str, made: Tiny
) -> None:
    outline = searching(["bees rain", "rain tea", "", "tea iron"], deps=(3,))
    book = kind(made.models.target.vocab_size, "outline", ())
    opened = session(made, *REUSED, layout, outline=outline, book=book)
    run, rounds = watched(opened, asked(1))
    (request,), fold = requests_of(run), rounds.blends[-1]
    parts = request.branches[:-1]
    assert [*combined_of(request).prompt] == fold_of(request, book)
    assert parts[0].documents and parts[1].documents and len(parts[2].prompt) > 14
    assert fold.protected == before, "so many rows stand before the first part's documents"
    own = [len(book.branch(b.point, request.outline, ())[1]) for b in parts if b.point]
    said = [len(b.tokens) - 1 for b in parts]  # the last one is computed anew
    assert fold.protected + fold.reused == sum(own) + sum(said)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_that_only_begins_and_ends_as_before_is_reused_there(
    layout: str, made: Tiny
) -> None:
    found = []
    for drafter in ("drafter.kind=none", "drafter.kind=eagle3"):
        book = OtherBook(made.models.target.vocab_size, "outline", ())
        sets = (*REUSED, layout, drafter)
        run, rounds = watched(session(made, *sets, outline=outline_of(3), book=book))
        for request in requests_of(run):
            assert [*combined_of(request).prompt] == fold_of(request, book)
        assert rounds.blends
        found.append(tokens_of(run))
    assert found[0] == found[1]


# -- parts that are attended to ------------------------------------------------------------------


def sight(branch: Branch, answer: int) -> tuple[list[int], list[int], torch.Tensor]:
    """The ids that a combined answer stands behind, with so many of its own, their positions, and
    [Q, Q] who sees whom; put together here, by hand."""
    request = branch.request
    prefix = [*request.context]
    parts = [[*b.prompt, *b.tokens] for b in request.branches if b.point and not b.note]
    own = [*branch.prompt, *branch.tokens[:answer]]
    first = len(prefix) + max(map(len, parts))
    ids, places, texts = [*prefix], list(range(len(prefix))), [0] * len(prefix)
    for number, part in enumerate(parts, 1):
        ids += part
        places += range(len(prefix), len(prefix) + len(part))
        texts += [number] * len(part)
    ids += own
    places += range(first, first + len(own))
    texts += [-1] * len(own)
    sees = torch.tensor([[t in (0, s) or s == -1 for t in texts] for s in texts])
    order = torch.tensor(places)
    return ids, places, sees & (order[:, None] >= order[None])


def transformers_says(made: Tiny, branch: Branch) -> list[int]:
    """The likeliest token behind the prompt and every token of a combined answer, by transformers
    with a mask of four dimensions and positions that are given."""
    ids, places, sees_QQ = sight(branch, len(branch.tokens))
    hidden_QQ = torch.zeros(sees_QQ.shape).masked_fill(~sees_QQ, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        output = made.reference.model(torch.float32)(
            torch.tensor([ids]),
            position_ids=torch.tensor([places]),
            attention_mask=hidden_QQ[None, None],
        )
    best: list[int] = output.logits[0, -len(branch.tokens) - 1 :].argmax(-1).tolist()
    return best


def held(run: EngineCore, made: Tiny, stops: tuple[int, ...]) -> None:
    for request in requests_of(run):
        branch = combined_of(request)
        said = transformers_says(made, branch)
        assert len(branch.tokens) > 0 and branch.tokens == said[: len(branch.tokens)]
        assert branch.finish is Finish.LENGTH or said[-1] in stops


@pytest.mark.parametrize(("layout", "share"), [*product(LAYOUTS, ("outline", "prompt"))])
def test_the_answer_is_the_targets_own_under_its_mask(layout: str, share: str, made: Tiny) -> None:
    outline, book = outline_of(4, {3: (1,)}), book_of(made, share, (2,))
    run = run_all(attending(made, layout, outline=outline, book=book, budget=22), TEXTS)
    held(run, made, (2,))
    assert sum(sum(combined_of(one).accepted) for one in requests_of(run)) > 0


def test_layers_with_a_window_look_back_by_position(tiny: Make) -> None:
    made = tiny("mistral", context=2.0, window=30)
    run = run_all(attending(made, outline=outline_of(4)), TEXTS)
    reference, alike = Transformers(made.folder, "cpu"), []
    for branch in map(combined_of, requests_of(run)):
        ids = [*branch.before, *branch.tokens]
        for segments in (context_segments(branch), ()):
            logits_QV = reference.logits(ids, "float32", segments)[len(branch.before) - 1 : -1]
            alike.append(logits_QV.argmax(-1).tolist() == branch.tokens)
    assert all(alike[::2]) and not all(alike[1::2])


def test_documents_of_parts_are_seen_where_they_lie(made: Tiny) -> None:
    outline = searching(["bees rain", "rain tea", "", "tea iron"], deps=(3,))
    book = FoldBook(made.models.target.vocab_size, "outline", ())
    run = run_all(attending(made, outline=outline, book=book), asked(1))
    assert requests_of(run)[0].branches[0].documents
    held(run, made, ())


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "vanilla"])
def test_in_one_sequence_nothing_moves_and_nothing_is_computed_again(kind: str, made: Tiny) -> None:
    sets = settings_of(kind, 0)
    opened = attending(made, *sets, outline=outline_of(4), models=drafting(made, kind))
    run = start(opened, TEXTS[:1])
    drive(run, until=lambda run: bool(run.steps and run.board["step"].folds))
    (request,) = requests_of(run)
    parts = [b for b in request.branches if b.point]
    sizes = [b.length - b.start for b in parts]
    before = [rows_of(run, b, n) for b, n in zip(parts, sizes, strict=True)]
    unread = sum(len(b.pending) for b in parts)
    with pool_watch.PoolWatch(run) as watch:
        drive(run, until=lambda run: run.state == "merge")
    combined = combined_of(request)
    assert combined.start == max(b.start + len(b.prompt) + len(b.tokens) for b in parts)
    assert [p.owner for p in combined.reads] == [p.owner for p in parts]
    for branch, size, old in zip(parts, sizes, before, strict=True):
        assert torch.equal(rows_of(run, branch, size), old), "rows of a part have changed"
        assert branch.num_cached_tokens == len(branch.tokens) and not branch.pending
    total = sum(b.length - b.start for b in (*parts, combined))
    assert total == sum(sizes) + unread + len(combined.prompt), "as many rows as were computed"
    drive(run)
    assert watch.attended and not sum(watch.copied.values())
    for pool in pool_watch.pools_of(run):
        assert not sum(pool.ledger.moves.values())
    assert run.manager.kv.needed_length == 0


def test_rows_that_saw_several_parts_are_nobodys_prompt(made: Tiny) -> None:
    run = run_all(attending(made, outline=outline_of(3)), ["hello"])
    (request,), cache = requests_of(run), run.manager.prefixes
    owners = [b.owner for b in request.branches]
    assert [owner in cache.nodes for owner in owners] == [True, True, True, False]


# -- several requests, and ends of all kinds -----------------------------------------------------


def test_a_later_request_runs_on_while_the_first_is_combined(made: Tiny) -> None:
    opened = session(made, *REUSED, "layout.max_num_branches=4", outline=outline_of(3))
    run, both = start(opened, TEXTS), 0
    while not run.finished:
        run.advance()
        active = run.branches
        both += any(b.combines for b in active) and not all(b.combines for b in active)
    assert both > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_part_alone_is_the_answer(layout: str, made: Tiny) -> None:
    run = run_all(session(made, *REUSED, layout, outline=outline_of(1)), ["hello"])
    (request,), (answer,) = requests_of(run), run.answers
    assert len(request.branches) == 1 and answer.combined is None
    assert answer.sections[0].text in answer.text


class FoldSized(SizedBook):
    """Branch prompts as long as their points say."""

    def next_part(self, point: Point, outline: Outline) -> tuple[PromptTokens, PromptTokens]:
        return PromptTokens((11,)), self.branch(point, outline, ())[1]

    def combine(self) -> PromptTokens:
        return PromptTokens((14, 15))


@EVERY
@GRAPHS
@pytest.mark.parametrize("which", [1, 2])
def test_a_refused_part_is_left_out(which: int, graph: str, layout: str, made: Tiny) -> None:
    outline = outline_with([900 if i == which else 12 for i in (1, 2, 3)])
    book = FoldSized(made.models.target.vocab_size, "outline", ())
    sets = (*sets_of(graph, layout), "layout.kv_slots=500")
    opened = session(made, *sets, outline=outline, book=book, graph=graph)
    run = run_all(opened, ["hello"])
    (request,), (answer,) = requests_of(run), run.answers
    assert request.branches[which - 1].finish is Finish.REFUSED
    combined = combined_of(request)
    if graph == BLEND:
        assert [*combined.prompt] == fold_of(request, book) and len(combined.tokens) == 14
    else:
        assert len(combined.reads) == 2
        held(run, made, ())
    assert finish_of(answer) == "refused" and answer.text == book.decode(combined.tokens)


def test_a_fold_longer_than_the_model_leaves_the_parts_alone(tiny: Make) -> None:
    made = tiny("llama", context=2.0, max_positions=160)
    run = run_all(session(made, *REUSED, outline=outline_of(4), budget=40), ["hello"])
    (request,) = requests_of(run)
    assert combined_of(request).finish is Finish.REFUSED
    assert combined_of(request).note.endswith("the model takes 160")


@EVERY
def test_in_a_narrow_pool_no_answer_waits_for_rows_of_others(layout: str, made: Tiny) -> None:
    sets = (layout, "layout.max_num_branches=4", "skeleton.max_branches=4")
    wide = run_all(attending(made, *sets, outline=outline_of(4)), TEXTS)
    narrow = (*sets, "layout.kv_slots=330")
    run = run_all(attending(made, *narrow, outline=outline_of(4)), TEXTS)
    assert tokens_of(run) == tokens_of(wide)
    assert not uncombined(run.answers)


@GRAPHS
@EVERY
@pytest.mark.parametrize("at", ["parts", "waits", "runs"])
def test_a_cancelled_request_leaves_its_parts_and_no_row(
    at: str, layout: str, graph: str, made: Tiny
) -> None:
    sets = sets_of(graph, layout)
    opened = session(made, *sets, outline=outline_of(3), budget=20, graph=graph)
    others = tokens_of(run_all(opened, TEXTS))
    run = start(opened, TEXTS)
    first = run.requests[0]
    stage = Stage.WAITING if at == "waits" else Stage.RUNNING

    def holds(run: Any) -> bool:
        if at == "parts":
            return any(branch.ended for branch in first.branches)
        return any(branch.combines and branch.stage is stage for branch in first.branches)

    drive(run, until=holds)
    run.manager.table.cancel("0")
    drive(run)
    if not run.answers[0].combined:
        assert at == "parts" or combined_of(first).finish is Finish.CANCELLED
    assert {k: tokens_of(run)[k] for k in "12"} == {k: others[k] for k in "12"}
    answer = run.answers[0]
    assert answer.sections[0].text in answer.text, "its parts are what it has"
    assert finish_of(answer) == "cancelled" and run.manager.kv.needed_length == 0


@GRAPHS
@EVERY
@pytest.mark.parametrize("nodes", [0, 6])
def test_what_just_fits_is_combined_and_with_one_slot_less_the_parts_stand_alone(
    nodes: int, layout: str, graph: str, made: Tiny
) -> None:
    folds, budget = graph == BLEND, 60 if graph == BLEND else 20
    drafter = ("drafter.kind=eagle3", *FIXED) if nodes else ("drafter.kind=none",)
    # As many branches side by side as take less room than the combined answer.
    sets = (*sets_of(graph, layout), *drafter, "layout.max_num_branches=1")
    opened = partial(session, made, outline=outline_of(4), budget=budget, graph=graph)
    wide = run_all(opened(*sets), ["hello"])
    (request,) = wide.requests
    parts = 0 if folds else sum(branch.num_tokens for branch in request.parts)
    rows = parts + len(combined_of(request).prompt) + budget
    needed = request.prefix_length + rows + nodes + 1
    for capacity in (needed, needed - 1):
        run = run_all(opened(*sets, f"layout.kv_slots={capacity}"), ["hello"])
        (one,), answers = run.requests, run.answers
        if capacity == needed:
            assert tokens_of(run) == tokens_of(wide) and not uncombined(answers)
            continue
        note = f"needs {needed} slots, the pool has {capacity}"
        assert combined_of(one).finish is Finish.REFUSED and combined_of(one).note == note
        assert tokens_of(run)["0"][:-1] == tokens_of(wide)["0"][:-1]
        assert uncombined(answers) == [f"request 0: the parts are not combined: {note}"]
        assert finish_of(answers[0]) == "length"
        assert all(section.text in answers[0].text for section in answers[0].sections)


# -- what is told -------------------------------------------------------------------------------


def test_the_answer_is_the_combined_text_and_the_parts_stay(made: Tiny) -> None:
    book = book_of(made)
    found = []
    for layout in LAYOUTS:
        opened = session(made, *REUSED, layout, outline=outline_of(3), book=book)
        run = run_all(opened, TEXTS)
        answers = answers_of(requests_of(run), book)
        assert answers == run.answers, "the last ones that the state made"
        found.append(output_digest(answers))
        lines = outputs(answers, requests_of(run), book, Meter())
        for request, line in zip(requests_of(run), lines, strict=True):
            tokens = combined_of(request).tokens
            assert line["text"] == book.decode(tokens)
            assert line["combined"]["title"] == "combined"
            assert line["combined"]["token_ids"] == tokens
            assert [p["title"] for p in line["parts"]] == ["Part 1", "Part 2", "Part 3"]
            assert combined_of(request).name == f"{request.key}/combined"
        combined_of(requests_of(run)[0]).tokens[-1] ^= 1
        assert output_digest(answers_of(requests_of(run), book)) != found[-1]
    assert found[0] == found[1]


def test_before_anything_is_folded_no_forward_is_told(made: Tiny) -> None:
    sink = Rounds()
    opened = session(made, *REUSED, outline=outline_of(3))
    sink.run = start(opened, ["hello"], sink)
    drive(sink.run)
    assert sink.run.state == "done" and sink.found[-1].rows == 0
    assert [one.branches for one in sink.found if one.blend] == [("0/combined",)]


# -- which rows are the same ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "there", "head", "tail"),
    [
        ([1, 2, 3], [1, 2, 3], 3, 0),
        ([1, 2, 3], [1, 2, 9, 9, 3], 2, 1),
        ([1, 2, 3], [9, 9, 1, 2, 3], 0, 3),
        ([1, 1, 1], [1, 1], 2, 0),
        ([1, 7, 3], [1, 3], 1, 1),
        ([1], [2], 0, 0),
        ([], [2], 0, 0),
    ],
)
def test_matched(wanted: list[int], there: list[int], head: int, tail: int) -> None:
    assert common_ends(wanted, there) == (head, tail)


def test_runs_end_at_gaps_and_at_the_cut() -> None:
    source = [0, 1, 2, 3, NEW, NEW, 4, 5, 8]
    assert list(runs(source, 2)) == [(0, 0, 2), (2, 2, 2), (6, 4, 2), (8, 8, 1)]
    assert list(runs([0, 1, 2], 3)) == [(0, 0, 3)] and not list(runs([NEW], 0))

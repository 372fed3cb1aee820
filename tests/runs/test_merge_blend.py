"""Finished parts folded into one context and combined: what is folded, reused, written and told."""

import pytest
import torch
from helpers import pools as pool_watch
from helpers.folds import (
    REUSED,
    FoldBook,
    FrontBook,
    OtherBook,
    book_of,
    combined_of,
    fold_of,
    session,
)
from helpers.reading import Rounds, asked, searching, watched
from helpers.support import (
    Graphs,
    Make,
    SizedBook,
    Tiny,
    drive,
    outline_of,
    requests_of,
    run_all,
    start,
    tokens_of,
)

from specsot.engine.events import finish_of
from specsot.engine.record.metrics import Meter
from specsot.engine.record.report import answers_of, output_digest, outputs
from specsot.engine.run.core import EngineCore
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.blend import ChunkKV
from specsot.ops.kv.pool import Ints, KVCache
from specsot.ops.layer_plan import decode_plan
from specsot.states.blend import NEW, common_ends, runs
from specsot.states.request import Branch, Finish, Request
from specsot.states.text.outline import Outline, Point
from specsot.states.text.tokens import PromptTokens

TEXTS = ("hello", "another question", "a third")
LAYOUTS = ("layout.kind=bim", "layout.kind=batching")
PLAIN = ("skeleton.merge=plain",)


@pytest.fixture
def made(tiny: Make) -> Tiny:
    return tiny("llama", context=2.0)


# -- what is folded, and that it is computed exactly ----------------------------------------------


@pytest.mark.parametrize(
    ("layout", "share"), [(LAYOUTS[0], "prompt"), (LAYOUTS[1], "outline"), (LAYOUTS[0], "outline")]
)
@pytest.mark.parametrize("sets", [("blend.ratios=[1]",), ("blend.plan=plain",)])
def test_nothing_reused_is_plain(
    sets: tuple[str, ...], layout: str, share: str, made: Tiny, graphs: Graphs
) -> None:
    book = book_of(made, share)
    outline = outline_of(4, {3: (1,)})
    plain = run_all(session(graphs, made, *PLAIN, layout, outline=outline, book=book), TEXTS)
    run, rounds = watched(session(graphs, made, *sets, layout, outline=outline, book=book), TEXTS)
    assert tokens_of(run) == tokens_of(plain) and not rounds.blends


def test_with_concat_the_graph_is_the_one_without_the_phase(made: Tiny, graphs: Graphs) -> None:
    book = book_of(made)
    sets = ("skeleton.merge=concat",)
    run = run_all(session(graphs, made, *sets, outline=outline_of(3), book=book), TEXTS)
    assert not any(b.combines for r in requests_of(run) for b in r.branches)
    assert all(answer.combined is None for answer in run.answers)
    assert run.manager.kv.ledger.moves["fold"] == 0


# -- reused rows ----------------------------------------------------------------------------------


def test_a_reused_fold_is_another_answer_than_a_computed_one(made: Tiny, graphs: Graphs) -> None:
    found = []
    for sets in (("blend.plan=reuse",), PLAIN):
        run = run_all(session(graphs, made, *sets, outline=outline_of(4), budget=30), TEXTS)
        found.append([combined_of(r).tokens for r in requests_of(run)])
    assert found[0] != found[1]


def folded(run: EngineCore) -> EngineCore:
    return drive(run, until=lambda run: any(b.combines for b in run.branches))


def rows_of(run: EngineCore, branch: Branch) -> torch.Tensor:
    """[layers, 2, kv_heads, R, head_dim], of a branch alone, by position."""
    book, kv = run.manager, run.manager.kv
    slots = kv.slots_of(branch.owner, book.layout.rows_of(branch.owner)[0])
    return kv.data[:, :, :, torch.tensor(slots, dtype=torch.int64)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_lie_in_the_fold_as_they_were_written(
    layout: str, made: Tiny, graphs: Graphs
) -> None:
    """Reused whole: each V as it was; the first part, which went on from the prefix, exactly as
    plain computes it; keys of others turned by the distance that they moved."""
    outline, book, target = outline_of(3), book_of(made), made.models.target
    opened = session(graphs, made, "blend.plan=reuse", layout, outline=outline, book=book)
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
    plain = folded(start(session(graphs, made, *PLAIN, layout, outline=outline), ["hello"]))
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
def test_a_drafter_gets_the_features_that_the_parts_rows_had(
    layout: str, made: Tiny, graphs: Graphs
) -> None:
    run = start(session(graphs, made, *REUSED, layout, outline=outline_of(3)), ["hello"])
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


def test_the_first_part_is_protected_and_what_asks_is_computed(made: Tiny, graphs: Graphs) -> None:
    outline, book = outline_of(3), book_of(made)
    run, rounds = watched(session(graphs, made, *REUSED, outline=outline, book=book), ["hello"])
    (request,), (blend,) = requests_of(run), rounds.blends
    parts = request.branches[:-1]
    sizes = [b.length - b.start for b in parts]
    assert blend.protected == sizes[0] and blend.reused == sum(sizes[1:])
    assert blend.suffix == len(combined_of(request).prompt) - sum(sizes)
    ledger = run.manager.kv.ledger
    assert ledger.moves["fold"] == 3
    assert ledger.bytes["fold"] == sum(sizes) * run.manager.kv.slot_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_byte_leaves_the_pool_that_the_ledger_does_not_name(
    layout: str, made: Tiny, graphs: Graphs
) -> None:
    run = start(session(graphs, made, *REUSED, layout, outline=outline_of(3)), TEXTS)
    watch = pool_watch.watched(run)
    moved = sum(sum(pool.ledger.bytes.values()) for pool in pool_watch.pools_of(run))
    assert moved == watch.copied[pool_watch.GATHER] == sum(watch.copied.values())
    assert run.manager.kv.ledger.moves["fold"] == 9


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "before"), [(FoldBook, 1), (FrontBook, 0)])
def test_documents_and_quotes_are_left_out_of_the_fold(
    kind: type[FoldBook], before: int, layout: str, made: Tiny, graphs: Graphs
) -> None:
    outline = searching(["bees rain", "rain tea", "", "tea iron"], deps=(3,))
    book = kind(made.models.target.vocab_size, "outline", ())
    opened = session(graphs, made, *REUSED, layout, outline=outline, book=book)
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
    layout: str, made: Tiny, graphs: Graphs
) -> None:
    found = []
    for drafter in ("drafter.kind=none", "drafter.kind=eagle3"):
        book = OtherBook(made.models.target.vocab_size, "outline", ())
        sets = (*REUSED, layout, drafter)
        run, rounds = watched(session(graphs, made, *sets, outline=outline_of(3), book=book))
        for request in requests_of(run):
            assert [*combined_of(request).prompt] == fold_of(request, book)
        assert rounds.blends
        found.append(tokens_of(run))
    assert found[0] == found[1]


# -- several requests, and ends of all kinds --------------------------------------------------


def test_a_later_request_runs_on_while_the_first_is_combined(made: Tiny, graphs: Graphs) -> None:
    opened = session(graphs, made, *REUSED, "layout.max_num_branches=4", outline=outline_of(3))
    run, both = start(opened, TEXTS), 0
    while not run.finished:
        run.advance()
        active = run.branches
        both += any(b.combines for b in active) and not all(b.combines for b in active)
    assert both > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_part_alone_is_the_answer(layout: str, made: Tiny, graphs: Graphs) -> None:
    run = run_all(session(graphs, made, *REUSED, layout, outline=outline_of(1)), ["hello"])
    (request,), (answer,) = requests_of(run), run.answers
    assert len(request.branches) == 1 and answer.combined is None
    assert answer.sections[0].text in answer.text


class FoldSized(SizedBook):
    """Branch prompts as long as their points say."""

    def next_part(self, point: Point, outline: Outline) -> tuple[PromptTokens, PromptTokens]:
        return PromptTokens((11,)), self.branch(point, outline, ())[1]

    def combine(self) -> PromptTokens:
        return PromptTokens((14, 15))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [1, 2])
def test_a_refused_part_is_left_out(which: int, layout: str, made: Tiny, graphs: Graphs) -> None:
    points = tuple(Point(i, 900 if i == which else 12, None, (), f"Part {i}") for i in (1, 2, 3))
    outline = Outline("plan", points, (), "ok")
    book = FoldSized(made.models.target.vocab_size, "outline", ())
    sets = (*REUSED, layout, "layout.kv_slots=500")
    run = run_all(session(graphs, made, *sets, outline=outline, book=book), ["hello"])
    (request,), (answer,) = requests_of(run), run.answers
    assert request.branches[which - 1].finish is Finish.REFUSED
    combined = combined_of(request)
    assert [*combined.prompt] == fold_of(request, book) and len(combined.tokens) == 14
    assert finish_of(answer) == "refused" and answer.text == book.decode(combined.tokens)


def test_a_fold_longer_than_the_model_leaves_the_parts_alone(tiny: Make, graphs: Graphs) -> None:
    made = tiny("llama", context=2.0, max_positions=160)
    run = run_all(session(graphs, made, *REUSED, outline=outline_of(4), budget=40), ["hello"])
    (request,) = requests_of(run)
    assert combined_of(request).finish is Finish.REFUSED
    assert combined_of(request).note.endswith("the model takes 160")


# -- what is told -------------------------------------------------------------------------------


def test_the_answer_is_the_combined_text_and_the_parts_stay(made: Tiny, graphs: Graphs) -> None:
    book = book_of(made)
    found = []
    for layout in LAYOUTS:
        opened = session(graphs, made, *REUSED, layout, outline=outline_of(3), book=book)
        run = run_all(opened, TEXTS)
        answers = answers_of(requests_of(run), book)
        assert answers == run.answers, "the last ones that the state made"
        found.append(output_digest(answers))
        for request, line in zip(requests_of(run), outputs(answers, Meter(), {}, {}), strict=True):
            tokens = combined_of(request).tokens
            assert line["text"] == book.decode(tokens)
            assert line["combined"]["title"] == "combined"
            assert line["combined"]["token_ids"] == tokens
            assert [p["title"] for p in line["parts"]] == ["Part 1", "Part 2", "Part 3"]
            assert combined_of(request).name == f"{request.key}/combined"
        combined_of(requests_of(run)[0]).tokens[-1] ^= 1
        assert output_digest(answers_of(requests_of(run), book)) != found[-1]
    assert found[0] == found[1]


def test_before_anything_is_folded_no_forward_is_told(made: Tiny, graphs: Graphs) -> None:
    sink = Rounds()
    opened = session(graphs, made, *REUSED, outline=outline_of(3))
    sink.run = start(opened, ["hello"], sink)
    drive(sink.run)
    assert sink.run.state == "done" and sink.found[-1].rows == 0
    assert [one.branches for one in sink.found if one.blend] == [("0/combined",)]


# -- which rows are the same ----------------------------------------------------------------------


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

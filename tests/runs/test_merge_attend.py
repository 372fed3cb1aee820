"""Finished parts read where they lie: who sees what, what it costs, who may be in the way."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from helpers import pools as pool_watch
from helpers.drafters import KINDS, drafting, settings_of
from helpers.folds import FoldBook, book_of, combined_of
from helpers.folds import session as folding
from helpers.reading import asked, searching
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
    taking_turns,
    tokens_of,
)

from specsot.engine.certify.reference import Transformers
from specsot.engine.record.report import uncombined
from specsot.engine.run.core import EngineCore
from specsot.engine.run.scoring import context_segments
from specsot.states.request import Branch, Finish
from specsot.states.text.outline import Outline, Point
from specsot.states.text.tokens import PromptTokens

TEXTS = ("hello", "another question", "a third")
LAYOUTS = ("layout.kind=bim", "layout.kind=batching", "layout.kind=paged")
NONE = ("drafter.kind=none",)
session = partial(folding, graph="bim_attend_merge")


@pytest.fixture
def made(tiny: Make) -> Tiny:
    return tiny("llama", context=2.0)


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


# -- whose tokens they are ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "how"), taking_turns(["none", *KINDS], list(product(LAYOUTS, ("outline", "prompt"))))
)
def test_the_answer_is_the_targets_own_under_its_mask(
    kind: str, how: tuple[str, str], made: Tiny, graphs: Graphs
) -> None:
    layout, share = how
    drafter = NONE if kind == "none" else settings_of(kind, 0)
    models = made.models if kind == "none" else drafting(made, kind)
    opened = session(
        graphs,
        made,
        layout,
        *drafter,
        outline=outline_of(4, {3: (1,)}),
        book=book_of(made, share, (2,)),
        models=models,
        budget=22,
    )
    run = run_all(opened, TEXTS)
    held(run, made, (2,))
    if kind in ("eagle3", "vanilla"):
        assert sum(sum(combined_of(one).accepted) for one in requests_of(run)) > 0


def test_layers_with_a_window_look_back_by_position(tiny: Make, graphs: Graphs) -> None:
    made = tiny("mistral", context=2.0, window=30)
    run = run_all(session(graphs, made, outline=outline_of(4)), TEXTS)
    reference, alike = Transformers(made.folder, "cpu"), []
    for branch in map(combined_of, requests_of(run)):
        ids = [*branch.before, *branch.tokens]
        for segments in (context_segments(branch), ()):
            logits_QV = reference.logits(ids, "float32", segments)[len(branch.before) - 1 : -1]
            alike.append(logits_QV.argmax(-1).tolist() == branch.tokens)
    assert all(alike[::2]) and not all(alike[1::2])


def test_what_it_sees_decides(made: Tiny, graphs: Graphs) -> None:
    attends = run_all(session(graphs, made, outline=outline_of(4), budget=30), TEXTS)
    plain = session(graphs, made, "skeleton.merge=plain", outline=outline_of(4), budget=30)
    found = [
        [combined_of(one).tokens for one in requests_of(run)]
        for run in (attends, run_all(plain, TEXTS))
    ]
    assert found[0] != found[1]


def test_documents_of_parts_are_seen_where_they_lie(made: Tiny, graphs: Graphs) -> None:
    outline = searching(["bees rain", "rain tea", "", "tea iron"], deps=(3,))
    book = FoldBook(made.models.target.vocab_size, "outline", ())
    run = run_all(session(graphs, made, outline=outline, book=book), asked(1))
    assert requests_of(run)[0].branches[0].documents
    held(run, made, ())


# -- what it costs --------------------------------------------------------------------------------


def combining(opened: Any, texts: tuple[str, ...] = TEXTS[:1]) -> tuple[EngineCore, Any]:
    run = start(opened, texts)
    drive(run, until=lambda run: bool(run.steps and run.board["step"].folds))
    return run, requests_of(run)[0]


def rows_of(run: EngineCore, branch: Branch, count: int, key: str = "kv") -> torch.Tensor:
    book, pool = run.manager, run.board[key]
    slots = pool.slots_of(branch.owner, book.layout.rows_of(branch.owner)[0])[:count]
    return pool.data[:, :, :, torch.tensor(slots, dtype=torch.int64)].clone()


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "vanilla"])
def test_in_one_sequence_nothing_moves_and_nothing_is_computed_again(
    kind: str, made: Tiny, graphs: Graphs
) -> None:
    sets = settings_of(kind, 0)
    opened = session(graphs, made, *sets, outline=outline_of(4), models=drafting(made, kind))
    run, request = combining(opened)
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


def test_in_rows_of_their_own_parts_are_copied_once(made: Tiny, graphs: Graphs) -> None:
    opened = session(graphs, made, LAYOUTS[1], outline=outline_of(4))
    run = start(opened, TEXTS)
    watch = pool_watch.watched(run)
    moved = sum(sum(pool.ledger.bytes.values()) for pool in pool_watch.pools_of(run))
    assert moved == watch.copied[pool_watch.GATHER] == sum(watch.copied.values())
    kv = run.manager.kv
    assert 0 < kv.ledger.moves["attend"] <= 3 * len(TEXTS)
    most = sum(b.num_tokens for r in requests_of(run) for b in r.parts)
    assert kv.ledger.bytes["attend"] <= most * kv.slot_bytes
    assert kv.current_length == 0 and not run.manager.layout._retained


# -- others, and ends of all kinds ----------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_a_narrow_pool_nobody_waits_for_what_others_hold(
    layout: str, made: Tiny, graphs: Graphs
) -> None:
    sets = (layout, "layout.max_num_branches=4", "skeleton.max_branches=4")
    wide = run_all(session(graphs, made, *sets, outline=outline_of(4)), TEXTS)
    narrow = (*sets, "layout.kv_slots=330")
    run = run_all(session(graphs, made, *narrow, outline=outline_of(4)), TEXTS)
    assert tokens_of(run) == tokens_of(wide)
    assert not uncombined(run.answers)


class ShortBook(SizedBook):
    def combine(self) -> PromptTokens:
        return PromptTokens((14, 15))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refused_part_is_left_out(layout: str, made: Tiny, graphs: Graphs) -> None:
    points = tuple(Point(i, 900 if i == 2 else 12, None, (), f"Part {i}") for i in (1, 2, 3))
    outline = Outline("plan", points, (), "ok")
    book = ShortBook(made.models.target.vocab_size, "outline", ())
    sets = (layout, "layout.kv_slots=500")
    run = run_all(session(graphs, made, *sets, outline=outline, book=book), ["hello"])
    (request,) = requests_of(run)
    assert request.branches[1].finish is Finish.REFUSED
    assert len(combined_of(request).reads) == 2
    held(run, made, ())


def test_rows_that_saw_several_parts_are_nobodys_prompt(made: Tiny, graphs: Graphs) -> None:
    run = run_all(session(graphs, made, outline=outline_of(3)), ["hello"])
    (request,), cache = requests_of(run), run.manager.prefixes
    owners = [b.owner for b in request.branches]
    assert [owner in cache.nodes for owner in owners] == [True, True, True, False]

"""Runs on cached documents: what is kept, found and reused, and that speculation stays lossless."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
import torch
from helpers.reading import BLENDED, DOCUMENTS, TWINS, asked, book_of, searching, watched
from helpers.reading import session as reading
from helpers.support import (
    Make,
    Tiny,
    accepted_of,
    drive,
    graphs,
    requests_of,
    run_all,
    start,
    tokens_of,
)

from specsot.engine.chunks.store import ChunkStore
from specsot.engine.record.metrics import Meter, held_figures
from specsot.engine.record.recorder import trace_record
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.blend import Blend, BlendRows, ChunkKV, RowRole, join
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import compile_layer_plan

session = partial(reading, graphs)
PARTS = searching(["bees rain", "rain tea", "", "tea iron rain", "bees"], deps=(4,))
PREFIX = ("skeleton.documents=prefix",)


@pytest.fixture
def made(tiny: Make) -> Tiny:
    """What it writes hangs on what it has read: half of it changes on a blended cache."""
    return tiny("llama", context=2.0)


@pytest.mark.parametrize("share", ["outline", "prompt"])
@pytest.mark.parametrize("graph", BLENDED)
@pytest.mark.parametrize(
    "sets",
    [("blend.ratios=[1]",), ("blend.min_tokens=5000",), ("blend.plan=plain",)],
    ids=lambda sets: sets[0],
)
def test_nothing_reused_is_the_graph_without_the_block(
    sets: tuple[str, ...], graph: str, share: str, made: Tiny
) -> None:
    opened = session(made, graph, *sets, outline=PARTS, share=share)
    run, rounds = watched(opened)
    sets = ("scheduler.prefix_cache=false",)  # nothing stays of blended rows
    sets = (*sets, *(["skeleton.documents=branches"] if graph.startswith("bim") else []))
    twin = session(made, TWINS[graph], *sets, outline=PARTS, share=share)
    other = run_all(twin, asked())
    assert tokens_of(run) == tokens_of(other) and accepted_of(run) == accepted_of(other)
    assert not rounds.blends and not run.manager.blend.library.made_sizes


def text(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_what_all_branches_find_stands_in_the_prefix(layout: str, made: Tiny) -> None:
    sets = (f"layout.kind={layout}", "skeleton.search_top_k=8")
    parts = searching(["bees rain", "rain tea", "tea rain"])
    opened = session(made, "bim_blend_eagle", *sets, outline=parts)
    run, rounds = watched(opened, asked(1, documents=8))
    (request,), (blend,) = requests_of(run), rounds.blends
    ids = {d.title: book_of(made).document(d.title, d.text) for d in DOCUMENTS}
    assert text(request.context).count(text(ids["rain"])) == 1
    assert not any(text(ids["rain"]) in text(branch.prompt) for branch in request.branches)
    copies = 3 if layout == "batching" else 1
    sizes = [len(ids[word]) for word in ("bees", "tea", "tea", *["rain"] * copies)]
    assert sorted(cached for cached, _ in blend.parts) == sorted(sizes)


def test_the_drafter_reads_cached_features_of_rows_that_are_not_computed(made: Tiny) -> None:
    """With `reuse` no row of a chunk is computed: the drafter's rows pair its cached features."""
    opened = session(made, "blend_eagle", "blend.plan=reuse")
    run = start(opened, asked(1))
    drive(run, until=lambda run: run.state == "prefill")
    (request,) = requests_of(run)
    (branch,) = request.branches
    rows = {
        segment.position + i: segment.features[i]
        for segment in run.manager.drafter.inbox
        for i in range(len(segment.tokens))
        if segment.features is not None
    }
    assert len(branch.prompt.chunks) == 4
    for chunk in branch.prompt.chunks:
        kept = run.manager.blend.library.find(chunk)
        assert kept is not None and kept.features_RF is not None
        there = torch.stack([rows[chunk.at + i] for i in range(len(chunk.ids))])
        assert torch.equal(there, kept.features_RF)
    drive(run)
    assert sum(branch.accepted) > 0


@pytest.mark.parametrize("graph", BLENDED)
def test_a_second_run_finds_everything_and_says_the_same(graph: str, made: Tiny) -> None:
    store = ChunkStore(1 << 24)
    opened = session(made, graph, outline=PARTS, chunks=store)
    first, _ = watched(opened)
    before = {digest: _copies(store, digest) for digest in store._entries}
    second, _ = watched(opened)
    libraries = [run.manager.blend.library for run in (first, second)]
    assert libraries[0].made_sizes and not libraries[1].made_sizes and libraries[1].hits
    assert tokens_of(first) == tokens_of(second)
    after = {digest: _copies(store, digest) for digest in store._entries}
    assert before.keys() == after.keys()
    for digest, tensors in before.items():
        assert all(map(torch.equal, tensors, after[digest]))


def _copies(store: ChunkStore, digest: str) -> list[torch.Tensor]:
    chunk = store._entries[digest].chunk
    return [t.clone() for t in (chunk.keys_LRgd, chunk.values_LRgd, chunk.features_RF)]


def test_what_is_not_cached_is_computed_where_it_stands(made: Tiny) -> None:
    """Without `collect`: an empty store reuses nothing, a half-filled one reuses that half."""
    store = ChunkStore(1 << 24)
    none, rounds = watched(
        session(made, "blend_eagle", "blend.collect=false", chunks=store), asked(1)
    )
    assert not rounds.blends and none.manager.blend.library.missed == 4
    twin = run_all(session(made, "eagle"), asked(1))
    assert tokens_of(none) == tokens_of(twin)
    watched(session(made, "blend_eagle", chunks=store), asked(1, documents=2))
    sets = ("blend.collect=false",)
    run, rounds = watched(session(made, "blend_eagle", *sets, chunks=store), asked(1))
    library = run.manager.blend.library
    assert (library.hits, library.missed) == (2, 2)
    sizes = [len(chunk.ids) for chunk in requests_of(run)[0].tail.chunks]
    (blend,) = rounds.blends
    assert blend.reused == sum(sizes[:2]) and blend.parts == ((blend.reused, blend.suffix),)


@pytest.mark.parametrize("budget", ["per_branch", "per_chunk"])
@pytest.mark.parametrize("graph", BLENDED)
def test_the_pool_holds_what_one_blended_forward_writes(
    graph: str, budget: str, made: Tiny
) -> None:
    sets = (f"blend.budget={budget}", "blend.ratios=[0.5]", *(PREFIX if "bim" in graph else ()))
    run = start(session(made, graph, *sets, outline=PARTS), asked(1))
    drive(run, check=False, until=lambda run: run.state == "prefill" or run.state == "skeleton")
    (request,) = requests_of(run)
    branch = request.root or request.branches[0]
    ids = [*request.prefix, *branch.prompt]
    chunks = request.prefix.chunks or request.tail.chunks
    role_1Q, chunk_1Q = np.full((1, len(ids)), RowRole.SUFFIX, np.int32), np.full((1, len(ids)), -1)
    for number, chunk in enumerate(chunks):
        role_1Q[0, chunk.at : chunk.at + len(chunk.ids)] = RowRole.REUSED
        chunk_1Q[0, chunk.at : chunk.at + len(chunk.ids)] = number
    none_1Q = np.zeros((1, len(ids)), np.int32)
    rows = BlendRows(role_1Q, none_1Q, none_1Q, chunk_1Q.astype(np.int32))
    target, taps = made.models.target, run.board["taps"]
    blending = run.manager.blend
    with torch.no_grad():
        kept = [target.collect(chunk.ids, None, taps) for chunk in chunks]
        blend = Blend.of(rows, join(kept), blending.settings)
        kv = KVCache(target.num_layers, target.kv_heads, target.head_dim, len(ids) + 1)
        place_1Q = torch.arange(len(ids))[None]
        visible = AttentionPlan.dense(place_1Q[:, :, None] >= place_1Q[:, None], place_1Q)
        plan = compile_layer_plan(blending.settings, target.num_layers)
        last = torch.tensor([len(ids) - 1])
        target.forward(
            torch.tensor([ids]), place_1Q, place_1Q, visible, kv, plan, last, taps, blend
        )
    pool = run.manager.kv
    slots = np.argsort(np.where(pool.committed, pool.position, 1 << 30))[: len(ids)]
    there = pool.data[:, :, :, torch.tensor(slots)]
    assert torch.allclose(there, kv.data[:, :, :, : len(ids)], atol=1e-5)


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("graph", BLENDED)
def test_the_book_knows_which_rows_were_recomputed(graph: str, layout: str, made: Tiny) -> None:
    sets = (f"layout.kind={layout}", "blend.ratios=[0.4]")
    run = start(session(made, graph, *sets, outline=PARTS), asked(2))
    book, most = run.manager, 0
    while not run.finished:
        run.advance()
        for branch in book.active:
            wanted = {
                branch.start + chunk.at + i
                for chunk in branch.prompt.chunks
                for i in range(len(chunk.ids))
            }
            mark = book.reused.get(branch.owner)
            assert (mark.cached if mark is not None else set()) == wanted
            if mark is not None:
                assert mark.picked < wanted and len(mark.picked) == int(0.4 * len(wanted))
        most = max(most, len(book.reused))
    assert most > 1 and not book.reused


def test_long_documents_are_several_chunks(made: Tiny) -> None:
    whole = run_all(session(made, "blend_eagle"), asked(1))
    cut = run_all(session(made, "blend_eagle", "blend.chunk_tokens=16"), asked(1))
    chunks = [requests_of(run)[0].tail.chunks for run in (whole, cut)]
    assert [i for c in chunks[0] for i in c.ids] == [i for c in chunks[1] for i in c.ids]
    assert len(chunks[1]) > 8 and max(len(c.ids) for c in chunks[1]) <= 16
    prompts = [requests_of(run)[0].branches[0].prompt for run in (whole, cut)]
    assert prompts[0].ids == prompts[1].ids
    for chunk in chunks[1]:
        assert tuple(prompts[1][chunk.at : chunk.at + len(chunk.ids)]) == chunk.ids


def test_the_trace_and_the_figures_tell_what_was_reused(made: Tiny) -> None:
    sets = ("blend.check_layers=[1, 3]", "blend.ratios=[0.5, 0.25]")
    run, rounds = watched(session(made, "blend_eagle", *sets), asked(1))
    blend, summary = rounds.blends[0], rounds.found[0]
    sizes = [len(chunk.ids) for chunk in requests_of(run)[0].tail.chunks]
    context, everything = sum(sizes), len(requests_of(run)[0].branches[0].prompt)
    picked = (int(0.5 * context), int(0.25 * context))
    suffix = everything - context
    assert blend.plan == (0, 1, 2, 1, 2, 2, 2, 2)
    assert blend.picked == picked
    assert blend.reused + blend.suffix == summary.rows - summary.padding
    first, second = suffix + picked[0], suffix + picked[1]
    assert blend.live == (everything, everything, first, first, *[second] * 4)
    record = trace_record(1, summary, 1)["blend"]
    assert record["plan"] == blend.plan and record["live"] == blend.live
    assert trace_record(1, rounds.found[1], 2)["blend"] is None
    meter = Meter()
    for one in rounds.found:
        meter.forward_done(one, 1)
    told = held_figures(meter, run.board)["blend"]
    assert told["reused_rows"] == context and told["picked_rows"] == picked[0]
    assert told["chunks"]["collected_rows"] == context and told["chunks"]["collected"] == 4
    assert 0.2 < told["saved_share"] < 0.8
    twin = run_all(session(made, "eagle"), asked(1))
    assert held_figures(Meter(), twin.board)["blend"] is None


def test_chunks_of_another_drafter_are_other_chunks(made: Tiny) -> None:
    store = ChunkStore(1 << 24)
    for sets in ((), ("drafter.kind=none",), ()):
        run_all(session(made, "blend_eagle", *sets, chunks=store), asked(1))
    assert len(store._entries) == 8
    chunk: ChunkKV = next(iter(store._entries.values())).chunk
    assert chunk.rows > 0

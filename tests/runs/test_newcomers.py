"""Branches that start late, or behind shared rows, are drafted for as well as any other."""

import pytest
import torch
from helpers import support
from helpers.support import FIXED, Tiny

from specsot.engine.run.core import EngineCore
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import decode_plan
from specsot.states.request import Branch

DRAFTED = ("bim_eagle", "batching_eagle")


@pytest.mark.parametrize("graph", DRAFTED)
@pytest.mark.parametrize("most", [8, 2, 1])
@pytest.mark.parametrize(
    ("family", "share"), support.taking_turns(("llama", "qwen2", "qwen3"), ("outline", "prompt"))
)
def test_a_branch_drafts_as_well_as_one_sequence_with_the_same_ids(
    family: str, share: str, most: int, graph: str, tiny: support.Make
) -> None:
    """The fork leaves the drafter nothing to guess, and neither does a late start: prefix rows are
    shared, and each branch owns the row that pairs the last shared feature with its first token."""
    made = tiny(family)
    book = made.book(share, stop_ids=())
    outline, sets = (support.outline_of(4, {3: (1,)}), (*FIXED, f"layout.max_num_branches={most}"))
    full = support.graphs.session(graph, made.models, book, outline=outline, budget=24, sets=sets)
    request = support.requests_of(support.run_all(full, ["hello"]))[0]
    alone = support.FixedBook({b.name: ids for b, ids in support.contexts(request, book, False)})
    plain = support.graphs.session("eagle", made.models, alone, budget=24, sets=FIXED)
    for branch in request.branches:
        twin = support.requests_of(support.run_all(plain, [branch.name]))[0].branches[0]
        assert branch.tokens == twin.tokens
        assert branch.accepted == twin.accepted
    assert sum(sum(branch.accepted) for branch in request.branches) > 14, "drafts were accepted"


@pytest.mark.parametrize("graph", DRAFTED)
@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_the_drafters_rows_are_those_of_one_sequence(share: str, graph: str, made: Tiny) -> None:
    compared = 0
    book = support.PlanBook(130, share, ())
    book.text = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\n3|50|-|-|Three\nEND"
    for budget in (16, 17, 18):
        sets = (f"skeleton.max_tokens={budget}", "layout.max_num_branches=2")
        session = support.graphs.session(graph, made.models, book, sets=sets)
        run = support.start(session, ["hello", "again"])
        while not run.finished:
            support.drive(run, until=lambda run: run.state == "expand_root")
            for branch in run.branches:
                _compare_drafter_rows(run, branch, _context(branch, book))
                compared += 1
            if not run.finished:
                run.advance()
    assert compared > 60


def _context(branch: Branch, book: support.TokenBook) -> list[int]:
    request = branch.request
    if branch.is_root:
        return [*request.prefix, *request.tail]
    return dict(support.contexts(request, book, False))[branch]


def _compare_drafter_rows(run: EngineCore, branch: Branch, context: list[int]) -> None:
    target = run.board["target"]
    drafter = run.board["drafter"].model
    pool = run.manager.kv_draft
    ids = torch.tensor([[*context, *branch.tokens]])
    count = ids.shape[1] - 1
    assert count == branch.length
    visible = AttentionPlan.dense(
        torch.ones(1, count, count).tril().bool(), torch.arange(count)[None]
    )
    slots = torch.arange(count)[None]
    fresh = KVCache(target.num_layers, target.kv_heads, target.head_dim, count)
    taps = target.forward(
        ids[:, :-1],
        slots,
        slots,
        visible,
        fresh,
        decode_plan(target.num_layers),
        slots[0],
        run.board["taps"],
    ).taps_QF
    alone = KVCache(drafter.num_layers, drafter.kv_heads, drafter.head_dim, count)
    drafter.forward(ids[:, 1:], drafter.fuse(taps)[None], slots, slots, visible, alone)
    (row,) = run.manager.layout.rows_of(branch.owner)
    path = reversed(run.manager.table.segments.path(branch.owner))
    held = pool.data[:, :, :, [slot for one in path for slot in pool.slots_of(one, row).tolist()]]
    torch.testing.assert_close(held, alone.data[:, :, :, :count], atol=1e-4, rtol=1e-4)

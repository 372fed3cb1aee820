"""Five branches after one committed token each, as seed 000 section 4.2 draws them.

expand_root is one drafter forward of [1, 5]; each level of grow_tree one of [1, 50]; its rows are
thrown away, those of expand_root stay."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.support import Graphs, Make, drive, outline_of, start
from torch import Tensor

from specsot.engine.models import Models
from specsot.engine.run.core import EngineCore
from specsot.models.drafters.eagle import Eagle3
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.draft.eagle import Frontier
from specsot.ops.kv.pool import KVCache

TOP_K, LEVELS, BRANCHES = 10, 4, 5


@dataclass
class Call:
    """One forward of the drafter, with the slot table as it was."""

    tokens: Tensor
    positions: Tensor
    slots: list[int]
    mask_QK: np.ndarray
    owner: np.ndarray
    position: np.ndarray
    committed: np.ndarray
    length: int
    out: Tensor | None = None


class Spy:
    """A drafter that notes what its forwards were given."""

    def __init__(self, inner: Eagle3) -> None:
        self.inner, self.calls = inner, list[Call]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionPlan,
        kv: KVCache,
    ) -> Tensor:
        table = kv.owner.copy(), kv.position.copy(), kv.committed.copy()
        mask = attention.groups[0].mask_GqK[0].numpy()
        assert hidden.shape[:2] == tokens.shape == positions.shape == slots.shape
        call = Call(tokens, positions, slots[0].tolist(), mask, *table, kv.current_length)
        self.calls.append(call)
        call.out = self.inner.forward(tokens, hidden, positions, slots, attention=attention, kv=kv)
        return call.out


@dataclass
class Drawn:
    """The round that is looked at: the run before verify, and the drafter's forwards in it."""

    run: EngineCore
    root: Call
    levels: list[Call]
    after_root: int
    frontier: Frontier

    @property
    def active(self) -> list[Any]:
        return list(self.run.branches)


@pytest.fixture(scope="module", params=["outline", "prompt"])
def drawn(request: pytest.FixtureRequest, tiny: Make, graphs: Graphs) -> Iterator[Drawn]:
    made = tiny("llama")
    drafter, known = made.models.drafter, made.models.drafter.d2t.clone()
    # A drafter that only ever proposes unlikely tokens: each round commits exactly one.
    likely = set(torch.nonzero(made.models.target.lm_head.weight[:, 0] == 0).flatten().tolist())
    unlikely = torch.tensor([t for t in range(130) if t not in likely])[: len(known)]
    drafter.d2t.copy_(unlikely - torch.arange(len(known)))
    spy = Spy(drafter)
    models = Models(made.models.target, spy, None, (), made.models.device, made.models.dtype)
    sets = (
        "drafter.num_draft_tokens=20",
        f"drafter.draft_depth={LEVELS}",
        f"drafter.top_k={TOP_K}",
    )
    session = graphs.session(
        "bim_eagle",
        models,
        made.book(request.param, ()),
        outline=outline_of(BRANCHES),
        sets=(*sets, "layout.max_num_branches=8"),
    )
    run = start(session, ["hello"])
    drive(run, until=lambda run: run.state == "verify")
    assert all(b.accepted == [0] for b in run.branches), "one token each"
    spy.calls.clear()
    drive(run, until=lambda run: run.state == "expand_root")
    after_root, frontier = run.manager.kv_draft.current_length, run.board["frontier"]
    (root,) = spy.calls
    drive(run, until=lambda run: run.state == "grow_tree")
    yield Drawn(run, root, spy.calls[1:], after_root, frontier)
    drafter.d2t.copy_(known)


def bim(run: EngineCore, owners: Any) -> list[int]:
    return [run.manager.table.bim(int(owner)) for owner in owners]


def history(call: Call, owners: set[int], up_to: int) -> set[int]:
    fits = np.isin(call.owner, list(owners)) & call.committed & (call.position <= up_to)
    return {int(s) for s in np.flatnonzero(fits)}


def seen(call: Call, row: int) -> set[int]:
    return {int(s) for s in np.flatnonzero(call.mask_QK[row])}


def test_expand_root_is_one_forward_of_one_row_per_branch(drawn: Drawn) -> None:
    call, branches = drawn.root, drawn.active
    assert call.tokens.shape == (1, BRANCHES)
    assert bim(drawn.run, call.owner[call.slots]) == [0, 1, 2, 3, 4]
    tips = [b.length - 1 for b in branches]  # row j is for token j + 1, the root token
    assert call.positions[0].tolist() == tips
    assert call.tokens[0].tolist() == [b.tokens[-1] for b in branches]
    assert len(set(tips)) > 1, "the branches' own positions differ"


def test_expand_root_sees_its_own_branch_and_the_prefix_alone(drawn: Drawn) -> None:
    call = drawn.root
    for row, branch in enumerate(drawn.active):
        own = history(call, {branch.owner, branch.request.prefix_owner}, branch.length - 1)
        assert call.slots[row] in own, "its own new row included"
        assert seen(call, row) == own
        assert len(own) == branch.length


def test_each_branchs_first_level_is_the_top_k_of_its_own_row(drawn: Drawn) -> None:
    drafter, out_SH = drawn.run.board["drafter"].model, drawn.root.out[0]
    best = drafter.logits(out_SH).topk(TOP_K).indices
    assert drawn.frontier.tokens_SK.tolist() == drafter.to_target(best).tolist()
    assert torch.equal(drawn.frontier.hidden_SKH[:, 0], out_SH)
    first = drawn.levels[0].tokens.view(BRANCHES, TOP_K)
    assert first.tolist() == drawn.frontier.tokens_SK.tolist(), "they are the first grown level"


def test_every_level_is_one_forward_of_all_branches(drawn: Drawn) -> None:
    assert len(drawn.levels) == LEVELS - 1
    for level, call in enumerate(drawn.levels):
        assert call.tokens.shape == (1, BRANCHES * TOP_K)
        expected = [b.length + level for b in drawn.active for _ in range(TOP_K)]
        assert call.positions[0].tolist() == expected, "one position per branch and level"


def test_every_level_carries_the_branches_one_after_another(drawn: Drawn) -> None:
    for call in drawn.levels:
        found = []
        for row in range(BRANCHES * TOP_K):
            committed = [s for s in seen(call, row) if call.committed[s]]
            owners = set(call.owner[committed].tolist())
            found.append({i for i in bim(drawn.run, owners) if i >= 0})
        assert found == [{branch} for branch in range(BRANCHES) for _ in range(TOP_K)]


def test_a_drafted_row_sees_its_history_and_its_own_ancestors(drawn: Drawn) -> None:
    placed: dict[int, tuple[int, int]] = {}  # slot -> (row, level)
    for level, call in enumerate(drawn.levels):
        placed |= {slot: (row, level) for row, slot in enumerate(call.slots)}
        for row in range(BRANCHES * TOP_K):
            branch = drawn.active[row // TOP_K]
            own = history(call, {branch.owner, branch.request.prefix_owner}, branch.length - 1)
            fresh = seen(call, row) - own
            assert own <= seen(call, row) and len(own) == branch.length
            above = sorted((placed[slot] for slot in fresh), key=lambda at: at[1])
            assert [at[1] for at in above] == list(range(level + 1)), "one ancestor per level"
            assert above[-1] == (row, level), "the row itself"
            assert {at[0] // TOP_K for at in above} == {row // TOP_K}, "of its own tree"
            if level:
                parent, before = above[-2][0], drawn.levels[level - 1]
                older = {placed[s] for s in seen(before, parent) if s in placed}
                assert set(above[:-1]) == older & set(above), "its parent's ancestors are its own"


def test_the_drafters_length_afterwards_is_that_after_expand_root(drawn: Drawn) -> None:
    pool = drawn.run.manager.kv_draft
    lengths = [call.length for call in drawn.levels]
    assert max(lengths) == drawn.after_root + BRANCHES * TOP_K * (LEVELS - 1)
    assert pool.current_length == drawn.after_root == drawn.root.length
    assert pool.committed[pool.owner >= 0].all(), "no drafted row is left"


def test_each_tree_is_offered_to_its_own_branch(drawn: Drawn) -> None:
    proposal = drawn.run.board["proposal"]
    assert proposal.tokens_SN.shape == (BRANCHES, 20)
    drawn.run.advance()
    assert drawn.run.state == "verify"
    assert all(b.accepted == [0, 0] for b in drawn.active)

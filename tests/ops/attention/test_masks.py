"""Who sees whom: golden BIM masks, and the rules behind them against a naive reading."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specsot.ops.attention.backends import window_mask
from specsot.ops.attention.masks import build, chain_visible, committed_visible
from specsot.ops.kv.pool import KVCache
from specsot.ops.kv.slots import NOBODY
from specsot.ops.types import Rows, no_trees

GOLDEN = Path(__file__).parents[2] / "golden" / "specsot"
PREFIX = 0  # owner of the shared rows; branch i is owner i + 1


def drawn(mask_QK: Any) -> str:
    """A mask as a picture: one line per query row, `#` where it sees the slot."""
    return "\n".join("".join("#" if cell else "." for cell in row) for row in mask_QK)


def pool(capacity: int = 64) -> KVCache:
    return KVCache(1, 1, 2, capacity)


def history(kv: KVCache, owners: list[int], positions: list[int]) -> np.ndarray:
    """Committed rows in this order; their slots."""
    slots = kv.append_(owners, positions)
    kv.commit_(slots, positions)
    return slots


def rows_of(
    slots: Any, owners: list[int], positions: list[int], ancestors_STT: Tensor | None = None
) -> Rows:
    """Rows of one forward; every branch has the prefix PREFIX, the prefix itself has none."""
    prefixes = [NOBODY if owner == PREFIX else PREFIX for owner in owners]
    return Rows(
        torch.zeros(1, len(owners), dtype=torch.int64),
        torch.tensor([positions]),
        torch.tensor(np.asarray(slots, np.int64))[None],
        torch.tensor([owners], dtype=torch.int32),
        torch.tensor([prefixes], dtype=torch.int32),
        *trees_of(ancestors_STT),
        torch.tensor([], dtype=torch.int64),
    )


def trees_of(ancestors_STT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Nodes and ancestors of trees that are the first rows of a forward."""
    if ancestors_STT is None:
        return no_trees(torch.device("cpu"))
    trees, nodes, _ = ancestors_STT.shape
    return torch.arange(trees * nodes).view(trees, nodes), ancestors_STT


def owners_of(bim: list[int]) -> list[int]:
    return [PREFIX if index < 0 else index + 1 for index in bim]


def positions_in(bim: list[int], prefix: int) -> list[int]:
    """Positions of rows that are listed in reading order: the prefix first, branches behind it."""
    seen: dict[int, int] = {}
    found = []
    for index in bim:
        found.append(seen.get(index, 0) + (0 if index < 0 else prefix))
        seen[index] = seen.get(index, 0) + 1
    return found


PREFILLS = json.loads((GOLDEN / "bim_prefill_masks.json").read_text())


@pytest.mark.parametrize("case", PREFILLS, ids=lambda c: f"{c['prefix_len']}+{c['branch_lens']}")
def test_prompts_behind_a_shared_prefix_see_what_the_golden_masks_say(case: Any) -> None:
    kv, prefix = pool(), case["prefix_len"]
    owners = owners_of(case["bim"])
    history(kv, owners[:prefix], list(range(prefix)))
    slots = kv.append_(owners[prefix:], case["position_ids"])
    visible = build(rows_of(slots, owners[prefix:], case["position_ids"]), kv)
    assert drawn(visible.mask_BQK[0]) == drawn(case["visible"])


@pytest.mark.parametrize("case", PREFILLS, ids=lambda c: f"{c['prefix_len']}+{c['branch_lens']}")
def test_a_prefix_in_the_same_forward_is_seen_as_one_that_was_there_before(case: Any) -> None:
    """Text common to all branch prompts is hoisted into the prefix and prefilled with them."""
    kv, prefix = pool(), case["prefix_len"]
    owners, positions = owners_of(case["bim"]), [*range(prefix), *case["position_ids"]]
    visible = build(rows_of(kv.append_(owners, positions), owners, positions), kv)
    causal = [[int(k <= q) for k in range(len(owners))] for q in range(prefix)]
    assert drawn(visible.mask_BQK[0]) == drawn(causal + case["visible"])


@pytest.mark.parametrize("case", PREFILLS, ids=lambda c: f"{c['prefix_len']}+{c['branch_lens']}")
def test_the_order_of_slots_does_not_matter(case: Any) -> None:
    kv, prefix = pool(), case["prefix_len"]
    owners, positions = owners_of(case["bim"]), [*range(prefix), *case["position_ids"]]
    order = np.random.default_rng(prefix).permutation(len(owners))  # row r goes to slot order[r]
    back = np.argsort(order)
    kv.append_([owners[r] for r in back], [positions[r] for r in back])
    kv.commit_(order[:prefix], positions[:prefix])
    visible = build(rows_of(order[prefix:], owners[prefix:], case["position_ids"]), kv)
    assert drawn(visible.mask_BQK[0][:, order]) == drawn(case["visible"])


CONTINUOUS = json.loads((GOLDEN / "continuous_mask.json").read_text())


@pytest.mark.parametrize("case", CONTINUOUS)
def test_trees_and_newcomers_in_one_forward_see_what_the_golden_mask_says(case: Any) -> None:
    kv, past = pool(), case["history_bim"]
    prefix, nodes, old = past.count(-1), case["num_nodes"], case["num_old"]
    history(kv, owners_of(past), positions_in(past, prefix))
    tree_TT = torch.tensor(case["tree_mask"], dtype=torch.bool)
    owners = owners_of(case["input_bim"])
    depths = (tree_TT.sum(1) - 1).tolist()
    positions = [prefix + past.count(b) + d for b in range(old) for d in depths]
    positions += [prefix + i for length in case["new_prompt_lens"] for i in range(length)]
    slots = kv.append_(owners, [0] * (old * nodes) + positions[old * nodes :])
    visible = build(rows_of(slots, owners, positions, tree_TT.repeat(old, 1, 1)), kv)
    assert drawn(visible.mask_BQK[0]) == drawn(case["visible"])


def test_fresh_rows_count_with_their_true_positions_and_the_table_stays_as_it_was() -> None:
    """A tree's positions are known on the device only; a sliding window must see them."""
    kv = pool()
    history(kv, [PREFIX] * 3, [0, 1, 2])
    chain_STT = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    slots = kv.append_([1] * 3, [0] * 3)
    visible = build(rows_of(slots, [1] * 3, [3, 4, 5], chain_STT), kv)
    assert visible.positions_BK.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert kv.position[slots].tolist() == [0, 0, 0]
    near = window_mask(visible.mask_BQK, torch.tensor([[3, 4, 5]]), visible.positions_BK, 3)
    assert drawn(near[0]) == ".###..\n..###.\n...###"


def test_a_window_counts_positions_and_not_slots() -> None:
    """In BIM, branches lie one after another, but their positions start again."""
    kv = pool()
    history(kv, [PREFIX, PREFIX, 1, 1, 2, 2], [0, 1, 2, 3, 2, 3])
    visible = build(rows_of(kv.append_([1, 2], [4, 4]), [1, 2], [4, 4]), kv)
    near = window_mask(visible.mask_BQK, torch.tensor([[4, 4]]), visible.positions_BK, 3)
    assert drawn(near[0]) == "..##..#.\n....##.#"


def test_stale_fresh_rows_of_the_same_owner_stay_hidden() -> None:
    """Rows that were never committed (other levels, an unfinished round) belong to nobody."""
    kv = pool()
    history(kv, [PREFIX, 1], [0, 1])
    kv.append_([1, PREFIX], [0, 0])
    visible = build(rows_of(kv.append_([1], [2]), [1], [2]), kv)
    assert drawn(visible.mask_BQK[0]) == "##..#"


def test_a_row_without_prefix_does_not_see_free_slots_or_others_without_prefix() -> None:
    """NOBODY and FREE are no owners: what they mark is seen by no row."""
    kv = pool()
    history(kv, [3, 4], [0, 0])
    kv.release_([0])
    slots = kv.append_([5, 6], [0, 0])
    visible = build(rows_of(slots, [5, 6], [0, 0]), kv)
    picture = drawn(visible.mask_BQK[0][:, slots.tolist()])
    assert picture == "#.\n.#"
    assert not visible.mask_BQK[0, :, 1].any()


ROW = st.tuples(st.integers(0, 4), st.sampled_from([NOBODY, 0, 1]), st.integers(0, 6))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=8), st.lists(st.tuples(ROW, st.booleans()), max_size=12))
def test_history_and_chain_rule_are_the_naive_ones(
    queries: list[tuple[int, int, int]], slots: list[tuple[tuple[int, int, int], bool]]
) -> None:
    kv = pool()
    for slot, ((owner, _, position), committed) in enumerate(slots):
        kv.owner[slot], kv.position[slot], kv.committed[slot] = owner, position, committed
    rows_BQ = [torch.tensor([column]) for column in zip(*queries, strict=True)]
    seen = committed_visible(*rows_BQ, kv.table(len(slots)))[0]
    naive = [[c and o in (q[0], q[1]) and p <= q[2] for (o, _, p), c in slots] for q in queries]
    assert drawn(seen) == drawn(naive)
    chain = chain_visible(*rows_BQ)[0]
    naive = [[k[0] in (q[0], q[1]) and k[2] <= q[2] for k in queries] for q in queries]
    assert drawn(chain) == drawn(naive)

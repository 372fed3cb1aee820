"""Who sees whom: golden BIM masks, and the rules behind them against a naive reading."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.attention import Forward, drawn, pool, sight

from specsot.ops.attention.backends import window_mask
from specsot.ops.forward import plan_attention
from specsot.ops.kv.pool import FREE, NO_SEGMENT

GOLDEN = Path(__file__).parents[2] / "golden" / "specsot"
PREFIX = 0  # segment of the shared rows; branch i is segment i + 1
BACKENDS = ("dense", "grouped", "cascade")
BEHIND_PREFIX = {PREFIX: NO_SEGMENT} | dict.fromkeys(range(1, 9), PREFIX)

pytestmark = pytest.mark.parametrize("attention", BACKENDS)


def picture(forward: Forward, attention: str) -> str:
    told = plan_attention(forward.rows(), forward.kv, attention=attention)
    seen, _ = sight(told, forward.kv, len(forward.owners))
    assert not seen[:, forward.kv.owner == FREE].any()
    return drawn(seen[:, : forward.kv.extents()[0]])


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


def prompts(forward: Forward, owners: list[int], positions: list[int], slots: Any = None) -> None:
    for at, (owner, position) in enumerate(zip(owners, positions, strict=True)):
        forward.add_prompt(owner, [position], [] if slots is None else [int(slots[at])])


PREFILLS = json.loads((GOLDEN / "bim_prefill_masks.json").read_text())


@pytest.mark.parametrize("way", ["behind", "together", "shuffled"])
@pytest.mark.parametrize("case", PREFILLS, ids=lambda c: f"{c['prefix_len']}+{c['branch_lens']}")
def test_prompts_after_a_shared_prefix_see_what_the_golden_masks_say(
    case: Any, way: str, attention: str
) -> None:
    """The prefix is history, in the same forward, or in slots of any order."""
    forward, prefix = Forward(pool(), BEHIND_PREFIX), case["prefix_len"]
    owners, positions = owners_of(case["bim"]), [*range(prefix), *case["position_ids"]]
    order = np.arange(len(owners))  # row r goes to slot order[r]
    visible = case["visible"]
    if way == "together":
        prompts(forward, owners, positions)
        visible = [[int(k <= q) for k in range(len(owners))] for q in range(prefix)] + visible
    elif way == "behind":
        forward.history(owners[:prefix], positions[:prefix])
        prompts(forward, owners[prefix:], case["position_ids"])
    else:
        order = np.random.default_rng(prefix).permutation(len(owners))
        back = np.argsort(order)
        kv = forward.kv
        kv.append_([owners[r] for r in back], [positions[r] for r in back], home=PREFIX)
        kv.commit_(order[:prefix], positions[:prefix])
        prompts(forward, owners[prefix:], case["position_ids"], order[prefix:])
    lines = picture(forward, attention).splitlines()
    assert "\n".join("".join(line[s] for s in order) for line in lines) == drawn(visible)


CONTINUOUS = json.loads((GOLDEN / "continuous_mask.json").read_text())


@pytest.mark.parametrize("case", CONTINUOUS)
def test_trees_and_newcomers_in_one_forward_see_what_the_golden_mask_says(
    case: Any, attention: str
) -> None:
    forward, past = Forward(pool(), BEHIND_PREFIX), case["history_bim"]
    prefix, old = past.count(-1), case["num_old"]
    forward.history(owners_of(past), positions_in(past, prefix))
    above_TT = torch.tensor(case["tree_mask"], dtype=torch.bool)
    for branch in range(old):
        forward.add_tree(branch + 1, prefix + past.count(branch), above_TT)
    for branch, length in enumerate(case["new_prompt_lens"], old):
        forward.add_prompt(branch + 1, [prefix + i for i in range(length)])
    assert forward.owners == owners_of(case["input_bim"])
    assert picture(forward, attention) == drawn(case["visible"])


def test_fresh_rows_count_with_their_true_positions_and_the_table_stays_as_it_was(
    attention: str,
) -> None:
    """A tree's positions are known on the device only; a sliding window must see them."""
    forward = Forward(pool(), BEHIND_PREFIX)
    kv = forward.kv
    forward.history([PREFIX] * 3, [0, 1, 2])
    forward.add_tree(1, 3, torch.ones(3, 3, dtype=torch.bool).tril())
    told = plan_attention(forward.rows(), kv, attention=attention)
    (group,) = told.groups
    assert group.positions_GK.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert kv.position[3:6].tolist() == [0, 0, 0]
    near = window_mask(told.groups[0].mask_GqK, torch.tensor([[3, 4, 5]]), group.positions_GK, 3)
    assert drawn(near[0]) == ".###..\n..###.\n...###"


def test_what_attention_is_told_is_a_copy(attention: str) -> None:
    forward = Forward(pool(), BEHIND_PREFIX)
    kv = forward.kv
    forward.history([PREFIX, 1], [0, 1])
    forward.add_prompt(1, [2])
    for group in plan_attention(forward.rows(), kv, attention=attention).groups:
        group.positions_GK.zero_()
        group.mask_GqK.zero_()
    assert kv.owner[:3].tolist() == [PREFIX, 1, 1]
    assert kv.position[:3].tolist() == [0, 1, 2]
    assert kv.committed[:3].tolist() == [True, True, False]


def test_a_window_counts_positions_and_not_slots(attention: str) -> None:
    """In BIM, branches lie one after another, but their positions start again."""
    forward = Forward(pool(), BEHIND_PREFIX)
    forward.history([PREFIX, PREFIX, 1, 1, 2, 2], [0, 1, 2, 3, 2, 3])
    prompts(forward, [1, 2], [4, 4])
    told = plan_attention(forward.rows(), forward.kv, attention=attention)
    seen = np.zeros((2, 8), bool)
    for group in told.groups:
        shape = group.mask_GqK.shape
        near = window_mask(group.mask_GqK, torch.full(shape[:2], 4), group.positions_GK, 3)
        slots_GK = (
            group.keys.numpy() if isinstance(group.keys, torch.Tensor) else group.keys.slots_GK
        )
        for g, q, k in np.argwhere(near.numpy()):
            seen[group.host_rows_Gq[g, q], slots_GK[g, k]] = True
    assert drawn(seen) == "..##..#.\n....##.#"

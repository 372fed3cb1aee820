"""Several texts in one training sequence, sharing their beginnings: the same as apart."""

import pytest
import torch
from helpers.blocks import golden_pair
from torch import Tensor

from specsot.engine.train.data import Tokens, TrainingBatch, pack
from specsot.engine.train.dflash import Blocks, OnlineDFlashModel, sample_anchors
from specsot.models.drafters.config import Reach

from .test_dflash_loss import plain, varied

TRUNK, FIRST, SECOND, OTHER = 6, 5, 9, 7
TREE = TRUNK + FIRST + SECOND
TEXTS = (
    [*range(TRUNK + FIRST)],
    [*range(TRUNK), *range(TRUNK + FIRST, TREE)],
    [*range(TREE, TREE + OTHER)],
)
REACHES = [(Reach(), Reach()), (Reach(9, causal=True), Reach(9))]


def batch() -> TrainingBatch:
    """One row: a trunk with two branches, another text, two rows of padding."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 100, (TREE + OTHER,), generator=draw).tolist()
    segments = [0] * TRUNK + [1] * FIRST + [2] * SECOND
    positions = [*range(TRUNK + FIRST), *range(TRUNK, TRUNK + SECOND)]
    written = [float(i % 5 > 0) for i in range(TREE + OTHER)]
    tree = Tokens(ids[:TREE], written[:TREE], segments, positions)
    other = Tokens(ids[TREE:], written[TREE:], [0] * OTHER, list(range(OTHER)))
    return pack([[tree, other]], TREE + OTHER + 2)


def packed(found: TrainingBatch, anchors: Tensor, valid: Tensor) -> Blocks:
    visible = found.mask[:, 0]
    return Blocks(anchors, valid, size=8, positions_BS=found.positions, visible_BSS=visible)


def features(found: TrainingBatch) -> Tensor:
    return torch.randn(1, found.ids.shape[1], 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("reaches", REACHES)
def test_every_block_is_the_one_of_its_text_alone(reaches: tuple[Reach, ...]) -> None:
    online = OnlineDFlashModel(varied(golden_pair()[1], reaches))
    found, taps = batch(), features(batch())
    every = torch.arange(TREE + OTHER)[None]
    blocks = packed(found, every, every >= 0)
    with torch.no_grad():
        together = online.hidden(found.ids, taps, blocks).unflatten(1, (-1, 8))[0]
    counted = blocks.counted(found.written())[0]
    seen = set()
    for rows in TEXTS:
        anchors = torch.arange(len(rows))[None]
        alone = plain(anchors, anchors >= 0, 8, len(rows))
        with torch.no_grad():
            apart = online.hidden(found.ids[:, rows], taps[:, rows], alone).unflatten(1, (-1, 8))[0]
        torch.testing.assert_close(together[rows], apart, atol=1e-5, rtol=1e-5)
        own = [i for i, row in enumerate(rows) if row >= TRUNK or rows is TEXTS[0]]
        expected = alone.counted(found.written()[:, rows])[0]
        assert torch.equal(counted[[rows[i] for i in own]], expected[own])
        seen |= {rows[i] for i in own}
    assert seen == set(range(TREE + OTHER)) and counted.any()


def test_a_step_on_a_packed_row_is_the_mean_over_its_texts() -> None:
    """Blocks of the branches and of the other text; each text alone, weighted by what counts."""
    online = OnlineDFlashModel(golden_pair()[1])
    found, taps = batch(), features(batch())
    inner = list(range(TRUNK, TREE + OTHER))
    anchors = torch.tensor([inner])
    blocks = packed(found, anchors, anchors >= 0)
    whole = online(found.ids, taps, found.written(), blocks)
    total = weight = torch.zeros(())
    for rows in TEXTS:
        own = torch.tensor([[i for i, row in enumerate(rows) if row >= TRUNK]])
        alone = plain(own, own >= 0, 8, len(rows))
        step = online(found.ids[:, rows], taps[:, rows], found.written()[:, rows], alone)
        total, weight = total + step.loss_sum, weight + step.weight
    torch.testing.assert_close(whole.loss, total / weight, atol=1e-5, rtol=1e-5)


def test_sampled_blocks_are_those_of_the_packed_texts() -> None:
    """With the mask of one text a block of the second branch would see the first one."""
    online = OnlineDFlashModel(golden_pair()[1], num_anchors=4)
    found, taps = batch(), features(batch())
    draw = torch.Generator().manual_seed(3)
    coins = torch.rand(1, found.ids.shape[1] - 1, generator=torch.Generator().manual_seed(3))
    anchors, valid = sample_anchors(found.written(), 4, coins)
    sampled = online.sample_blocks(found.written(), found.positions, found.mask[:, 0], draw)
    blocks = packed(found, anchors, valid), plain(anchors, valid, 8, found.ids.shape[1])
    losses = [
        float(online(found.ids, taps, found.written(), one).loss) for one in (sampled, *blocks)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)

"""DFlash's training step against SpecForge's, its masks element by element, inference, packing."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.sequences import DFLASH_GOLDEN, Pair, golden_pair
from safetensors.torch import load_file
from torch import Tensor

from specsot.engine.train import dflash
from specsot.engine.train.data import Tokens, TrainingBatch, pack
from specsot.models.drafters.config import Reach
from specsot.models.drafters.dflash import DFlashDraftModel

FACTS: dict[str, Any] = json.loads((DFLASH_GOLDEN / "training.json").read_text())
GAMMAS = {"gamma_none": math.inf, "gamma_4": 4.0, "gamma_7": 7.0}
SLIDING = (Reach(FACTS["sliding_window"], causal=True), Reach())
CAUSAL = Reach(None, causal=True)
REACHES = [(Reach(), Reach()), (Reach(9, causal=True), Reach(9)), (CAUSAL, CAUSAL)]


Step = dict[str, Tensor]


@pytest.fixture(scope="module")
def step() -> Step:
    return load_file(DFLASH_GOLDEN / "training.safetensors")


@pytest.fixture
def drafter() -> DFlashDraftModel:
    """Fresh for every test: some train it."""
    return golden_pair()[1]


def plain(anchors_BM: Tensor, valid: Tensor, size: int, length: int) -> dflash.Blocks:
    positions = torch.arange(length).expand(len(anchors_BM), -1)
    visible = torch.ones(len(anchors_BM), length, length, dtype=torch.bool).tril()
    return dflash.Blocks(anchors_BM, valid, size=size, positions_BS=positions, visible_BSS=visible)


def fixed(step: Step) -> dflash.Blocks:
    anchors, kept = step["anchor_positions"], step["block_keep_mask"].bool()
    return plain(anchors, kept, FACTS["block_size"], FACTS["seq_len"])


def batch(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    return step["input_ids"], step["target_hidden"], step["loss_mask"]


def varied(drafter: DFlashDraftModel, reaches: tuple[Reach, ...]) -> DFlashDraftModel:
    other = DFlashDraftModel(replace(drafter.config, reaches=reaches), drafter.ends)
    other.load_state_dict(drafter.state_dict())
    return other


def test_inputs_labels_and_what_counts(step: Step) -> None:
    blocks, (ids, _, supervised) = fixed(step), batch(step)
    assert torch.equal(blocks.noise(ids, FACTS["mask_token_id"]), step["noise_ids"])
    assert torch.equal(blocks.positions_BMP.flatten(1), step["position_ids"][:, FACTS["seq_len"] :])
    counted = blocks.counted(supervised)
    assert torch.equal(counted.float(), step["weight_mask"])
    assert torch.equal(blocks.at(ids)[counted], step["target_ids"][counted])


@pytest.mark.parametrize("name", GAMMAS)
def test_losses_accuracy_and_gradients(drafter: DFlashDraftModel, step: Step, name: str) -> None:
    facts = FACTS["losses"][name]
    drafter.requires_grad_(True)
    found = dflash.OnlineDFlashModel(drafter, gamma=GAMMAS[name])(*batch(step), fixed(step))
    assert found.loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    assert found.accuracy.item() == pytest.approx(facts["accuracy"], rel=1e-6)
    assert found.loss_sum.item() == pytest.approx(facts["loss_numerator"], rel=1e-5)
    assert found.weight.item() == pytest.approx(facts["loss_denominator"], rel=1e-5)
    found.loss.backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())
    gradients = drafter.published(lambda p: p if p.grad is None else p.grad)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert float(norm) == pytest.approx(facts["grad_l2_norm"], rel=1e-4)
    expected = {k[13:]: v for k, v in step.items() if k.startswith("grad_gamma_4.")}
    assert len(expected) == 5
    for part, gradient in expected.items() if name == "gamma_4" else ():
        torch.testing.assert_close(gradients[part], gradient, rtol=1e-3, atol=1e-6, msg=part)


def test_a_sliding_layer(drafter: DFlashDraftModel, step: Step) -> None:
    facts = FACTS["losses"]["gamma_4_sliding"]
    trainer = dflash.OnlineDFlashModel(varied(drafter, SLIDING))
    hidden = trainer.hidden(*batch(step)[:2], fixed(step))
    assert (hidden - step["output_hidden_sliding"]).abs().max() < 1e-4
    found = trainer(*batch(step), fixed(step))
    assert found.loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    assert found.accuracy.item() == pytest.approx(facts["accuracy"], rel=1e-6)


def test_output_and_errors_of_every_row(drafter: DFlashDraftModel, step: Step) -> None:
    hidden = dflash.OnlineDFlashModel(drafter).hidden(*batch(step)[:2], fixed(step))
    assert (hidden - step["output_hidden"]).abs().max() < 1e-4
    found = drafter.logits(hidden).log_softmax(-1).view(*step["target_ids"].shape, -1)
    assert torch.equal(found.argmax(-1), step["predicted_ids"])
    errors = -found.gather(-1, step["target_ids"][..., None])[..., 0]
    torch.testing.assert_close(errors, step["neg_log_q"], rtol=1e-3, atol=1e-4)


def test_masks_are_the_recorded_ones(step: Step) -> None:
    assert torch.equal(dflash.block_mask(fixed(step), Reach()), step["mask_full"].bool())
    assert torch.equal(dflash.block_mask(fixed(step), SLIDING[0]), step["mask_sliding"].bool())


def test_a_mask_drawn_as_a_matrix() -> None:
    """Keys: six context tokens, then the blocks of three."""
    blocks = plain(torch.tensor([[2, 5, 0]]), torch.tensor([[True, True, False]]), 3, 6)
    full = dflash.block_mask(blocks, Reach())[0, 0]
    assert ["".join("#" if x else "." for x in row) for row in full.tolist()] == [
        *["##....###......"] * 3,
        *["#####....###..."] * 3,
        *["..............."] * 3,
    ]
    sliding = dflash.block_mask(blocks, Reach(3, causal=True))[0, 0]
    assert ["".join("#" if x else "." for x in row) for row in sliding.tolist()] == [
        "##....#........",
        ".#....##.......",
        "......###......",
        "...##....#.....",
        "....#....##....",
        ".........###...",
        *["..............."] * 3,
    ]


@pytest.mark.parametrize("case", FACTS["samplers"], ids=lambda case: str(case["seed"]))
def test_anchors_of_recorded_coins(step: Step, case: dict[str, Any]) -> None:
    coins = step[f"sampler.{case['seed']}.random_values"]
    anchors, valid = dflash.sample_anchors(step["loss_mask"], case["num_anchors"], coins)
    assert anchors.tolist() == case["anchors"] and valid.tolist() == case["keep"]


def test_anchors_are_drawn_by_the_generator(drafter: DFlashDraftModel, step: Step) -> None:
    trainer, text = dflash.OnlineDFlashModel(drafter, num_anchors=4), fixed(step)

    def drawn(seed: int) -> list[int]:
        draw = torch.Generator().manual_seed(seed)
        blocks = trainer.sample_blocks(step["loss_mask"], text.positions_BS, text.visible_BSS, draw)
        assert trainer(*batch(step), blocks).weight > 0
        return blocks.anchors_BM.flatten().tolist()

    assert drawn(1) == drawn(1) != drawn(2)


def test_without_two_supervised_tokens_side_by_side() -> None:
    with pytest.raises(ValueError, match="no sequence of the batch has two consecutive"):
        dflash.sample_anchors(torch.tensor([[0.0, 1, 0, 1, 0]]), 4, torch.rand(1, 4))


def test_the_decay_of_the_paper() -> None:
    assert [dflash.decay_of(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert [dflash.decay_of(size) for size in (4, 11, 32)] == [4.0, 5.0, 7.0]


@pytest.mark.parametrize("reaches", REACHES)
def test_blocks_in_training_are_the_blocks_of_inference(
    drafter: DFlashDraftModel, step: Step, reaches: tuple[Reach, ...]
) -> None:
    target, blocks = golden_pair()[0], fixed(step)
    drafter = varied(drafter, reaches)
    ids, features, _ = batch(step)
    with torch.no_grad():
        trained = (
            dflash.OnlineDFlashModel(drafter).hidden(ids, features, blocks).unflatten(1, (-1, 8))
        )
    for row, many in enumerate(blocks.anchors_BM.tolist()):
        for number, anchor in enumerate(many):
            if not blocks.valid_BM[row, number]:
                continue
            pair = Pair(target, drafter)
            pair.take_in(features[row, :anchor], 0)
            hidden = pair.draft(int(ids[row, anchor]), anchor, 8)
            assert (hidden - trained[row, number]).abs().max() < 1e-5


def test_distillation_with_what_the_target_says(drafter: DFlashDraftModel, step: Step) -> None:
    blocks = fixed(step)
    ids, features, supervised = batch(step)
    teacher_BSH = torch.randn(*ids.shape, drafter.config.hidden_size)
    none, half, whole = (
        dflash.OnlineDFlashModel(drafter, gamma=math.inf, distillation=share)(
            ids, features, supervised, blocks, teacher_BSH=teacher_BSH
        )
        for share in (0.0, 0.5, 1.0)
    )
    paper = dflash.OnlineDFlashModel(drafter, gamma=math.inf)(*batch(step), blocks)
    torch.testing.assert_close(none.loss, paper.loss)
    torch.testing.assert_close(half.loss, (none.loss + whole.loss) / 2)
    drafts_QH = dflash.OnlineDFlashModel(drafter).hidden(ids, features, blocks).flatten(0, 1)
    place_BMP, counted_BMP = blocks.places_BMP, blocks.counted(supervised)
    losses = []
    for b, m, p in counted_BMP.nonzero().tolist():
        before_H = teacher_BSH[b, place_BMP[b, m, p] - 1]
        wanted_V = drafter.logits(before_H[None])[0].softmax(-1)
        row = (b * counted_BMP.shape[1] + m) * blocks.size + p
        losses.append(-(wanted_V * drafter.logits(drafts_QH[row][None])[0].log_softmax(-1)).sum())
    torch.testing.assert_close(whole.loss, torch.stack(losses).mean())


# -- several texts in one sequence, sharing their beginnings: the same as apart -------------------

TRUNK, FIRST, SECOND, OTHER = 6, 5, 9, 7
TREE = TRUNK + FIRST + SECOND
TEXTS = (
    [*range(TRUNK + FIRST)],
    [*range(TRUNK), *range(TRUNK + FIRST, TREE)],
    [*range(TREE, TREE + OTHER)],
)


def packed_batch() -> TrainingBatch:
    """One row: a trunk with two branches, another text, two rows of padding."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 100, (TREE + OTHER,), generator=draw).tolist()
    segments = [0] * TRUNK + [1] * FIRST + [2] * SECOND
    positions = [*range(TRUNK + FIRST), *range(TRUNK, TRUNK + SECOND)]
    written = [float(i % 5 > 0) for i in range(TREE + OTHER)]
    tree = Tokens(ids[:TREE], written[:TREE], segments, positions)
    other = Tokens(ids[TREE:], written[TREE:], [0] * OTHER, list(range(OTHER)))
    return pack([[tree, other]], TREE + OTHER + 2)


def packed(found: TrainingBatch, anchors: Tensor, valid: Tensor) -> dflash.Blocks:
    visible = found.mask[:, 0]
    return dflash.Blocks(anchors, valid, size=8, positions_BS=found.positions, visible_BSS=visible)


def features(found: TrainingBatch) -> Tensor:
    return torch.randn(1, found.ids.shape[1], 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("reaches", REACHES)
def test_every_block_is_the_one_of_its_text_alone(reaches: tuple[Reach, ...]) -> None:
    online = dflash.OnlineDFlashModel(varied(golden_pair()[1], reaches))
    found, taps = packed_batch(), features(packed_batch())
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
    online = dflash.OnlineDFlashModel(golden_pair()[1])
    found, taps = packed_batch(), features(packed_batch())
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
    online = dflash.OnlineDFlashModel(golden_pair()[1], num_anchors=4)
    found, taps = packed_batch(), features(packed_batch())
    draw = torch.Generator().manual_seed(3)
    coins = torch.rand(1, found.ids.shape[1] - 1, generator=torch.Generator().manual_seed(3))
    anchors, valid = dflash.sample_anchors(found.written(), 4, coins)
    sampled = online.sample_blocks(found.written(), found.positions, found.mask[:, 0], draw)
    blocks = packed(found, anchors, valid), plain(anchors, valid, 8, found.ids.shape[1])
    losses = [
        float(online(found.ids, taps, found.written(), one).loss) for one in (sampled, *blocks)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)

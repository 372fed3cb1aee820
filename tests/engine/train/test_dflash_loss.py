"""DFlash's training step against SpecForge's, its masks element by element, and inference."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.blocks import GOLDEN, Pair, golden_pair
from safetensors.torch import load_file
from torch import Tensor

from specsot.engine.train.dflash import (
    Blocks,
    OnlineDFlashModel,
    block_mask,
    decay_of,
    sample_anchors,
)
from specsot.models.decoder import Decoder
from specsot.models.drafters.config import Reach
from specsot.models.drafters.dflash import DFlashDraftModel

FACTS: dict[str, Any] = json.loads((GOLDEN / "training.json").read_text())
GAMMAS = {"gamma_none": math.inf, "gamma_4": 4.0, "gamma_7": 7.0}
SLIDING = (Reach(FACTS["sliding_window"], causal=True), Reach())


@pytest.fixture(scope="module")
def step() -> dict[str, Tensor]:
    return load_file(GOLDEN / "training.safetensors")


@pytest.fixture
def models() -> tuple[Decoder, DFlashDraftModel]:
    """Fresh for every test: some train them."""
    return golden_pair()


def plain(anchors_BM: Tensor, valid_BM: Tensor, size: int, length: int) -> Blocks:
    """Blocks of sequences that are one text each."""
    positions = torch.arange(length).expand(len(anchors_BM), -1)
    visible = torch.ones(len(anchors_BM), length, length, dtype=torch.bool).tril()
    return Blocks(anchors_BM, valid_BM, size=size, positions_BS=positions, visible_BSS=visible)


def fixed(step: dict[str, Tensor]) -> Blocks:
    anchors, kept = step["anchor_positions"], step["block_keep_mask"].bool()
    return plain(anchors, kept, FACTS["block_size"], FACTS["seq_len"])


def batch(step: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return step["input_ids"], step["target_hidden"], step["loss_mask"]


def varied(drafter: DFlashDraftModel, reaches: tuple[Reach, ...]) -> DFlashDraftModel:
    other = DFlashDraftModel(replace(drafter.config, reaches=reaches), drafter.ends)
    other.load_state_dict(drafter.state_dict())
    return other


def test_inputs_labels_and_what_counts(step: dict[str, Tensor]) -> None:
    blocks, (ids, _, supervised) = fixed(step), batch(step)
    assert torch.equal(blocks.noise(ids, FACTS["mask_token_id"]), step["noise_ids"])
    assert torch.equal(blocks.positions_BMP.flatten(1), step["position_ids"][:, FACTS["seq_len"] :])
    counted = blocks.counted(supervised)
    assert torch.equal(counted.float(), step["weight_mask"])
    assert torch.equal(blocks.at(ids)[counted], step["target_ids"][counted])


@pytest.mark.parametrize("name", GAMMAS)
def test_losses_and_accuracy(
    models: tuple[Decoder, DFlashDraftModel], step: dict[str, Tensor], name: str
) -> None:
    facts = FACTS["losses"][name]
    found = OnlineDFlashModel(models[1], gamma=GAMMAS[name])(*batch(step), fixed(step))
    assert found.loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    assert found.accuracy.item() == pytest.approx(facts["accuracy"], rel=1e-6)
    assert found.loss_sum.item() == pytest.approx(facts["loss_numerator"], rel=1e-5)
    assert found.weight.item() == pytest.approx(facts["loss_denominator"], rel=1e-5)


def test_a_sliding_layer(models: tuple[Decoder, DFlashDraftModel], step: dict[str, Tensor]) -> None:
    facts = FACTS["losses"]["gamma_4_sliding"]
    trainer = OnlineDFlashModel(varied(models[1], SLIDING))
    hidden = trainer.hidden(*batch(step)[:2], fixed(step))
    assert (hidden - step["output_hidden_sliding"]).abs().max() < 1e-4
    found = trainer(*batch(step), fixed(step))
    assert found.loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    assert found.accuracy.item() == pytest.approx(facts["accuracy"], rel=1e-6)


def test_output_and_errors_of_every_row(
    models: tuple[Decoder, DFlashDraftModel], step: dict[str, Tensor]
) -> None:
    """Also of rows that do not count, and of the block that sees nothing."""
    drafter = models[1]
    hidden = OnlineDFlashModel(drafter).hidden(*batch(step)[:2], fixed(step))
    assert (hidden - step["output_hidden"]).abs().max() < 1e-4
    found = drafter.logits(hidden).log_softmax(-1).view(*step["target_ids"].shape, -1)
    assert torch.equal(found.argmax(-1), step["predicted_ids"])
    errors = -found.gather(-1, step["target_ids"][..., None])[..., 0]
    torch.testing.assert_close(errors, step["neg_log_q"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", GAMMAS)
def test_gradients(
    models: tuple[Decoder, DFlashDraftModel], step: dict[str, Tensor], name: str
) -> None:
    drafter = models[1].requires_grad_(True)
    OnlineDFlashModel(drafter, gamma=GAMMAS[name])(*batch(step), fixed(step)).loss.backward()
    found = {n: p.grad for n, p in drafter.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found.values())
    norm = torch.stack([g.norm() for g in found.values() if g is not None]).norm()
    assert float(norm) == pytest.approx(FACTS["losses"][name]["grad_l2_norm"], rel=1e-4)
    expected = {k[13:]: v for k, v in step.items() if k.startswith("grad_gamma_4.")}
    assert len(expected) == 5
    for part, gradient in expected.items() if name == "gamma_4" else ():
        torch.testing.assert_close(found[part], gradient, rtol=1e-3, atol=1e-6, msg=part)


def test_masks_are_the_recorded_ones(step: dict[str, Tensor]) -> None:
    assert torch.equal(block_mask(fixed(step), Reach()), step["mask_full"].bool())
    assert torch.equal(block_mask(fixed(step), SLIDING[0]), step["mask_sliding"].bool())


def test_a_mask_drawn_as_a_matrix() -> None:
    """Keys: six context tokens, then the blocks of three."""
    blocks = plain(torch.tensor([[2, 5, 0]]), torch.tensor([[True, True, False]]), 3, 6)
    full = block_mask(blocks, Reach())[0, 0]
    assert ["".join("#" if x else "." for x in row) for row in full.tolist()] == [
        *["##....###......"] * 3,
        *["#####....###..."] * 3,
        *["..............."] * 3,
    ]
    sliding = block_mask(blocks, Reach(3, causal=True))[0, 0]
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
def test_anchors_of_recorded_coins(step: dict[str, Tensor], case: dict[str, Any]) -> None:
    coins = step[f"sampler.{case['seed']}.random_values"]
    anchors, valid = sample_anchors(step["loss_mask"], case["num_anchors"], coins)
    assert anchors.tolist() == case["anchors"] and valid.tolist() == case["keep"]


def test_anchors_are_drawn_by_the_generator(
    models: tuple[Decoder, DFlashDraftModel], step: dict[str, Tensor]
) -> None:
    trainer, texts = OnlineDFlashModel(models[1], num_anchors=4), fixed(step)

    def drawn(seed: int) -> list[int]:
        draw = torch.Generator().manual_seed(seed)
        blocks = trainer.sample_blocks(
            step["loss_mask"], texts.positions_BS, texts.visible_BSS, draw
        )
        assert trainer(*batch(step), blocks).weight > 0
        return blocks.anchors_BM.flatten().tolist()

    assert drawn(1) == drawn(1) != drawn(2)


def test_without_two_supervised_tokens_side_by_side() -> None:
    with pytest.raises(ValueError, match="no sequence of the batch has two consecutive"):
        sample_anchors(torch.tensor([[0.0, 1, 0, 1, 0]]), 4, torch.rand(1, 4))


def test_the_decay_of_the_paper() -> None:
    assert [decay_of(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert [decay_of(size) for size in (4, 11, 32)] == [4.0, 5.0, 7.0]


@pytest.mark.parametrize("reaches", [(Reach(), Reach()), (Reach(9, causal=True), Reach(9))])
def test_blocks_in_training_are_the_blocks_of_inference(
    models: tuple[Decoder, DFlashDraftModel], step: dict[str, Tensor], reaches: tuple[Reach, ...]
) -> None:
    """A block of a run sees what it saw in training: the same output, anchor by anchor."""
    drafter, blocks = varied(models[1], reaches), fixed(step)
    ids, features, _ = batch(step)
    with torch.no_grad():
        trained = OnlineDFlashModel(drafter).hidden(ids, features, blocks).unflatten(1, (-1, 8))
    for row, many in enumerate(blocks.anchors_BM.tolist()):
        for number, anchor in enumerate(many):
            if not blocks.valid_BM[row, number]:
                continue
            pair = Pair(models[0], drafter)
            pair.take_in(features[row, :anchor], 0)
            hidden = pair.draft(int(ids[row, anchor]), anchor, 8)
            assert (hidden - trained[row, number]).abs().max() < 1e-5


def test_a_few_steps_lower_the_loss(
    models: tuple[Decoder, DFlashDraftModel], step: dict[str, Tensor]
) -> None:
    target, drafter = models
    drafter.requires_grad_(True)
    trainer = OnlineDFlashModel(drafter)
    assert {n.removeprefix("draft_model.") for n, _ in trainer.named_parameters()} == set(
        drafter.published()
    )
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    head = target.lm_head.weight.clone()
    losses = []
    for _ in range(5):
        found = trainer(*batch(step), fixed(step))
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
        losses.append(found.loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert torch.equal(head, target.lm_head.weight)


def test_what_competes_in_the_loss(
    models: tuple[Decoder, DFlashDraftModel], step: dict[str, Tensor]
) -> None:
    """All ids as candidates are no candidates at all; of few, the right ones are always there."""
    drafter = models[1]
    size = len(drafter.ends.head_VH)
    with torch.no_grad():
        whole = OnlineDFlashModel(drafter)(*batch(step), fixed(step))
        every, few = (
            OnlineDFlashModel(drafter, candidates=torch.arange(n))(*batch(step), fixed(step))
            for n in (size, 5)
        )
    torch.testing.assert_close(every.loss, whole.loss)
    assert torch.equal(every.accuracy, whole.accuracy)
    assert few.loss < whole.loss and few.accuracy >= whole.accuracy


def test_distillation_with_what_the_target_says(
    models: tuple[Decoder, DFlashDraftModel], step: dict[str, Tensor]
) -> None:
    """Row by row: cross-entropy with the target's softmax after the token before its place."""
    drafter, blocks = models[1], fixed(step)
    ids, features, supervised = batch(step)
    teacher_BSH = torch.randn(*ids.shape, drafter.config.hidden_size)
    none, half, whole = (
        OnlineDFlashModel(drafter, gamma=math.inf, distillation=share)(
            ids, features, supervised, blocks, teacher_BSH=teacher_BSH
        )
        for share in (0.0, 0.5, 1.0)
    )
    paper = OnlineDFlashModel(drafter, gamma=math.inf)(*batch(step), blocks)
    torch.testing.assert_close(none.loss, paper.loss)
    torch.testing.assert_close(half.loss, (none.loss + whole.loss) / 2)
    drafts_QH = OnlineDFlashModel(drafter).hidden(ids, features, blocks).flatten(0, 1)
    place_BMP, counted_BMP = blocks.places_BMP, blocks.counted(supervised)
    losses = []
    for b, m, p in counted_BMP.nonzero().tolist():
        before_H = teacher_BSH[b, place_BMP[b, m, p] - 1]
        wanted_V = drafter.logits(before_H[None])[0].softmax(-1)
        row = (b * counted_BMP.shape[1] + m) * blocks.size + p
        losses.append(-(wanted_V * drafter.logits(drafts_QH[row][None])[0].log_softmax(-1)).sum())
    torch.testing.assert_close(whole.loss, torch.stack(losses).mean())

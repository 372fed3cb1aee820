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
from specsot.engine.train.dflash import Blocks, block_loss, decay_of
from specsot.models.drafters.config import Reach
from specsot.models.drafters.dflash import DFlashDraftModel

FACTS: dict[str, Any] = json.loads((DFLASH_GOLDEN / "training.json").read_text())
GAMMAS = {"gamma_none": math.inf, "gamma_4": 4.0, "gamma_7": 7.0}
SLIDING = (Reach(FACTS["sliding_window"], causal=True), Reach())
CAUSAL = Reach(None, causal=True)
REACHES = [(Reach(), Reach()), (Reach(9, causal=True), Reach(9)), (CAUSAL, CAUSAL)]


@pytest.fixture(scope="module")
def step() -> dict[str, Tensor]:
    return load_file(DFLASH_GOLDEN / "training.safetensors")


@pytest.fixture(scope="module")
def blocks(step: dict[str, Tensor]) -> Blocks:
    batch = texts(step["input_ids"], step["loss_mask"])
    valid_BM = step["block_keep_mask"].bool()
    return Blocks(batch, step["anchor_positions"], valid_BM, FACTS["block_size"])


@pytest.fixture
def drafter() -> DFlashDraftModel:
    """Fresh for every test: some train it."""
    return golden_pair()[1]


def texts(ids_BS: Tensor, written_BS: Tensor) -> TrainingBatch:
    """One text a row."""
    rows, length = ids_BS.shape
    same = torch.zeros(rows, length)
    positions = torch.arange(length).expand(rows, -1)
    labels, weights = ids_BS.roll(-1, 1), written_BS.roll(-1, 1)
    return TrainingBatch(ids_BS, positions, labels, weights, samples=same, segments=same)


def varied(drafter: DFlashDraftModel, reaches: tuple[Reach, ...]) -> DFlashDraftModel:
    other = DFlashDraftModel(replace(drafter.config, reaches=reaches), drafter.ends)
    other.load_state_dict(drafter.state_dict())
    return other


def test_inputs_labels_and_what_counts(blocks: Blocks, step: dict[str, Tensor]) -> None:
    assert torch.equal(blocks.noise(FACTS["mask_token_id"]), step["noise_ids"])
    assert torch.equal(blocks.positions_BMP.flatten(1), step["position_ids"][:, FACTS["seq_len"] :])
    counted = blocks.counted()
    assert torch.equal(counted.float(), step["weight_mask"])
    assert torch.equal(blocks.at(blocks.batch.ids)[counted], step["target_ids"][counted])
    assert torch.equal(blocks.mask(Reach()), step["mask_full"][:, 0].bool())
    assert torch.equal(blocks.mask(SLIDING[0]), step["mask_sliding"][:, 0].bool())


@pytest.mark.parametrize("name", GAMMAS)
def test_losses_accuracy_and_gradients(
    name: str,
    drafter: DFlashDraftModel,
    blocks: Blocks,
    step: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = FACTS["losses"][name]
    monkeypatch.setattr(dflash, "decay_of", lambda size: GAMMAS[name])
    drafter.requires_grad_(True)
    found = block_loss(drafter, step["target_hidden"], blocks)
    assert found.loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    assert found.accuracy.item() == pytest.approx(facts["accuracy"], rel=1e-6)
    assert (found.loss * found.weight).item() == pytest.approx(facts["loss_numerator"], rel=1e-5)
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


def test_outputs_and_errors_of_every_row(
    drafter: DFlashDraftModel, blocks: Blocks, step: dict[str, Tensor]
) -> None:
    hidden = blocks.hidden(drafter, step["target_hidden"])
    assert (hidden - step["output_hidden"]).abs().max() < 1e-4
    found = drafter.logits(hidden).log_softmax(-1).view(*step["target_ids"].shape, -1)
    assert torch.equal(found.argmax(-1), step["predicted_ids"])
    errors = -found.gather(-1, step["target_ids"][..., None])[..., 0]
    torch.testing.assert_close(errors, step["neg_log_q"], rtol=1e-3, atol=1e-4)
    sliding, facts = varied(drafter, SLIDING), FACTS["losses"]["gamma_4_sliding"]
    hidden = blocks.hidden(sliding, step["target_hidden"])
    assert (hidden - step["output_hidden_sliding"]).abs().max() < 1e-4
    loss, accuracy, _ = block_loss(sliding, step["target_hidden"], blocks)
    assert loss.item() == pytest.approx(facts["loss"], rel=1e-5)
    assert accuracy.item() == pytest.approx(facts["accuracy"], rel=1e-6)


@pytest.mark.parametrize("case", FACTS["samplers"], ids=lambda case: str(case["seed"]))
def test_recorded_anchors(blocks: Blocks, step: dict[str, Tensor], case: dict[str, Any]) -> None:
    coins = step[f"sampler.{case['seed']}.random_values"]
    found = Blocks.sample(blocks.batch, case["num_anchors"], 8, coins)
    assert found.anchors_BM.tolist() == case["anchors"] and found.valid_BM.tolist() == case["keep"]


def test_two_supervised_tokens_side_by_side_are_needed_and_the_decay_of_the_paper() -> None:
    batch = texts(torch.arange(5)[None], torch.tensor([[0.0, 1, 0, 1, 0]]))
    with pytest.raises(ValueError, match="no sequence of the batch has two consecutive"):
        Blocks.sample(batch, 4, 8, torch.rand(1, 4))
    assert [decay_of(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert [decay_of(size) for size in (4, 11, 32)] == [4.0, 5.0, 7.0]


@pytest.mark.parametrize("reaches", REACHES)
def test_blocks_in_training_are_the_blocks_of_inference(
    reaches: tuple[Reach, ...], blocks: Blocks, step: dict[str, Tensor]
) -> None:
    target, drafter = golden_pair()
    drafter, taps = varied(drafter, reaches), step["target_hidden"]
    with torch.no_grad():
        trained = blocks.hidden(drafter, taps).unflatten(1, (-1, 8))
    for row, number in blocks.valid_BM.nonzero().tolist():
        anchor = int(blocks.anchors_BM[row, number])
        pair = Pair(target, drafter)
        pair.take_in(taps[row, :anchor], 0)
        hidden = pair.draft(int(blocks.batch.ids[row, anchor]), anchor, 8)
        assert (hidden - trained[row, number]).abs().max() < 1e-5


def test_distillation_with_what_the_target_says(
    drafter: DFlashDraftModel,
    blocks: Blocks,
    step: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dflash, "decay_of", lambda size: math.inf)
    taps = step["target_hidden"]
    teacher_BSH = torch.randn(*taps.shape[:2], drafter.config.hidden_size)
    none, half, whole = (
        block_loss(drafter, taps, blocks, distillation=share, teacher_BSH=teacher_BSH).loss
        for share in (0.0, 0.5, 1.0)
    )
    torch.testing.assert_close(none, block_loss(drafter, taps, blocks).loss)
    torch.testing.assert_close(half, (none + whole) / 2)
    drafts_BMPH = blocks.hidden(drafter, taps).view(*blocks.places_BMP.shape, -1)
    losses = []
    for b, m, p in blocks.counted().nonzero().tolist():
        before_H = teacher_BSH[b, blocks.places_BMP[b, m, p] - 1]
        wanted_V = drafter.logits(before_H[None])[0].softmax(-1)
        drafted_V = drafter.logits(drafts_BMPH[b, m, p][None])[0].log_softmax(-1)
        losses.append(-(wanted_V * drafted_V).sum())
    torch.testing.assert_close(whole, torch.stack(losses).mean())


# -- several texts in one sequence, sharing their beginnings: the same as apart -------------------

TRUNK, FIRST, SECOND, OTHER = 6, 5, 9, 7
TREE = TRUNK + FIRST + SECOND
ALL = TREE + OTHER
TEXTS = (
    [*range(TRUNK + FIRST)],
    [*range(TRUNK), *range(TRUNK + FIRST, TREE)],
    [*range(TREE, ALL)],
)


def packed(first: int = 0) -> tuple[Blocks, Tensor]:
    """One row: a trunk with two branches, another text, two rows of padding; blocks at all tokens
    from the first on; and features."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 100, (ALL,), generator=draw).tolist()
    segments = [0] * TRUNK + [1] * FIRST + [2] * SECOND
    positions = [*range(TRUNK + FIRST), *range(TRUNK, TRUNK + SECOND)]
    written = [float(i % 5 > 0) for i in range(ALL)]
    tree = Tokens(ids[:TREE], written[:TREE], segments, positions)
    batch = pack([[tree, Tokens.linear(ids[TREE:], written[TREE:])]], ALL + 2)
    anchors = torch.arange(first, ALL)[None]
    taps = torch.randn(1, ALL + 2, 128, generator=torch.Generator().manual_seed(1))
    return Blocks(batch, anchors, anchors >= 0, 8), taps


def alone(blocks: Blocks, rows: list[int], first: int = 0) -> Blocks:
    """Blocks of one text, at all of its tokens behind the first ones of the row."""
    own = torch.tensor([[i for i, row in enumerate(rows) if row >= first]])
    batch = texts(blocks.batch.ids[:, rows], blocks.batch.written()[:, rows])
    return Blocks(batch, own, own >= 0, 8)


@pytest.mark.parametrize("reaches", REACHES)
@torch.no_grad()
def test_every_block_is_the_one_of_its_text_alone(
    reaches: tuple[Reach, ...], drafter: DFlashDraftModel
) -> None:
    drafter = varied(drafter, reaches)
    blocks, taps = packed()
    together, counted = blocks.hidden(drafter, taps).unflatten(1, (-1, 8))[0], blocks.counted()[0]
    seen = set()
    for rows in TEXTS:
        one = alone(blocks, rows)
        apart = one.hidden(drafter, taps[:, rows]).unflatten(1, (-1, 8))[0]
        torch.testing.assert_close(together[rows], apart, atol=1e-5, rtol=1e-5)
        own = [i for i, row in enumerate(rows) if row >= TRUNK or rows is TEXTS[0]]
        assert torch.equal(counted[[rows[i] for i in own]], one.counted()[0][own])
        seen |= {rows[i] for i in own}
    assert seen == set(range(ALL)) and counted.any()


def test_a_step_on_a_packed_row_is_the_mean_over_its_texts(drafter: DFlashDraftModel) -> None:
    """Blocks of the branches and of the other text; each text alone, weighted by what counts."""
    blocks, taps = packed(TRUNK)
    each = [block_loss(drafter, taps[:, rows], alone(blocks, rows, TRUNK)) for rows in TEXTS]
    mean = sum(one.loss * one.weight for one in each) / sum(one.weight for one in each)
    torch.testing.assert_close(block_loss(drafter, taps, blocks).loss, mean, atol=1e-5, rtol=1e-5)

"""The training-time test against one step of the published EAGLE-3 trainer."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specsot.engine.train.eagle import (
    EagleInputs,
    decayed_sum,
    distribution_score,
    shift,
    unrolled_scores,
)
from specsot.models.drafters.eagle import Eagle3
from specsot.models.load.weights import load_eagle3, load_target

GOLDEN = Path(__file__).parents[2] / "golden" / "eagle"


@pytest.fixture(scope="module")
def step() -> dict[str, Tensor]:
    return load_file(GOLDEN / "e3_llama_training" / "ttt_step.safetensors")


def drafter() -> Eagle3:
    target = load_target(GOLDEN / "targets" / "llama")
    return load_eagle3(GOLDEN / "drafts" / "llama_eagle3", target)


def lesson(step: dict[str, Tensor], known_V: Tensor) -> EagleInputs:
    rows, length = step["input_ids"].shape
    keys = step["attention_mask"].bool()[:, None, :]
    return EagleInputs(
        taps_BSF=step["aux_hidden"],
        tokens_BS=step["input_ids_shifted"].long(),
        goals_BSG=step["target_logits_shifted"][..., known_V].softmax(-1),
        best_BS=step["target_logits_shifted"].argmax(-1),
        counted_BS=step["loss_mask"].float(),
        positions_BS=torch.arange(length).expand(rows, -1),
        visible_BSS=torch.ones(length, length, dtype=torch.bool).tril() & keys,
    )


def unrolled(model: Eagle3, step: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    score = partial(distribution_score, model)
    return unrolled_scores(model, lesson(step, model.t2d), 7, score)


def test_losses_and_accuracies_of_every_step(step: dict[str, Tensor]) -> None:
    model = drafter()
    losses, accuracies = unrolled(model, step)
    torch.testing.assert_close(losses, step["plosses"], atol=2e-6, rtol=2e-6)
    facts = json.loads((GOLDEN / "e3_llama_training" / "ttt_step.json").read_text())
    expected = torch.tensor(facts["accuracies"])
    torch.testing.assert_close(accuracies, expected, atol=1e-5, rtol=0)


def test_gradients_of_the_decayed_sum(step: dict[str, Tensor]) -> None:
    model = drafter()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "embed_tokens.weight")
    total = decayed_sum(unrolled(model, step)[0], 0.8)
    torch.testing.assert_close(total[None], step["loss"], atol=2e-5, rtol=2e-6)
    total.backward()
    expected = {k.removeprefix("grad."): v for k, v in step.items() if k.startswith("grad.")}
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=2e-5, msg=name)


def test_shift_moves_left_and_fills_with_zeros() -> None:
    x = torch.tensor([[1, 2, 3]])
    assert shift(x, 2).tolist() == [[3, 0, 0]]
    assert shift(x, 0) is x

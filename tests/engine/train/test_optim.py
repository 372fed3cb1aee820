"""Learning rates, orthogonalized updates, and what accuracies of steps mean for a chain."""

import pytest
import torch

from specsot.engine.train.eagle import chain_tau
from specsot.engine.train.loop import learning_rate, orthogonalized


def test_learning_rate_warms_up_and_falls_to_the_floor() -> None:
    assert learning_rate(0.01, 1.0) == pytest.approx(0.5)
    assert learning_rate(0.02, 1.0) == pytest.approx(1.0)
    assert learning_rate(1.0, 1.0) == pytest.approx(0.05)
    assert learning_rate(2.0, 1.0) == pytest.approx(0.05)


@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)).float())
    assert values.min() > 0.5 and values.max() < 1.4


def test_chain_tau_multiplies_accuracies() -> None:
    assert chain_tau([torch.tensor(0.5)] * 2).item() == pytest.approx(1.75)

"""Learning rates, optimizers, and what accuracies of steps mean for a chain."""

import pytest
import torch

from specsot.engine.train.eagle import chain_tau
from specsot.engine.train.loop import MuonAdamW, learning_rate


def test_learning_rate_warms_up_and_falls_to_the_floor() -> None:
    assert learning_rate(0.01, 1.0) == pytest.approx(0.5)
    assert learning_rate(0.02, 1.0) == pytest.approx(1.0)
    assert learning_rate(1.0, 1.0) == pytest.approx(0.05)
    assert learning_rate(2.0, 1.0) == pytest.approx(0.05)


@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_matrices_of_layers_move_by_orthogonal_steps_and_the_rest_by_adams(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(columns, rows)})
    layer = model["layer"]
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = MuonAdamW(model, lr=1e-2, embedding_lr=2e-2)
    layer(torch.randn(5, columns)).square().sum().backward()
    optimizer.step(0.02)  # the peak of the learning rates
    moved = {name: before[name] - p.detach() for name, p in layer.named_parameters()}
    step = (moved["weight"] - 1e-2 * 0.02 * before["weight"]) / (1e-2 * 0.2 * max(shape) ** 0.5)
    values = torch.linalg.svdvals(step)
    assert values[:5].min() > 0.5 and values.max() < 1.4
    torch.testing.assert_close(moved["bias"].abs(), torch.full((rows,), 2e-2), rtol=1e-3, atol=0)


def test_chain_tau_multiplies_accuracies() -> None:
    assert chain_tau([torch.tensor(0.5)] * 2).item() == pytest.approx(1.75)

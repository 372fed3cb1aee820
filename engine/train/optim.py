"""Optimizers and the learning-rate schedule for training on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...models.linear import has_products


def learning_rate(done: float, peak: float, warmup: float = 0.02, floor: float = 0.05) -> float:
    """Linear warm-up, then cosine down to ``floor * peak``; ``done`` is the share trained."""
    if done < warmup:
        return peak * max(done, 1e-4) / warmup
    progress = min(1.0, (done - warmup) / (1.0 - warmup))
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """About the nearest semi-orthogonal matrix [rows, columns], by Newton-Schulz steps."""
    a = 3.4445
    b = -4.7750
    c = 2.0315
    x = matrix.to(torch.bfloat16 if has_products(matrix.device, torch.bfloat16) else torch.float32)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.T if tall else x).to(matrix.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is orthogonalized, scaled to AdamW's step size."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1.0 - group["momentum"])
                update = orthogonalized(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1.0 - group["lr"] * 0.02)
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


class MuonAdamW:
    """Muon for the matrices of the layers and AdamW for everything else."""

    def __init__(self, model: nn.Module, lr: float, embedding_lr: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        of_layers = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in of_layers]
        self.muon = Muon(matrices, lr)
        self.adam = torch.optim.AdamW(
            others, embedding_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.peaks = (lr, embedding_lr)

    def step(self, done: float) -> None:
        """One update at the learning rates for this share of the training."""
        for optimizer, peak in zip((self.muon, self.adam), self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(done, peak)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])

"""A mixture of experts in place of a layer's MLP: the router selects the best few for each row."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ExpertsConfig
from .linear import Linear


class Experts(nn.Module):
    """SwiGLU experts and their router, without biases; `mlp` of a published layer."""

    gate_up: Any
    down: Any

    def __init__(self, config: ExpertsConfig, hidden: int, size: int) -> None:
        super().__init__()
        self.config = config
        count = range(config.count)
        self.gate = Linear(hidden, config.count, bias=False)
        self.gate_up = nn.ModuleList(Linear(hidden, 2 * size, bias=False) for _ in count)
        self.down = nn.ModuleList(Linear(size, hidden, bias=False) for _ in count)

    def forward(self, x_NH: Tensor, residual_NH: Tensor) -> Tensor:
        """The residual plus the weighted outputs of each row's experts. They are added in the order
        of the experts, so a row's sum does not depend on the other rows."""
        weight_NE = F.softmax(self.gate.forward(x_NH), -1, dtype=torch.float)
        weight_NK, expert_NK = weight_NE.topk(self.config.per_token, -1)
        if self.config.normalised:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        weight_NK = weight_NK.to(x_NH.dtype)
        out_NH = torch.zeros_like(x_NH)
        for expert in sorted(set(expert_NK.flatten().tolist())):
            row_M, place_M = torch.where(expert_NK == expert)
            gate_MI, up_MI = self.gate_up[expert](x_NH[row_M]).chunk(2, -1)
            own_MH = self.down[expert](F.silu(gate_MI).mul_(up_MI))
            out_NH.index_add_(0, row_M, own_MH * weight_NK[row_M, place_M, None])
        return residual_NH + out_NH

    def published(self) -> dict[str, Tensor]:
        """Views of the parameters under Hugging Face's names, without the layer's prefix."""
        views = {"mlp.gate.weight": self.gate.weight}
        for expert, (both, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            name = f"mlp.experts.{expert}"
            gate, up = both.weight.chunk(2)
            views |= {f"{name}.gate_proj.weight": gate, f"{name}.up_proj.weight": up}
            views[f"{name}.down_proj.weight"] = down.weight
        return views

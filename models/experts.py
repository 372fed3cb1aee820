"""A mixture of experts in place of a layer's MLP: the router selects the best few for each row."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ExpertsConfig
from .linear import Linear


class Experts(nn.Module):
    """SwiGLU experts and their router, without biases; `mlp` of a published layer.

    gate_up, down: [E, 2I, H] and [E, H, I], as published, one expert after another."""

    def __init__(self, config: ExpertsConfig, hidden: int, size: int) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden, config.count, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.count, 2 * size, hidden))
        self.down = nn.Parameter(torch.empty(config.count, hidden, size))

    def forward(self, x_NH: Tensor, residual_NH: Tensor) -> Tensor:
        """The residual plus the weighted outputs of each row's experts, the first ones first, so
        that a row's sum does not depend on the other rows. The host reads no value."""
        weight_NE = F.softmax(self.gate.forward(x_NH), -1, dtype=torch.float)
        weight_NK, expert_NK = weight_NE.topk(self.config.per_token, -1)
        if self.config.normalised:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        expert_NK, order_NK = expert_NK.sort(-1)
        weight_NK1 = weight_NK.gather(-1, order_NK).to(x_NH.dtype)[..., None]
        # The M = N * K products in the order of the experts, each expert's in one run.
        expert_M, order_M = expert_NK.flatten().sort(stable=True)
        every_E = torch.arange(self.config.count, device=x_NH.device)
        end_E = torch.searchsorted(expert_M, every_E, right=True, out_int32=True)
        x_MH = x_NH[order_M // self.config.per_token]
        gate_MI, up_MI = products(x_MH, self.gate_up, end_E).chunk(2, -1)
        own_MH = products(F.silu(gate_MI).mul_(up_MI), self.down, end_E)
        own_MH = torch.empty_like(own_MH).index_copy_(0, order_M, own_MH)
        return residual_NH + (own_MH.view(*expert_NK.shape, -1) * weight_NK1).sum(1)

    def published(self) -> dict[str, Tensor]:
        """Views of the parameters under Hugging Face's names, without the layer's prefix."""
        views = {"mlp.gate.weight": self.gate.weight}
        for expert, (both, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            name = f"mlp.experts.{expert}"
            gate, up = both.chunk(2)
            views |= {f"{name}.gate_proj.weight": gate, f"{name}.up_proj.weight": up}
            views[f"{name}.down_proj.weight"] = down
        return views


def products(x_MI: Tensor, weight_EOI: Tensor, end_E: Tensor) -> Tensor:
    """[M, O]: each run of rows times its expert's weight; end_E: int32, where the runs end. In
    float64, and for rows that are no multiple of 16 bytes, torch has no such product, and the host
    reads the ends."""
    if x_MI.dtype != torch.float64 and x_MI.shape[1] * x_MI.itemsize % 16 == 0:
        return F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=end_E)
    ends = end_E.tolist()
    runs = zip([0, *ends], ends, weight_EOI, strict=False)
    return torch.cat([F.linear(x_MI[start:end], weight_OI) for start, end, weight_OI in runs])

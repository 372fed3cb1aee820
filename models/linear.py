"""Linear layers whose weights can lie as oneDNN multiplies with them.

`F.linear` in bfloat16 on a CPU brings the whole weight into that layout at every call, which for
the few rows of a decoding step takes longer than the product. Done once, the numbers are the same
bit for bit (float32 goes through another library, whose sums are ordered otherwise: it stays).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

ONEDNN: Any = torch.ops.mkldnn  # the operators that torch.compile makes of frozen weights


class Linear(nn.Linear):
    """`nn.Linear` that can be packed for inference; then `weight` is no parameter any more."""

    packed = False

    def pack_(self) -> None:
        """Bring the weight into oneDNN's layout; the plain one is given up."""
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", ONEDNN._reorder_linear_weight(weight, None), False)
        self.packed = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return super().forward(x)
        out: Tensor = ONEDNN._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def added(self, residual_NH: Tensor, x_NI: Tensor) -> Tensor:
        """residual + linear(x), in one kernel where there is no bias."""
        if self.bias is not None:
            return residual_NH + self.forward(x_NI)
        if not self.packed:
            return torch.addmm(residual_NH, x_NI, self.weight.t())
        both: Any = ONEDNN._linear_pointwise.binary
        out: Tensor = both(x_NI, residual_NH, self.weight, None, "add")
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights are supported here, and faster."""
    cpu = device.type == "cpu" and hasattr(ONEDNN, "_linear_pointwise")
    return cpu and dtype == torch.bfloat16 and bool(ONEDNN._is_mkldnn_bf16_supported())


def pack_(model: nn.Module, lent: Iterable[Tensor] = ()) -> None:
    """Pack all layers of a model that will only be asked, never trained or saved.

    Args:
        lent: weights of others, which they use as they are.
    """
    kept = {weight.data_ptr() for weight in lent}
    for module in model.modules():
        if isinstance(module, Linear) and module.weight.data_ptr() not in kept:
            module.pack_()

"""Products with weights that are stored as oneDNN multiplies with them.

`F.linear` on a CPU goes through MKL in float32, which is slow for the few rows of a round, and in
bfloat16 brings the whole weight into oneDNN's layout at every call. Packed once, five rows cost
what one does (docs/performance.md), and a row's sums hardly ever depend on how many rows there are.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL_MODEL = 16_000_000  # weights

ONEDNN: Any = torch.ops.mkldnn  # the operators that torch.compile makes of frozen weights
SUPPORT_CHECKS = {  # which of them say whether a processor has products in a dtype
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}

FewRows = Callable[[Tensor, Tensor | None], Tensor]
"""(x_NI, a term to add [N, O] or [O]) -> [N, O], by a weight of its own."""


@lru_cache(1 << 13)
def padding(count: int) -> int:
    """Rows of zeros to add to `count` rows: oneDNN makes a kernel for every number of rows, which
    takes 0.3 ms and half a megabyte for good. With an eighth more rows at most there are eight
    kernels between one power of two and the next."""
    return -count % (1 << max(count.bit_length() - 4, 0))


def linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """[N, I] -> [N, O] by a weight that is packed or not."""
    if not weight_OI.is_mkldnn:
        return F.linear(x_NI, weight_OI)
    count = x_NI.shape[0]
    if extra := padding(count):
        x_NI = F.pad(x_NI, (0, 0, 0, extra))
    out_NO: Tensor = ONEDNN._linear_pointwise(x_NI, weight_OI, None, "none", [], "")
    return out_NO[:count] if extra else out_NO


@dataclass(frozen=True, slots=True)
class OneRow:
    """One row by the weight as MKL multiplies it."""

    weight_IO: Tensor

    def __call__(self, x_NI: Tensor, added: Tensor | None) -> Tensor:
        if added is None:
            return torch.mm(x_NI, self.weight_IO)
        return torch.addmm(added, x_NI, self.weight_IO)


class Linear(nn.Linear):
    """`nn.Linear` that can be packed for inference, which makes `weight` a buffer.

    few: multiplies up to `few_rows` rows faster.
    """

    few: FewRows | None = None
    few_rows = 0

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, plus the residual [N, O]: in one kernel where there is no bias."""
        bias = self.bias
        if residual is not None and bias is not None:
            return residual + self.forward(x)
        count = x.shape[0]  # `len` of a tensor is Python's, and takes longer
        if self.few is not None and count <= self.few_rows:
            return self.few(x, bias if residual is None else residual)
        weight = self.weight
        if not weight.is_mkldnn:
            if residual is None:
                return F.linear(x, weight, bias)
            return torch.addmm(residual, x, weight.t())
        extra = padding(count)
        if extra:
            x = F.pad(x, (0, 0, 0, extra))
        out: Tensor
        if residual is None:
            out = ONEDNN._linear_pointwise(x, weight, bias, "none", [], "")
        else:
            if extra:
                residual = F.pad(residual, (0, 0, 0, extra))
            out = ONEDNN._linear_pointwise.binary(x, residual, weight, None, "add")
        return out[:count] if extra else out


class Fused:
    """Linear layers of one input: one product, once they are joined for inference."""

    def __init__(self, *layers: Linear) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.joint: Linear | None = None

    def join_(self) -> Linear:
        """Make one layer of them, which has all their weights; theirs become empty."""
        first = self.layers[0]
        self.joint = Linear(first.in_features, sum(self.sizes), first.bias is not None, "meta")
        for name, _ in list(self.joint.named_parameters()):
            parts = [getattr(layer, name).detach() for layer in self.layers]
            replace_(self.joint, name, torch.cat(parts))
            for layer, part in zip(self.layers, parts, strict=True):
                replace_(layer, name, part[:0])
        return self.joint

    def __call__(self, x_NI: Tensor) -> tuple[Tensor, ...]:
        if self.joint is None:
            return tuple(layer.forward(x_NI) for layer in self.layers)
        return tuple(torch.split_with_sizes(self.joint.forward(x_NI), self.sizes, -1))


def fused(model: nn.Module) -> list[Fused]:
    """The layers of a model that may become one product."""
    parts = [part for module in model.modules() for part in vars(module).values()]
    return [part for part in parts if isinstance(part, Fused)]


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights are supported here, and faster."""
    if device.type != "cpu" or not hasattr(ONEDNN, "_linear_pointwise"):
        return False
    return dtype in (torch.float32, torch.bfloat16) and has_products(device, dtype)


def has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies in this dtype: a processor that does not takes many times as
    long as in float32."""
    if device.type != "cpu" or dtype not in SUPPORT_CHECKS:
        return True
    supported = getattr(ONEDNN, SUPPORT_CHECKS[dtype], None)
    return supported is not None and bool(supported())


def pack_(model: nn.Module, borrowed: Iterable[Tensor] = ()) -> None:
    """Pack all weights of a model that will only run forwards: no training, no saving.

    The plain weights are freed unless they are referenced elsewhere; of small models in float32 a
    copy stays for single rows, for which oneDNN takes longer to start than to multiply.

    borrowed: weights of another model, which uses them unpacked.
    """
    unpacked = {weight.data_ptr() for weight in borrowed if not weight.is_mkldnn}
    joints = [part.join_() for part in fused(model)]
    layers = [part for part in model.modules() if isinstance(part, Linear) and part.weight.numel()]
    layers += joints
    small = sum(layer.weight.numel() for layer in layers) <= SMALL_MODEL
    for layer in layers:
        weight = layer.weight.detach()
        if weight.is_mkldnn or weight.data_ptr() in unpacked:
            continue
        if small and weight.dtype == torch.float32:
            layer.few = OneRow(weight.t().contiguous())
            layer.few_rows = 1
        replace_(layer, "weight", ONEDNN._reorder_linear_weight(weight, None))


def settle_(model: nn.Module) -> None:
    """Make the parts of every module plain attributes: torch searches three tables for them, which
    a model that only runs forwards does not need."""
    joints = [part.joint for part in fused(model) if part.joint is not None]
    for module in (*model.modules(), *joints):
        for table in (module._modules, module._parameters, module._buffers):
            vars(module).update(table)


def replace_(module: nn.Module, name: str, weight: Tensor) -> None:
    """Replace a weight of a module; the new one may be packed: then it is not a parameter."""
    delattr(module, name)
    if isinstance(weight, nn.Parameter):
        module.register_parameter(name, weight)
    else:
        module.register_buffer(name, weight, persistent=False)

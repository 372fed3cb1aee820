"""Products with weights that can lie as oneDNN multiplies with them.

`F.linear` on a CPU goes through MKL in float32, which is slow for the few rows of a round, and in
bfloat16 brings the whole weight into oneDNN's layout at every call. Packed once, five rows cost
what one does (docs/performance.md), and a row's sums hardly ever depend on how many rows there are.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL = 16_000_000  # weights of a model

ONEDNN: Any = torch.ops.mkldnn  # the operators that torch.compile makes of frozen weights
LOW = {  # and which of them say whether a processor has products in a dtype
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """[N, I] -> [N, O] by a weight that is packed or not."""
    if not weight_OI.is_mkldnn:
        return F.linear(x_NI, weight_OI, bias_O)
    count = x_NI.shape[0]  # `len` of a tensor is Python's, and takes longer
    out_NO: Tensor = ONEDNN._linear_pointwise(padded(x_NI), weight_OI, bias_O, "none", [], "")
    return out_NO if out_NO.shape[0] == count else out_NO[:count]


def padded(x_NI: Tensor) -> Tensor:
    """[N, I] -> [P, I] with rows of zeros behind: oneDNN makes a kernel for every number of rows,
    which takes 0.3 ms and half a megabyte for good. With an eighth more rows at most there are
    eight kernels between one power of two and the next."""
    count = x_NI.shape[0]
    step = 1 << max(count.bit_length() - 4, 0)
    return x_NI if count % step == 0 else F.pad(x_NI, (0, 0, 0, -count % step))


class Few(Protocol):
    """A product of few rows by a weight of its own."""

    def times(self, x_NI: Tensor) -> Tensor:
        """[N, I] -> [N, O]."""
        ...

    def added(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        """The same, with something added."""
        ...


class OneRow(NamedTuple):
    """By the weight as MKL multiplies one row with it."""

    weight_IO: Tensor

    def times(self, x_NI: Tensor) -> Tensor:
        return torch.mm(x_NI, self.weight_IO)

    def added(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        return torch.addmm(residual_NO, x_NI, self.weight_IO)


class Linear(nn.Linear):
    """`nn.Linear` that can be packed for inference; then `weight` is no parameter any more."""

    few: Few | None = None  # what multiplies up to `few_rows` rows faster
    few_rows = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.few is None or x.shape[0] > self.few_rows:
            return linear(x, self.weight, self.bias)
        return self.few.times(x) if self.bias is None else self.few.added(self.bias, x)

    def added(self, residual_NH: Tensor, x_NI: Tensor) -> Tensor:
        """residual + linear(x), in one kernel where there is no bias."""
        if self.bias is not None:
            return residual_NH + self.forward(x_NI)
        if self.few is not None and x_NI.shape[0] <= self.few_rows:
            return self.few.added(residual_NH, x_NI)
        if not self.weight.is_mkldnn:
            return torch.addmm(residual_NH, x_NI, self.weight.t())
        count = x_NI.shape[0]
        both = ONEDNN._linear_pointwise.binary
        out: Tensor = both(padded(x_NI), padded(residual_NH), self.weight, None, "add")
        return out if out.shape[0] == count else out[:count]


class Fused:
    """Linear layers of one input: one product, once they are joined for inference."""

    def __init__(self, *layers: Linear) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.joint: Linear | None = None

    def join_(self) -> Linear:
        """Make one layer of them, which has all their weights; they keep none."""
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
    """What of a model may be one product of several layers."""
    parts = [part for module in model.modules() for part in vars(module).values()]
    return [part for part in parts if isinstance(part, Fused)]


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights are supported here, and faster."""
    if device.type != "cpu" or not hasattr(ONEDNN, "_linear_pointwise"):
        return False
    return dtype in (torch.float32, torch.bfloat16) and has_products(device, dtype)


def has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it multiplies in this dtype: a processor that does not takes many times as long as
    in float32."""
    if device.type != "cpu" or dtype not in LOW:
        return True
    supported = getattr(ONEDNN, LOW[dtype], None)
    return supported is not None and bool(supported())


def pack_(model: nn.Module, lent: Iterable[Tensor] = ()) -> None:
    """Pack all weights of a model that will only be asked, never trained or saved.

    The plain ones are given up, unless others hold them too; of small models in float32 a copy
    stays for single rows, for which oneDNN takes longer to begin than to multiply.

    Args:
        lent: weights of others, which they use as they are.
    """
    kept = {weight.data_ptr() for weight in lent if not weight.is_mkldnn}
    joined = [one.join_() for one in fused(model)]
    layers = [one for one in model.modules() if isinstance(one, Linear) and one.weight.numel()]
    layers += joined
    small = sum(layer.weight.numel() for layer in layers) <= SMALL
    for layer in layers:
        weight = layer.weight.detach()
        if weight.is_mkldnn or weight.data_ptr() in kept:
            continue
        if small and weight.dtype == torch.float32:
            layer.few = OneRow(weight.t().contiguous())
            layer.few_rows = 1
        replace_(layer, "weight", ONEDNN._reorder_linear_weight(weight, None))


def settle_(model: nn.Module) -> None:
    """Let every module find its parts among its attributes: torch looks for them in three tables,
    which a model that is only asked has no use for."""
    joints = [one.joint for one in fused(model) if one.joint is not None]
    for module in (*model.modules(), *joints):
        for table in (module._modules, module._parameters, module._buffers):
            vars(module).update(table)


def replace_(module: nn.Module, name: str, weight: Tensor) -> None:
    """A weight of a module becomes another one, which may be packed: then it is no parameter."""
    delattr(module, name)
    if isinstance(weight, nn.Parameter):
        module.register_parameter(name, weight)
    else:
        module.register_buffer(name, weight, persistent=False)

"""Products with weights that are stored as oneDNN multiplies with them.

`F.linear` on a CPU is slow in float32 for the few rows of a round, and in bfloat16 brings the whole
weight into oneDNN's layout at every call. Packed once, five rows cost what one does
(docs/performance.md), and a row's sums hardly ever depend on how many rows there are."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .codes import FULL, codes_of
from .packed import Memory, PackedWeight, Product, integer_product

SMALL_MODEL = 16_000_000  # weights

ONEDNN: Any = torch.ops.mkldnn  # the operators that torch.compile makes of frozen weights
SUPPORT_CHECKS = {  # which of them say whether a processor has products in a dtype
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


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


class Linear(nn.Linear):
    """`nn.Linear` that can be packed for inference, which makes `weight` a buffer. row_IO: the
    weight as MKL multiplies a single row by it. kernel: multiplies instead of torch."""

    row_IO: Tensor | None = None
    kernel: Product | None = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, plus the residual [N, O]. Without a bias, one kernel does both."""
        bias = self.bias
        if self.kernel is not None:
            dtype = torch.float32 if x.dtype == torch.float32 else torch.float64
            wide = self.kernel.product(x, residual if bias is None else bias, dtype)
            return (wide if residual is None or bias is None else wide + residual).to(x.dtype)
        if residual is not None and bias is not None:
            return residual + self.forward(x)
        count = x.shape[0]  # `len` of a tensor is Python's, and takes longer
        if self.row_IO is not None and count <= 1:
            added = bias if residual is None else residual
            return torch.mm(x, self.row_IO) if added is None else torch.addmm(added, x, self.row_IO)
        weight = self.weight
        if not weight.is_mkldnn:
            if residual is None:
                return F.linear(x, weight, bias)
            return torch.addmm(residual, x, weight.t())
        if extra := padding(count):
            x = F.pad(x, (0, 0, 0, extra))
            residual = None if residual is None else F.pad(residual, (0, 0, 0, extra))
        out: Tensor
        if residual is None:
            out = ONEDNN._linear_pointwise(x, weight, bias, "none", [], "")
        else:
            out = ONEDNN._linear_pointwise.binary(x, residual, weight, None, "add")
        return out[:count] if extra else out


def compile_(
    model: nn.Module, kind: str, borrowed: Mapping[int, Product | None] | None = None
) -> None:
    """Let all linear layers of a model multiply by kernels, and free their plain weights but the
    head's. kind: INT8, INT4, or FULL where `can_compile`. borrowed: products of another model's
    weights, by the addresses of these."""
    memory = Memory()
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            weight = layer.weight.detach()
            layer.kernel = (borrowed or {}).get(weight.data_ptr())
            if layer.kernel is None and kind == FULL:
                layer.kernel = PackedWeight(weight, 8 * weight.itemsize, memory)
            elif layer.kernel is None:
                layer.kernel = integer_product(codes_of(name, weight, kind), memory)
            if name.rpartition(".")[2] != "lm_head":
                layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed weights are supported here, and faster."""
    if device.type != "cpu" or not hasattr(ONEDNN, "_linear_pointwise"):
        return False
    return dtype in (torch.float32, torch.bfloat16) and has_products(device, dtype)


def has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies in this dtype, and not many times as slowly as in float32."""
    if device.type != "cpu" or dtype not in SUPPORT_CHECKS:
        return True
    supported = getattr(ONEDNN, SUPPORT_CHECKS[dtype], None)
    return supported is not None and bool(supported())


def pack_(model: nn.Module, borrowed: Iterable[Tensor] = ()) -> None:
    """Pack all weights of a model that will only run forwards, but those `borrowed` from another
    model, which uses them unpacked. The plain weights are freed unless they are referenced
    elsewhere; of small models in float32 a copy stays for single rows, for which oneDNN takes
    longer to start than to multiply."""
    unpacked = {weight.data_ptr() for weight in borrowed if not weight.is_mkldnn}
    layers = [part for part in model.modules() if isinstance(part, Linear)]
    small = sum(layer.weight.numel() for layer in layers) <= SMALL_MODEL
    for layer in layers:
        weight = layer.weight.detach()
        if weight.is_mkldnn or weight.data_ptr() in unpacked:
            continue
        if small and weight.dtype == torch.float32:
            layer.row_IO = weight.t().contiguous()
        replace_(layer, "weight", ONEDNN._reorder_linear_weight(weight, None))


def replace_(module: nn.Module, name: str, weight: Tensor) -> None:
    """Replace a weight of a module; the new one may be packed: then it is not a parameter."""
    delattr(module, name)
    if isinstance(weight, nn.Parameter):
        module.register_parameter(name, weight)
    else:
        module.register_buffer(name, weight, persistent=False)

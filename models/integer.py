"""Products of int8 weights and int8 activations, with exact sums.

Each input row of a product is quantised with a scale of its own. The sums are integers, so they do
not depend on how many rows a forward has or on the order of the additions. Everything between two
products is computed in float64, whose noise almost never moves a code: a quantised model has the
same tokens in every layout, with every drafter, and in transformers (`integer_reference_`)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

MAX_CODE = 127
# Numbers from here on below the next code are rounded up. Halves are common among products of
# narrow dtypes, and noise must not decide about them.
UP_FROM = 0.5 + 2.0**-30


class IntegerWeight:
    """The int8 codes of a linear layer [O, I], a float32 scale for each output, and the product."""

    def __init__(self, codes_OI: Tensor, scale_O: Tensor) -> None:
        self.outputs, self.depth = codes_OI.shape
        self.scale_O = scale_O.double()
        compiled = compiled_kernels() if codes_OI.is_cpu else None
        self.packed: Any = None if compiled is None else compiled.PackedWeight(codes_OI, scale_O)
        self.codes_IO = codes_OI.t() if self.packed is None else None

    def product(self, x_NI: Tensor, added: Tensor | None = None) -> Tensor:
        """[N, I] -> float64 [N, O], plus a residual [N, O] or a bias [O]."""
        if self.packed is not None:
            product_NO: Tensor = self.packed.product(x_NI, added)
            return product_NO
        assert self.codes_IO is not None
        codes_NI, scale_N1 = quantised(x_NI)
        if x_NI.is_cpu:
            sums_NO = torch._int_mm(codes_NI.to(torch.int8), self.codes_IO).double()
        else:  # exact in float64
            sums_NO = codes_NI @ self.codes_IO.double()
        out_NO = sums_NO * (scale_N1 * self.scale_O)
        return out_NO if added is None else out_NO + added


def quantised(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """(codes from -127 to 127, their scale [N, 1]) of rows, both float64."""
    x_NI = x_NI.double()
    scale_N1 = x_NI.abs().amax(-1, keepdim=True) / MAX_CODE
    scale_N1 = scale_N1.masked_fill(scale_N1 == 0, 1.0)
    return (x_NI * (1.0 / scale_N1) + UP_FROM).floor(), scale_N1


def wide_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.rms_norm` in float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@cache
def compiled_kernels() -> Any:
    """The module `compiled`; None without numba, or on a processor without AVX-512 VNNI."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            supported = "avx512_vnni" in file.read()
    except OSError:
        return None
    if not supported:
        return None
    try:
        from . import compiled
    except ImportError:
        return None
    return compiled


# -- the same arithmetic in transformers' model ---------------------------------------------------


class ReferenceLinear(nn.Module):
    """A linear layer by float64 sums of integers, which are exact."""

    def __init__(self, layer: nn.Linear, codes_OI: Tensor, scale_O: Tensor) -> None:
        super().__init__()
        self.codes_IO = codes_OI.double().t()
        self.scale_O = scale_O.double()
        self.bias_O = None if layer.bias is None else layer.bias.detach().double()

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = quantised(x)
        out = codes @ self.codes_IO * (scale * self.scale_O)
        return out if self.bias_O is None else out + self.bias_O


class ReferenceNorm(nn.Module):
    """`wide_norm` with a norm's weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight.detach()
        self.eps = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return wide_norm(x, self.weight, self.eps)


def integer_reference_(
    model: Any, codes_of: Callable[[Tensor], tuple[Tensor, Tensor]], kv_dtype: torch.dtype
) -> None:
    """Give a float64 model of transformers the arithmetic of a quantised decoder whose pool has a
    dtype. codes_of: the codes and the scales of a weight, float32 [O, I]."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        k = k.to(kv_dtype).double()
        return sdpa_attention_forward(module, q, k, v.to(kv_dtype).double(), *rest, **named)

    name = f"integer_{str(kv_dtype).removeprefix('torch.')}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    for path, module in list(model.named_modules()):
        parent = model.get_submodule(path.rpartition(".")[0])
        child = path.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            codes_OI, scale_O = codes_of(module.weight.detach().float())
            setattr(parent, child, ReferenceLinear(module, codes_OI, scale_O))
        elif type(module).__name__.endswith("RMSNorm"):
            setattr(parent, child, ReferenceNorm(module))

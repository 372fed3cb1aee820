"""Products of int8 weights and int8 activations, with exact sums.

Each input row of a product is quantised with a scale of its own. The sums are integers, so they do
not depend on how many rows a forward has or on the order of the additions. Everything between two
products is computed in float64, whose noise almost never moves a code: a quantised model has the
same tokens in every layout, with every drafter, and in transformers (`integer_reference_`)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
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
        kernels = compiled_kernels() if codes_OI.is_cpu else None
        self.packed = None if kernels is None else PackedWeight(kernels, codes_OI, scale_O)
        self.codes_IO = codes_OI.t() if self.packed is None else None

    def product(self, x_NI: Tensor, added: Tensor | None = None) -> Tensor:
        """[N, I] -> float64 [N, O], plus a residual [N, O] or a bias [O]."""
        if self.packed is not None:
            return self.packed.product(x_NI, added)
        assert self.codes_IO is not None
        codes_NI, scale_N1 = quantised(x_NI)
        if x_NI.is_cpu:
            sums_NO = torch._int_mm(codes_NI.to(torch.int8), self.codes_IO).double()
        else:  # exact in float64
            sums_NO = codes_NI @ self.codes_IO.double()
        out_NO = sums_NO * (scale_N1 * self.scale_O)
        return out_NO if added is None else out_NO + added


class PackedWeight:
    """Codes [O, I] in blocks [O / 16, I / 4, 16, 4], whose inputs and outputs zeros fill up."""

    def __init__(self, kernels: Any, codes_OI: Tensor, scale_O: Tensor) -> None:
        self._multiply = kernels.multiply
        outputs, depth = codes_OI.shape
        lanes = kernels.LANES
        blocks = -(-outputs // lanes)
        fours = -(-depth // kernels.DEPTH)
        codes = np.zeros((blocks * lanes, fours * kernels.DEPTH), np.int8)
        codes[:outputs, :depth] = codes_OI.numpy()
        memory = np.empty(codes.size + 64, np.int8)
        start = -memory.ctypes.data % 64  # a block is read as vectors of 64 bytes
        ordered = codes.reshape(blocks, lanes, fours, kernels.DEPTH).transpose(0, 2, 1, 3)
        self.blocks = memory[start : start + codes.size].reshape(ordered.shape)
        self.blocks[:] = ordered
        self.shift_O = kernels.OFFSET * codes[:outputs].sum(1, dtype=np.int32)
        self.scale_O = scale_O.float().numpy().copy()
        self.depth = depth
        self.outputs = outputs

    @property
    def addresses(self) -> list[int]:
        return [array.ctypes.data for array in (self.blocks, self.shift_O, self.scale_O)]

    def product(self, x_NI: Tensor, added: Tensor | None) -> Tensor:
        """[N, I] -> float64 [N, O], plus a residual [N, O] or a bias [O]."""
        shape = (x_NI.shape[0], self.outputs)
        if added is None:
            out_NO = torch.empty(shape, dtype=torch.float64)
        else:
            out_NO = added.double().expand(shape).clone()
        x = x_NI.double().contiguous().numpy()
        self._multiply(
            x_NI=x,
            blocks=self.blocks.ctypes.data,
            shift_O=self.shift_O,
            scale_O=self.scale_O,
            out_NO=out_NO.numpy(),
            add=added is not None,
        )
        return out_NO


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
    """The module `kernels`; None without numba, or on a processor without AVX-512 VNNI."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            supported = "avx512_vnni" in file.read()
    except OSError:
        return None
    if not supported:
        return None
    try:
        from . import kernels
    except ImportError:
        return None
    return kernels


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

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **named: Any
    ) -> Any:
        k = k.to(kv_dtype).double()
        v = v.to(kv_dtype).double()
        return sdpa_attention_forward(module, q, k, v, attention_mask=attention_mask, **named)

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

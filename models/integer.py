"""Products of weights in int8 or int4 and activations in int8, with exact sums.

Each input row of a product is quantised: a scale for the row, and a step, an integer, for each
group of its numbers. The sums are integers, so they do not depend on how many rows a forward has or
on the order of the additions. Everything between two products is computed in float64, whose noise
almost never moves a code: a quantised model has the same tokens in every layout, with every
drafter, and in transformers (`load/reference.py`)."""

import torch
from torch import Tensor

from .codes import Int4, Int8, quantised

DIGIT = 128  # torch multiplies int8: larger integers are split into digits of this base


class IntegerWeight:
    """The codes of a linear layer [O, I] and its product, by torch."""

    def __init__(self, codes: Int8 | Int4) -> None:
        self.scale_O = codes.scale_O.double()
        small = isinstance(codes, Int8)
        integers_IO = (codes.codes_OI if small else codes.integers()).t()
        self.digits = [integers_IO] if small or not integers_IO.is_cpu else digits(integers_IO)

    def product(
        self, x_NI: Tensor, added: Tensor | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """As that of `packed.PackedWeight`."""
        integers_NI, scale_N1 = quantised(x_NI)
        if x_NI.is_cpu:
            sums_NO = torch.zeros((), dtype=torch.float64)
            for place, digit_NI in enumerate(digits(integers_NI.to(torch.int16))):
                for other_place, digit_IO in enumerate(self.digits):
                    factor = float(DIGIT ** (place + other_place))
                    sums_NO = sums_NO + torch._int_mm(digit_NI, digit_IO).double() * factor
        else:  # exact in float64
            sums_NO = integers_NI @ self.digits[0].double()
        out_NO: Tensor = sums_NO * (scale_N1 * self.scale_O)
        return (out_NO if added is None else out_NO + added).to(dtype)


def digits(integers: Tensor) -> list[Tensor]:
    """int16 as two int8 tensors, whose sum with the factors 1 and DIGIT it is."""
    upper = torch.div(integers, DIGIT, rounding_mode="floor")
    return [(integers - upper * DIGIT).to(torch.int8), upper.to(torch.int8)]


def wide_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.rms_norm` in float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def wide_centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.centred_norm` in float64."""
    return wide_norm(x, 1.0 + weight.double(), eps)

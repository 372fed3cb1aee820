"""The formats of weights: full, int8 and int4; and how the inputs of a product are quantised.

Both are integers, with a scale for a row, so that a sum of products is exact (`integer`)."""

from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

FULL = "full"
INT8 = "int8"
INT4 = "int4"

EXACT = ("float32", "float64")  # dtypes in which plain weights have one text in every layout

MAX_CODE = 127
GROUP = 64  # numbers of an input row that share a step
LANES = 16  # outputs of a block of packed weights
FOUR = 4  # inputs whose products one instruction adds
BYTES = 4 * LANES  # of a vector
MAX_STEP = 16  # of an input row, in units of its scale
# Numbers from here on below the next code are rounded up. Halves are common among products of
# narrow dtypes, and noise must not decide about them.
UP_FROM = 0.5 + 2.0**-30
CEILING = 1.0 - 2.0**-30  # added before `floor`: rounds up, but not the noise above an integer

INT4_GROUP = 32  # weights that share a step and an offset
INT4_STEPS = 63  # the largest step
INT4_OFFSET = 4  # unit of an offset


class Int8(NamedTuple):
    """A weight is code * scale. codes_OI: int8; scale_O: float32."""

    codes_OI: Tensor
    scale_O: Tensor

    @classmethod
    def of(cls, weight_OI: Tensor) -> Self:
        max_O = weight_OI.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
        scale_O = (max_O / MAX_CODE).bfloat16().float()
        codes_OI = (weight_OI / scale_O[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE)
        return cls(codes_OI.to(torch.int8), scale_O)

    def integers(self) -> Tensor:
        """Weights in units of the scale, int16 [O, I]."""
        return self.codes_OI.to(torch.int16)


class Int4(NamedTuple):
    """A weight is ((code - 8) * step + INT4_OFFSET * offset) * scale, with a step and an offset for
    each INT4_GROUP weights of a row. codes_OI: uint8 from 0 to 15, I rounded up to whole groups;
    steps_OG: int8 from 1 to INT4_STEPS; offsets_OG: int8; scale_O: float32; depth: I."""

    codes_OI: Tensor
    steps_OG: Tensor
    offsets_OG: Tensor
    scale_O: Tensor
    depth: int

    @classmethod
    def of(cls, weight_OI: Tensor) -> Self:
        depth = weight_OI.shape[1]
        padded_OI = F.pad(weight_OI, (0, -depth % INT4_GROUP))
        groups_OGg = padded_OI.view(len(padded_OI), -1, INT4_GROUP)
        low_OG, high_OG = groups_OGg.aminmax(dim=-1)
        span_OG = (high_OG - low_OG) / 15
        middle_OG = (low_OG + high_OG) / 2
        farthest_O = (middle_OG.abs() + span_OG / 2).amax(1) / (INT4_OFFSET * MAX_CODE)
        largest_O = torch.maximum(span_OG.amax(1) / INT4_STEPS, farthest_O)
        scale_O = largest_O.clamp(min=torch.finfo(torch.float32).tiny).bfloat16().float()
        scale_O1 = scale_O[:, None]
        steps_OG = (span_OG / scale_O1).round().clamp(1, INT4_STEPS)
        offsets_OG = (middle_OG / scale_O1 + steps_OG / 2) / INT4_OFFSET
        offsets_OG = offsets_OG.round().clamp(-MAX_CODE, MAX_CODE)
        zero_OG1 = (INT4_OFFSET * offsets_OG)[..., None]
        codes_OGg = (groups_OGg / scale_O1[..., None] - zero_OG1) / steps_OG[..., None] + 8
        codes_OI = codes_OGg.round().clamp(0, 15).flatten(1).to(torch.uint8)
        offsets_OG = offsets_OG.to(torch.int8)
        return cls(codes_OI, steps_OG.to(torch.int8), offsets_OG, scale_O, depth=depth)

    def integers(self) -> Tensor:
        """Weights in units of the scale, int16 [O, I]."""
        codes_OGg = self.codes_OI.to(torch.int16).view(*self.steps_OG.shape, INT4_GROUP) - 8
        zero_OG = INT4_OFFSET * self.offsets_OG.to(torch.int16)
        whole_OGg = codes_OGg * self.steps_OG[..., None] + zero_OG[..., None]
        return whole_OGg.flatten(1)[:, : self.depth]


def is_exact(dtype: str, weights: str) -> bool:
    """Whether a target has the same tokens in every layout, and in transformers."""
    return dtype in EXACT or weights != FULL


def codes_of(name: str, weight_OI: Tensor, kind: str) -> Int8 | Int4:
    """The codes of a linear layer, INT8 or INT4; a head always has INT8."""
    form = Int8 if kind == INT8 or name.rpartition(".")[2] == "lm_head" else Int4
    return form.of(weight_OI.detach().float())


def quantised(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """(integers, their scale [N, 1]) of rows, both float64: codes from -127 to 127, times the step
    of their group, from 1 to MAX_STEP."""
    x_NI = x_NI.double()
    rows, depth = x_NI.shape
    groups = -(-depth // GROUP)
    groups_NGg = F.pad(x_NI, (0, -depth % GROUP)).view(rows, groups, GROUP)
    largest_NG = groups_NGg.abs().amax(-1)
    largest_N1 = largest_NG.amax(-1, keepdim=True)
    largest_N1 = largest_N1.masked_fill(largest_N1 == 0, 1.0)
    scale_N1 = largest_N1 / (MAX_CODE * MAX_STEP)
    steps_NG = (largest_NG * (MAX_STEP / largest_N1) + CEILING).floor().clamp(min=1.0)
    inverse_NG = 1.0 / (scale_N1 * steps_NG)
    codes_NGg = (groups_NGg * inverse_NG[..., None] + UP_FROM).floor()
    return (codes_NGg * steps_NG[..., None]).flatten(1)[:, :depth], scale_N1


CPU = Path("/proc/cpuinfo")  # of Linux alone
FLAGS = set(CPU.read_text("ascii", "replace").split() if CPU.exists() else ())
INSTRUCTIONS = {4: "avx512_vnni", 8: "avx512_vnni", 16: "avx512_bf16", 32: "avx512f"}
SUPPORTED = frozenset(bits for bits, name in INSTRUCTIONS.items() if name in FLAGS)
"""Bits of weights that this processor can multiply by compiled kernels; 16 is bfloat16."""

"""Weights as the compiled `kernels` multiply them, and whether this processor can.

A row's sums are exact (codes), or are added in one order (floats): they do not depend on how many
rows a product has."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .codes import Int4, Int8

INSTRUCTIONS = {4: "avx512_vnni", 8: "avx512_vnni", 16: "avx512_bf16", 32: "avx512f"}
"""What the products of a weight's bits need; 16 is bfloat16, 32 float32."""


@cache
def supported(bits: int) -> bool:
    """Whether this processor has the instructions for weights of so many bits."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return INSTRUCTIONS[bits] in file.read().split()
    except OSError:
        return False


@cache
def compiled_kernels(bits: int) -> Any:
    """The module `kernels`; None without numba, or without the instructions for these weights."""
    if not supported(bits):
        return None
    try:
        from . import kernels
    except ImportError:
        return None
    return kernels


class PackedWeight:
    """Weights as `kernels` multiplies them: codes, or float32 or bfloat16 [O, I]; their product."""

    def __init__(self, weight: Int8 | Int4 | Tensor, bits: int) -> None:
        kernels = compiled_kernels(bits)
        self._multiply = kernels.multiply
        self.bits = bits
        if isinstance(weight, Tensor):
            self.scale_O = np.ones(len(weight), np.float32)
            numbers = weight if bits == 32 else weight.view(torch.int16)
            self.blocks = kernels.pack_floats(numbers.numpy())
            return
        self.scale_O = weight.scale_O.numpy().copy()
        pack = kernels.pack_int8 if isinstance(weight, Int8) else kernels.pack_int4
        self.blocks = pack(*(tensor.numpy() for tensor in weight if isinstance(tensor, Tensor)))

    @property
    def fields(self) -> list[int]:
        """What `kernels.linear` takes: addresses of blocks and scales, and the bits of a weight."""
        return [self.blocks.ctypes.data, self.scale_O.ctypes.data, self.bits]

    def product(
        self, x_NI: Tensor, added: Tensor | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """[N, I] -> [N, O] in float64 or float32, plus a residual [N, O] or a bias [O]."""
        shape = (x_NI.shape[0], self.scale_O.size)
        if added is None:
            out_NO = torch.empty(shape, dtype=dtype)
        else:
            out_NO = added.to(dtype).expand(shape).clone()
        self._multiply(
            x_NI=x_NI.double().contiguous().numpy(),
            blocks=self.blocks.ctypes.data,
            scale_O=self.scale_O,
            bits=self.bits,
            out_NO=out_NO.numpy(),
            add=added is not None,
        )
        return out_NO

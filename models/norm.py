"""Root-mean-square normalisation, in float32 for every narrower dtype, as in transformers."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension."""
    if x.dtype == torch.float32 and not x.is_cpu:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return normed(x, eps) * weight


def normed(x: Tensor, eps: float) -> Tensor:
    """The same without a weight; on a CPU by one kernel for the sum of squares, where the usual way
    takes three."""
    kind = x.dtype
    if x.is_cpu and kind != torch.float64:
        norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        scale = torch.addcmul(_number(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return x * scale if kind == torch.float32 else (x * scale).to(kind)
    if kind == torch.float32:
        return F.rms_norm(x, x.shape[-1:], None, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(kind)


@cache
def _number(value: float) -> Tensor:
    with torch.inference_mode(False):  # training may ask for the same one
        return torch.tensor(value, dtype=torch.float32)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

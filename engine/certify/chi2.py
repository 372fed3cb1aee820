"""Pearson's chi-square test: whether counts fit the law that they should have."""

import torch
from torch import Tensor

ALPHA = 1e-6
"""A correct rule has a smaller p-value once in a million changes of the seed."""
FEWEST = 5.0  # expected samples in a cell; rarer ones are counted together


def chi_square(seen_X: Tensor, expected_X: Tensor) -> tuple[float, int]:
    """(statistic, degrees of freedom) of counts; infinite if the impossible was seen.

    Cells with fewer than `FEWEST` expected samples are counted together, with the next larger
    ones if they are still too few.
    """
    possible_X = expected_X > 0
    if (seen_X[~possible_X] > 0).any():
        return float("inf"), int(possible_X.sum().item()) - 1
    expected_C, order_C = expected_X[possible_X].sort()
    seen_C = seen_X[possible_X][order_C]
    rare = int((expected_C < FEWEST).sum().item())
    if rare:
        rare = max(rare, int((expected_C.cumsum(0) < FEWEST).sum().item()) + 1)
        seen_C = torch.cat([seen_C[:rare].sum(0, keepdim=True), seen_C[rare:]])
        expected_C = torch.cat([expected_C[:rare].sum(0, keepdim=True), expected_C[rare:]])
    return ((seen_C - expected_C) ** 2 / expected_C).sum().item(), len(expected_C) - 1


def p_value(statistic: float, df: int) -> float:
    """With what probability chi-square with so many degrees of freedom is larger."""
    half = torch.tensor([df / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))

"""The chi-square test itself."""

import pytest
import torch

from specsot.engine.certify.texts import chi_square, p_value

CRITICAL = {
    3: (16.27, 21.11, 30.66, 44.84),
    7: (24.32, 29.88, 40.52, 55.87),
    15: (37.70, 44.26, 56.49, 73.63),
    63: (103.4, 113.5, 131.4, 155.1),
    255: (330.5, 347.7, 377.1, 414.6),
}
"""Degrees of freedom -> what is exceeded with probability 1e-3, 1e-4, 1e-6 and 1e-9."""


@pytest.mark.parametrize("df", CRITICAL)
def test_p_values(df: int) -> None:
    for alpha, statistic in zip((1e-3, 1e-4, 1e-6, 1e-9), CRITICAL[df], strict=True):
        assert p_value(statistic, df) == pytest.approx(alpha, rel=0.02)
    assert p_value(0.0, df) == 1 and p_value(float("inf"), df) == 0


def test_cells_that_are_rarely_met_are_counted_together() -> None:
    expected_X = torch.tensor([40.0, 3.0, 50.0, 1.0, 6.0, 0.0], dtype=torch.float64)
    seen_X = torch.tensor([44.0, 1.0, 48.0, 0.0, 7.0, 0.0], dtype=torch.float64)
    statistic, df = chi_square(seen_X, expected_X)  # 1 + 3 are too few still, so the 6 joins them
    assert df == 2
    assert statistic == pytest.approx(4**2 / 40 + 2**2 / 50 + 2**2 / 10)


def test_what_is_impossible_and_seen_fails() -> None:
    seen_X, expected_X = torch.tensor([99.0, 1.0]), torch.tensor([100.0, 0.0])
    assert chi_square(seen_X, expected_X)[0] == float("inf")

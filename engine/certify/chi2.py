"""Chi-square tests of what is emitted with real coins, over several rounds.

Pearson's test against the exact law of the target's first tokens: alone, in pairs, and as long as
a round can be and one token more, so that a coin used in two rounds shows. At alpha 1e-6 a correct
rule fails once in a million changes of the seed, and 20,000 samples show every wrong algorithm
that is known (tests/engine/test_certify_chi2.py plants them).
"""

import torch
from torch import Tensor

from ...ops.sampling.coins import round_keys
from .judged import judged_rounds
from .rounds import GAMMA, Keys, Step, rounds, sample
from .toys import Check, Toy, joint, leftover_toy, reference_toy

ALPHA = 1e-6
SAMPLES = 20_000
SEED = 2026
LENGTHS = (1, 2, GAMMA + 2)
FEWEST = 5.0  # expected samples in a cell; rarer ones are counted together


def chi2_tests(samples: int = SAMPLES, seed: int = SEED) -> list[Check]:
    """Every way of accepting, on two toys."""
    return [
        check
        for title, toy in toys().items()
        for name, step in (rounds() | judged_rounds()).items()
        for check in chi2_checks(f"{name}, {title}", step, toy, samples=samples, seed=seed)
    ]


def toys() -> dict[str, Toy]:
    """The toys whose laws are tested, by name."""
    return {"reversed toy": reference_toy(), "leftover toy": leftover_toy()}


def chi2_checks(
    name: str,
    step: Step,
    toy: Toy,
    *,
    samples: int = SAMPLES,
    seed: int = SEED,
    keys: Keys = round_keys,
) -> list[Check]:
    """One finding per length of the beginning that is looked at."""
    said_SC = sample(step, toy, max(LENGTHS), samples, seed, keys)
    return [_check(name, said_SC[:, :length], toy) for length in LENGTHS]


def _check(name: str, said_SC: Tensor, toy: Toy) -> Check:
    samples, length = said_SC.shape
    powers_C = toy.size ** torch.arange(length - 1, -1, -1)
    seen_X = torch.bincount((said_SC * powers_C).sum(1), minlength=toy.size**length)
    statistic, df = chi_square(seen_X.double(), samples * joint(toy.p_KV, length))
    critical = chi2_quantile(df, ALPHA)
    what = "first token" if length == 1 else f"first {length} tokens"
    figures = {
        "statistic": statistic,
        "critical": critical,
        "df": df,
        "samples": samples,
        "alpha": ALPHA,
    }
    text = f"{name}, {what}: chi2 {statistic:.1f}, critical {critical:.1f} (df {df}, N {samples})"
    return Check(f"chi2/{name}/{length}", statistic <= critical, figures, text)


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


def chi2_quantile(df: int, alpha: float) -> float:
    """What chi-square with so many degrees of freedom exceeds with probability alpha."""
    half = torch.tensor(df / 2, dtype=torch.float64)
    low, high = 0.0, 40.0 * df + 400.0
    for _ in range(100):
        middle = (low + high) / 2
        beyond = torch.special.gammaincc(half, torch.tensor(middle / 2, dtype=torch.float64))
        low, high = (middle, high) if beyond.item() > alpha else (low, middle)
    return high

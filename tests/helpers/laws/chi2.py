"""Chi-square tests of what is emitted with real coins, over several rounds.

Pearson's test against the exact law of the target's first tokens: alone, in pairs, and as long as
a round can be and one token more, so that a coin used in two rounds shows. At `ALPHA` a correct
rule fails once in a million changes of the seed, and 20,000 samples show every wrong algorithm
that is known (tests/laws/test_chi2_laws.py plants them).
"""

import torch
from torch import Tensor

from specsot.engine.certify.drawn import chi_square, p_value
from specsot.ops.sampling.coins import round_keys

from .rounds import GAMMA, Keys, Step, sample
from .toys import Toy, joint, leftover_toy, reference_toy

SAMPLES = 20_000
SEED = 2026
LENGTHS = (1, 2, GAMMA + 2)
TOYS = {"reversed toy": reference_toy(), "leftover toy": leftover_toy()}


def p_values(
    step: Step, toy: Toy, *, samples: int = SAMPLES, seed: int = SEED, keys: Keys = round_keys
) -> list[float]:
    """Of what a way of accepting says, one per length of the beginning that is looked at."""
    said_SC = sample(step, toy, max(LENGTHS), samples, seed, keys)
    return [_p_value(said_SC[:, :length], toy) for length in LENGTHS]


def _p_value(said_SC: Tensor, toy: Toy) -> float:
    samples, length = said_SC.shape
    powers_C = toy.size ** torch.arange(length - 1, -1, -1)
    seen_X = torch.bincount((said_SC * powers_C).sum(1), minlength=toy.size**length)
    return p_value(*chi_square(seen_X.double(), samples * joint(toy.p_KV, length)))

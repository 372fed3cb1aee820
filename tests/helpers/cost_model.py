"""What a chain of drafts is worth if each draft is accepted independently (Leviathan et al.).

alpha: probability that a draft is accepted, below 1. cost: time of one drafter forward divided by
that of one target forward. gamma: drafts per round. From "Fast inference from transformers via
speculative decoding" (2211.17192), sections 3.3 to 3.5.
"""

MOST_GAMMA = 32


def mean_emitted(alpha: float, gamma: int) -> float:
    """Tokens per round, the target's own included."""
    return sum(alpha**accepted for accepted in range(gamma + 1))


def acceptance_rate(alpha: float, gamma: int) -> float:
    """Accepted drafts per draft offered: below alpha, for nothing follows a rejected draft."""
    return (mean_emitted(alpha, gamma) - 1) / gamma if gamma else 0.0


def speedup(alpha: float, cost: float, gamma: int) -> float:
    """Tokens per time, plain decoding being 1: a round costs gamma drafts and one verification."""
    return mean_emitted(alpha, gamma) / (gamma * cost + 1)


def best_gamma(alpha: float, cost: float, most: int = MOST_GAMMA) -> int:
    """The gamma with the highest speed-up; 0 means that plain decoding is fastest."""
    return max(range(most + 1), key=lambda gamma: speedup(alpha, cost, gamma))

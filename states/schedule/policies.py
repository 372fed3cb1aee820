"""Policies: how those who wait are ranked. A policy is a function of host integers.

A request is ranked once, when it arrives, so that a step costs the same however many wait; the
waiting branches of open requests are ranked anew in every step. A smaller rank starts earlier.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Rank = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A branch or a request that waits.

    arrival: number of its request in the order of submission; step: number of the step before
        which it was submitted.
    is_open: its request has begun, so this is one of its branches.
    place: among the waiting branches of its request, as `layout.order` has them.
    prompt: tokens to be read; left: tokens that its whole request may still write.
    """

    arrival: int
    step: int
    is_open: bool
    place: int
    prompt: int
    left: int


@dataclass(frozen=True, slots=True)
class Policy:
    """rank: whose turn comes first. overtakes: whether others may start where one does not fit."""

    rank: Callable[[Candidate], Rank]
    overtakes: bool = False


def fcfs(one: Candidate) -> Rank:
    """First come, first served; the branches of a request stand where the request stood."""
    return (one.arrival, one.place)


POLICIES: Mapping[str, Policy] = {"fcfs": Policy(fcfs)}

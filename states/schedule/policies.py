"""Policies: how those who wait are ranked. A policy is a function of host integers.

A request is ranked once, when it arrives, so that a step costs the same however many wait; the
waiting branches of open requests are ranked anew in every step. A smaller rank starts earlier.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Rank = tuple[int, ...]

AGEING = 1  # tokens of work that a step of waiting is worth
READING = 16  # tokens that are read in the time in which one is written


@dataclass(frozen=True, slots=True)
class Candidate:
    """A branch or a request that waits.

    arrival: number of its request in the order of submission; step: number of the step that first
        looked at it.
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


def max_throughput(one: Candidate) -> Rank:
    """Whoever is done soonest: few tokens left to write and read.

    All age alike, so a later arrival is as good as an earlier one that has more work by `AGEING`
    tokens a step, and nobody starves.
    """
    return (one.left + one.prompt // READING + AGEING * one.step, one.arrival, one.place)


def sot_priority(one: Candidate) -> Rank:
    """Branches before new requests: an answer that has begun is brought to its end. All branches of
    the request that is closest to it start together, then those of the next; requests as they came.

    Open requests are few and come to an end, so nobody starves.
    """
    if not one.is_open:
        return (1, one.arrival, one.place)
    return (0, one.left, one.arrival, one.place)


POLICIES: Mapping[str, Policy] = {
    "fcfs": Policy(fcfs),
    "max_throughput": Policy(max_throughput, overtakes=True),
    "sot_priority": Policy(sot_priority, overtakes=True),
}

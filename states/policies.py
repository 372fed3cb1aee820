"""Policies: how those who wait are ranked. A policy is a function of host integers.

A request is ranked once, when it arrives, so that a step costs the same however many wait; the
waiting branches of open requests are ranked anew in every step. A smaller rank starts earlier.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..ops.registry import RegistryError
from .graph.plugins import POLICIES as GROUP
from .graph.plugins import installed, title_of

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
    prompt: tokens to be read; left: tokens that its whole request may still write; own: that it may
        write itself.
    """

    arrival: int
    step: int
    is_open: bool
    place: int
    prompt: int
    left: int
    own: int


@dataclass(frozen=True, slots=True)
class Policy:
    """rank: whose turn comes first. overtakes: whether others may start where one does not fit.

    fair: nobody starves by these ranks. Else every `max_wait` steps whoever has waited longest has
        a turn, whatever its rank.
    """

    rank: Callable[[Candidate], Rank]
    overtakes: bool = False
    fair: bool = False


def fcfs(one: Candidate) -> Rank:
    """First come, first served; the branches of a request stand where the request stood."""
    return (one.arrival, one.place)


def max_throughput(one: Candidate) -> Rank:
    """Whoever is done soonest: few tokens left to write and read, of a branch its own.

    All age alike, so a later arrival is as good as an earlier one that has more work by `AGEING`
    tokens a step, and nobody starves.
    """
    return (one.own + one.prompt // READING + AGEING * one.step, one.arrival, one.place)


def sot_priority(one: Candidate) -> Rank:
    """Branches before new requests: an answer that has begun is brought to its end. All branches of
    the request that is closest to it start together, then those of the next; requests as they came.

    Open requests are few and come to an end, so nobody starves.
    """
    if not one.is_open:
        return (1, one.arrival, one.place)
    return (0, one.left, one.arrival, one.place)


class PolicyError(RuntimeError):
    """A policy failed: nobody can say who starts."""


def find_policy(name: str) -> Policy:
    """The policy of a name, specsot's or an installed package's.

    Raises:
        PolicyError: there is none, or it cannot be used; says which package has it.
    """
    if name in POLICIES:
        return POLICIES[name]
    try:
        for point, found in installed(GROUP, name):
            if not isinstance(found, Policy):
                raise RegistryError(f"{title_of(point)}: {point.value} is no Policy")
            return replace(found, rank=_checked(found.rank))
    except RegistryError as error:
        raise PolicyError(f"scheduler.policy {name!r}: {error}") from error
    raise PolicyError(f"scheduler.policy {name!r}: no installed package has it")


def _checked(rank: Callable[[Candidate], Rank]) -> Callable[[Candidate], Rank]:
    """Somebody else's rank, which must be one: anything else could not be compared."""

    def ranked(one: Candidate) -> Rank:
        found = rank(one)
        if not (isinstance(found, tuple) and all(isinstance(part, int) for part in found)):
            raise TypeError(f"a rank is a tuple of integers, not {found!r}")
        return found

    return ranked


POLICIES: Mapping[str, Policy] = {
    "fcfs": Policy(fcfs, fair=True),
    "max_throughput": Policy(max_throughput, overtakes=True, fair=True),
    "sot_priority": Policy(sot_priority, overtakes=True, fair=True),
}

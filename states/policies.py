"""Scheduler policies: functions of host integers that rank waiting requests and branches.

A request is ranked once, when it arrives, so the cost of a step does not grow with the queue.
Waiting branches of open requests are ranked in every step. A smaller rank starts earlier."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..ops.registry import RegistryError
from .graph.plugins import POLICIES_GROUP, installed, title_of

Rank = tuple[int, ...]

AGEING = 1  # tokens of work that one step of waiting is worth
PREFILL_SPEED = 16  # prompt tokens that are prefilled in the time of one decoded token


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting branch or request.

    arrival: number of its request in the order of submission. step: the first one that considered
    it. is_open: its request has started, so this is one of its branches; place: among these, in the
    order of `layout.order`. prompt: tokens to prefill; request_tokens, own_tokens: tokens that its
    request, and it alone, may still decode."""

    arrival: int
    step: int
    is_open: bool
    place: int
    prompt: int
    request_tokens: int
    own_tokens: int


@dataclass(frozen=True, slots=True)
class Policy:
    """A rank function and its properties.

    overtakes: later candidates may start when an earlier one does not fit.
    fair: every candidate starts in the end by its rank alone. Otherwise the oldest waiting request
        starts every `max_wait` steps, whatever its rank."""

    rank: Callable[[Candidate], Rank]
    overtakes: bool = False
    fair: bool = False


def fcfs(candidate: Candidate) -> Rank:
    """First come, first served; branches have the rank of their request."""
    return (candidate.arrival, candidate.place)


def max_throughput(candidate: Candidate) -> Rank:
    """Shortest remaining work first: tokens to decode and to prefill. A later arrival overtakes an
    earlier one only if it has less work by `AGEING` tokens per step between them."""
    work = candidate.own_tokens + candidate.prompt // PREFILL_SPEED
    return (work + AGEING * candidate.step, candidate.arrival, candidate.place)


def sot_priority(candidate: Candidate) -> Rank:
    """Branches before new requests, those of the request closest to its end first."""
    if not candidate.is_open:
        return (1, candidate.arrival, candidate.place)
    return (0, candidate.request_tokens, candidate.arrival, candidate.place)


class PolicyError(RuntimeError):
    """A scheduler policy is missing, is not usable, or failed."""


def find_policy(name: str) -> Policy:
    """The policy with this name, built in or from an installed package; PolicyError if unusable."""
    if name in POLICIES:
        return POLICIES[name]
    try:
        for point, policy in installed(POLICIES_GROUP, name):
            if not isinstance(policy, Policy):
                raise RegistryError(f"{title_of(point)}: {point.value} is not a Policy")
            return policy
    except RegistryError as error:
        raise PolicyError(f"scheduler.policy {name!r}: {error}") from error
    raise PolicyError(f"scheduler.policy {name!r}: no installed package has it")


POLICIES: Mapping[str, Policy] = {
    "fcfs": Policy(fcfs, fair=True),
    "max_throughput": Policy(max_throughput, overtakes=True, fair=True),
    "sot_priority": Policy(sot_priority, overtakes=True, fair=True),
}

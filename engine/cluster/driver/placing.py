"""Which worker of a driver decodes which branch."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ....states.request import Branch
from .placement import NOBODY, place_branches

Worker = TypeVar("Worker")


def expected_length(branch: Branch) -> int:
    """Tokens that a branch is expected to write still: as the outline says, else its budget."""
    whole = branch.point.length if branch.point is not None else branch.budget
    return max(min(whole, branch.budget) - len(branch.tokens), 1)


def placed(
    branches: Sequence[Branch],
    loads: Mapping[Worker, int],
    room: Mapping[Worker, int],
    holders: Collection[Worker],
) -> list[tuple[Branch, Worker]]:
    """Branches with their workers; those that no worker has room for wait.

    Of workers with equally much to do the one is taken that has the prefix already.

    Args:
        loads: tokens that each worker has to write; room: branches that it can take.
    """
    workers = sorted(loads, key=lambda one: one not in holders)
    if not workers:
        return []
    waits = {number: loads[one] for number, one in enumerate(workers)}
    free = {number: max(room[one], 0) for number, one in enumerate(workers)}
    found = place_branches([expected_length(one) for one in branches], waits, free)
    return [(one, workers[at]) for one, at in zip(branches, found, strict=True) if at != NOBODY]

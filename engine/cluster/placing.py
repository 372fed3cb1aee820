"""Which worker decodes which branch: the longest first, each where least is to be done."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ...states.requests.branch import Branch

Worker = TypeVar("Worker")


def expected_length(branch: Branch) -> float:
    """Tokens that a branch is expected to write still: as the outline says, else its budget."""
    whole = branch.point.length if branch.point is not None else branch.budget
    return max(min(whole, branch.budget) - len(branch.tokens), 1)


def placed(
    branches: Sequence[Branch],
    loads: Mapping[Worker, float],
    room: Mapping[Worker, int],
    holders: Collection[Worker],
) -> list[tuple[Branch, Worker]]:
    """Branches with their workers; those that no worker has room for wait.

    Of workers with equally much to do the one is taken that has the prefix already.

    Args:
        loads: tokens that each worker has to write; room: branches that it can take.
    """
    loads, room = dict(loads), dict(room)
    chosen = []
    for branch in sorted(branches, key=expected_length, reverse=True):
        free = [one for one in loads if room[one] > 0]
        if not free:
            break
        best = min(free, key=lambda one: (loads[one], one not in holders))
        loads[best] += expected_length(branch)
        room[best] -= 1
        chosen.append((branch, best))
    return chosen

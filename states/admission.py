"""Who may start: arithmetic over slots, done before any work.

A branch reserves its prompt and its whole budget, and each round needs room for all trees, so
that an admitted branch can always run to its end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..ops.eagle import nodes_for
from .branches import Branch, Request, Stage

BRANCH_PROMPT = 64  # slots kept free for the prompt of a request's first branch, before it is known


@dataclass(frozen=True, slots=True)
class Room:
    """The target pool's capacity and what a round's trees take of it.

    nodes: drafted tokens per branch (0 without a drafter), or by number of active branches.
    """

    capacity: int
    max_active: int
    nodes: int | Mapping[int, int]

    def tree_slots(self, active: int) -> int:
        """Slots for the trees of a round while up to `active` branches run."""
        counts = range(1, max(active, 1) + 1)
        return max(count * (nodes_for(self.nodes, count) + 1) for count in counts)

    def alone(self, prefix: int, prompt: int, budget: int) -> int:
        """Slots that one branch needs if nothing else runs."""
        return prefix + prompt + budget + self.tree_slots(1)


def held(requests: Iterable[Request]) -> int:
    """Slots that open requests hold or have reserved, trees not counted."""
    return sum(_held(r) for r in requests if r.stage in (Stage.OUTLINE, Stage.RUNNING))


def _held(request: Request) -> int:
    branches = list(request.all_branches())
    live = sum(len(b.prompt) + b.budget for b in branches if b.stage is Stage.RUNNING)
    waits = any(b.stage is Stage.WAITING for b in request.branches)
    first = request.budget + BRANCH_PROMPT if _outlines(request) or (waits and not live) else 0
    return request.prefix_length + len(request.hoist) + live + first


def _outlines(request: Request) -> bool:
    return request.root is not None and request.stage is Stage.OUTLINE


def request_slots(request: Request) -> int:
    """Slots that a waiting request reserves: prompt, outline, and its first branch."""
    own = len(request.prefix) + len(request.tail) + len(request.given_ids)
    later = request.outline_budget + BRANCH_PROMPT if request.outline_budget else 0
    return own + later + request.budget


def ready(branch: Branch) -> bool:
    """Waiting with its prompt known: all it depends on is finished."""
    return branch.stage is Stage.WAITING and bool(branch.prompt)


def choose(requests: list[Request], active: int, room: Room) -> tuple[list[Branch], list[Request]]:
    """Waiting branches and requests that can start now, first come first served.

    The first one that does not fit ends the search, so that nobody is overtaken for ever; while
    nothing runs, others may start in its place, for only their rows can be in its way.
    """
    branches: list[Branch] = []
    opened: list[Request] = []
    used = held(requests)
    for request in requests:
        reserved = 0 if _live(request) else request.budget + BRANCH_PROMPT
        for item in _waiting(request):
            count = active + len(branches) + len(opened) + 1
            needed = used + (
                len(item.prompt) + item.budget - reserved
                if isinstance(item, Branch)
                else request_slots(item)
            )
            if count > room.max_active or needed + room.tree_slots(count) > room.capacity:
                if count > 1:
                    return branches, opened
                continue
            used = needed
            if isinstance(item, Branch):
                branches.append(item)
                reserved = 0
            else:
                opened.append(item)
    return branches, opened


def _live(request: Request) -> bool:
    return any(b.stage is Stage.RUNNING for b in request.branches)


def _waiting(request: Request) -> list[Branch | Request]:
    if request.stage is Stage.WAITING:
        return [request]
    return [b for b in request.branches if ready(b)]

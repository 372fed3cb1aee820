"""Who has to make way: rows are kept as long as nobody needs their room, the text goes on later.

A preempted branch keeps all that it has written, and its grammar's state. When it goes on, what is
gone of its rows is read again, in one forward like a prompt; its next token is known already. Coins
are keyed by position, so the text is the same as if nothing had happened.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...ops.kv.pool import KVCache
from ...ops.kv.slots import NOBODY
from ..requests.branch import Branch, Request, Stage
from ..requests.folding import FoldState
from ..requests.lifecycles import move
from ..requests.request_table import RequestTable
from .keeper import Keeper
from .lifecycle import Lifecycle


@dataclass(eq=False, slots=True)
class Preemption:
    """Takes rows from branches and requests that run, and what they wait for from those that wait.

    Attributes:
        count: how many branches were preempted, and requests with all they had.
    """

    table: RequestTable
    pools: Sequence[KVCache]
    lifecycle: Lifecycle
    fold: FoldState | None
    keeper: Keeper | None
    count: int = 0

    def preempt_(self, whom: Branch | Request) -> None:
        """A branch makes way, or a request with its prefix and all branches that run."""
        self.count += 1
        if isinstance(whom, Branch):
            self._branch_(whom)
        else:
            self._request_(whom)

    def reclaim_(self, rows: int) -> None:
        """Idle rows make way until so many slots of the target's pool are free, or none is idle."""
        if self.keeper is not None:
            cache = self.keeper.cache
            cache.make_room_(cache.idle - max(rows - self._free, 0))

    @property
    def needed(self) -> int:
        """Slots of the target's pool that are in use, but for idle ones."""
        return self.pools[0].needed_length

    def recall_(self) -> bool:
        """Those who wait give back the kept rows that they were to go on behind; whether they had
        any."""
        return self.keeper is not None and self.keeper.recall_()

    @property
    def _free(self) -> int:
        return self.pools[0].slots - self.pools[0].current_length

    def _branch_(self, branch: Branch) -> None:
        self.table.active.remove(branch)
        if self.keeper is not None:
            self.keeper.set_aside_(branch)
        else:
            for pool in self.pools:
                pool.retire_([branch.owner])
        self.table.segments.hang(branch.owner, branch.request.prefix_owner)
        self.lifecycle.leave_([branch.owner])
        if self.fold is not None:
            self.fold.set_aside_(branch)
        move("branch", branch, "preempt")
        branch.length = branch.start
        branch.preempted += 1

    def _request_(self, request: Request) -> None:
        running = [one for one in request.all_branches() if one.stage is Stage.RUNNING]
        waiting = [one for one in request.branches if one.waits and one.prompt]
        for branch in running:
            self._branch_(branch)
        if self.keeper is not None:
            self.keeper.close_(request)
        owner = request.prefix_owner
        for pool in self.pools:
            pool.retire_([owner])
        self.table.segments.hang(owner, NOBODY)
        self.lifecycle.leave_([owner])
        request.first = next(iter((*running, *waiting)), None)
        request.shared = request.prefix_length = 0
        move("request", request, "preempt")
        self.table.requeue(request)

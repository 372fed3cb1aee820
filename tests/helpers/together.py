"""Two workers in threads that write outlines together, with orders by hand; moments of runs."""

from time import monotonic

from helpers.clusters import BEES, session_of
from helpers.thread_hosts import ThreadWorkers
from specsot.engine.events import Committed
from specsot.engine.prepare.options import ClusterBlock, GroupSize
from specsot.engine.workers.director import Director
from specsot.engine.workers.protocol import Assign, BranchEnded, Reply
from specsot.engine.workers.worker_groups import RunWorker, WorkerGroups
from specsot.engine.workers.worker_loop import TensorParallelEngine
from specsot.states.machine import Run
from specsot.states.request import MigratedRequest


def outline_begun(director: Director, run: Run) -> bool:
    roots = (one.request.root for one in director.states)
    return any(root is not None and not root.ended and root.tokens for root in roots)


def mid_branch(director: Director, run: Run) -> bool:
    branches = (b for one in director.states for b in one.request.branches)
    return any(len(b.tokens) > 4 and not b.ended for b in branches)


def last(director: Director) -> RunWorker:
    """The worker that was ready last; of several that compute together never the first."""
    return director.workers.ready[-1]


class Together:
    """Both write outlines, and each decodes branches."""

    def __init__(self, graph: str) -> None:
        self.hosts = ThreadWorkers(session_of(graph, packed=False))
        block = ClusterBlock(workers=2, deadline=20.0, skeleton=GroupSize(tp=2))
        self.workers = WorkerGroups(self.hosts.source, block, lambda record: None)
        self.workers.load_()
        self._works, self._written = 0, list[int]()

    def outlined(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """In a new group both write an outline, its end alone if they have before; ids of what they
        keep of it, and its rows."""
        self.workers.form_(lambda member, reply: None)
        self._works += 1
        self._written = self._written[:-2]
        handed = MigratedRequest(outline=tuple(self._written))
        self.workers.send_all(Assign(f"{self._works}", BEES, handed, 2, 0))
        (ended,) = self.until(BranchEnded, 1)
        assert isinstance(ended, BranchEnded) and ended.rows
        cache = self._team(0, 2).manager.prefixes
        assert cache is not None
        kept = max(cache.nodes.values(), key=lambda one: one.end)
        path = cache.segments.path(kept.segment)[::-1]
        ids = [token for one in path for token in cache.nodes[one].tokens.tolist()]
        return tuple(ids[: ended.rows[0]]), ended.rows

    def forget(self) -> None:
        """Neither keeps what it has for its branches, so that both want it again."""
        for worker in range(2):
            cache = self._team(worker, 1).manager.prefixes
            assert cache is not None
            cache.evict_to_(0)
            cache.check_integrity()

    def until(self, kind: type[Reply], count: int) -> list[Reply]:
        """What is said next, of one kind."""
        found: list[Reply] = []
        until = monotonic() + 60

        def took(member: RunWorker, reply: Reply) -> None:
            if isinstance(reply, kind):
                found.append(reply)
            elif isinstance(reply, Committed):
                self._written += reply.tokens

        while len(found) < count and monotonic() < until:
            self.workers.receive_(took)
        assert len(found) == count
        return found

    def weights(self) -> list[tuple[int, ...]]:
        """Where all weights lie that each of them computes with: its own, and those of a rank."""
        teams = [self._team(worker, tp) for worker in range(2) for tp in (1, 2)]
        models = [one.session.models.target for one in teams]
        return [tuple(w.data_ptr() for w in model.parameters()) for model in models]

    def _team(self, worker: int, tp: int) -> TensorParallelEngine:
        return self.hosts.loop(worker).engines[tp]

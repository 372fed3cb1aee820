"""Two workers in threads with orders by hand; moments of runs, and the workers that have something
at them."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import monotonic

from helpers.clusters import BEES, session_of
from helpers.thread_hosts import ThreadWorkers
from specsot.engine.prepare.options import ClusterBlock, GroupSize
from specsot.engine.workers.director import Director
from specsot.engine.workers.protocol import Assign, BranchEnded, Output, Regroup, Regrouped
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


def decoder(director: Director) -> RunWorker:
    return next(group.leader for state in director.states for group in state.assigned.values())


def last(director: Director) -> RunWorker:
    """The worker that was ready last; of several that compute together never the first."""
    return director.workers.ready[-1]


class Together:
    """Each worker decodes branches; `tp` of them write outlines."""

    def __init__(self, graph: str, tp: int = 2, deadline: float = 20.0) -> None:
        self.tp = tp
        self.hosts = ThreadWorkers(session_of(graph, packed=tp == 1))
        block = ClusterBlock(workers=2, deadline=deadline, skeleton=GroupSize(tp=tp))
        self.workers = WorkerGroups(self.hosts.source, block, lambda record: None)
        self.workers.load_()
        self.workers.on_output = self._took
        self._works, self._written = 0, list[int]()
        self._ended = list[BranchEnded]()

    def _took(self, member: RunWorker, output: Output) -> None:
        if isinstance(output, BranchEnded):
            self._ended.append(output)
        else:
            self._written += output.tokens

    def outlined(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """In a new group an outline is written, its end alone if it was before; ids of what is kept
        of it, and its rows."""
        self.workers.form_()
        self._works += 1
        self._written = self._written[:-2]
        handed = MigratedRequest(outline=tuple(self._written))
        order = Assign(f"{self._works}", BEES, handed, self.tp, 0)
        for member in self.workers.group[: self.tp]:
            member.send(order)
        until = monotonic() + 60
        while not self._ended and monotonic() < until:
            self.workers.receive_()
        ended = self._ended.pop()
        assert ended.rows
        cache = self.engine(0, self.tp).engine.manager.prefixes
        assert cache is not None
        kept = max(cache.nodes.values(), key=lambda one: one.end)
        path = cache.segments.path(kept.segment)[::-1]
        ids = [token for one in path for token in cache.nodes[one].tokens.tolist()]
        return tuple(ids[: ended.rows[0]]), ended.rows

    def forget(self, *workers: int) -> None:
        """These, or both, drop what they have for branches, so that they want it again."""
        for worker in workers or (0, 1):
            cache = self.engine(worker, 1).engine.manager.prefixes
            assert cache is not None
            cache.evict_to_(0)
            cache.check_integrity()
            cache.pools[0].check_integrity()

    def regroup(self, number: int, ids: tuple[int, ...], rows: tuple[int, ...]) -> list[Regrouped]:
        """Both replies; the first group of those that write outlines has the rows."""
        source = 0 if self.tp > 1 else self.workers.group[0].rank
        order = Regroup(number, self.workers.epoch, self.tp, source, ids, rows)
        orders = dict.fromkeys(self.workers.group, order)
        replies: list[Regrouped] = [*self.workers.collect_(Regrouped, number, orders).values()]
        assert len(replies) == 2
        return replies

    def weights(self) -> list[tuple[int, ...]]:
        """Where all weights lie that each of them computes with: its own, and those of a rank."""
        engines = [self.engine(worker, tp) for worker in range(2) for tp in (1, 2)]
        models = [one.session.models.target for one in engines]
        return [tuple(w.data_ptr() for w in model.parameters()) for model in models]

    def engine(self, worker: int, tp: int) -> TensorParallelEngine:
        return self.hosts.loop(worker).engines[tp]


@contextmanager
def together(graph: str, tp: int = 2, deadline: float = 20.0) -> Iterator[Together]:
    pair = Together(graph, tp, deadline)
    with closing(pair.workers):
        yield pair

"""A worker of a cluster: one engine that lives on, and does parts of requests as it is told.

One thread does everything that touches models and pools, so that a collective is always between two
steps. Others only put orders in and take replies out, at any time.
"""

import os
import resource
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from time import perf_counter

import torch

from ...states.manager import regroup
from ...states.requests.branch import Request
from ...states.requests.summary import RoundSummary
from ..errors import code_of, message_of
from ..prepare.request_settings import RequestSettings
from ..record.metrics import Meter, held_figures
from ..run.engine import Engine
from ..run.session import Session
from .counting import counts_of
from .groups import Group, StoreClient, timed
from .messages import (
    Assign,
    BranchEnded,
    CannotStart,
    Close,
    Count,
    Counted,
    FormGroup,
    Greet,
    Grouped,
    Loaded,
    Order,
    Recall,
    Regroup,
    Regrouped,
    Reply,
    WorkEnded,
    order_of,
    packed,
)
from .partial_work import PartialWork

NAP = 0.2  # seconds between two looks at whether a worker that waits is to end


class ClusterWorker:
    """Takes orders and gives replies, as texts; a thread of its own does what they say.

    Args:
        open_session: loads the models, on that thread.
        address: where others reach this machine.

    Attributes:
        duty: what it does, once the models are loaded.
    """

    def __init__(self, open_session: Callable[[], Session], address: str) -> None:
        self._open, self._address = open_session, address
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._replies: deque[str] = deque()
        self._changed = Condition()
        self._ended = False
        self.duty: Duty | None = None
        self._thread = Thread(target=self._live, name="specsot-worker", daemon=True)
        self._thread.start()

    def ask(self, order: str) -> None:
        """Put an order in; never waits."""
        self._orders.put(order)

    def hear(self, seconds: float) -> list[str]:
        """Replies since the last call, in order; waits so long for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._replies or self._ended, seconds)
            heard = [*self._replies]
            self._replies.clear()
        return heard

    def die(self) -> None:
        """Stop in the middle of whatever it does: nothing that it still does is heard of."""
        self._ended = True

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ended

    def join(self, seconds: float) -> None:
        """Wait until its thread has ended."""
        self._thread.join(seconds)

    def _tell(self, reply: Reply) -> None:
        with self._changed:
            if not self._ended:
                self._replies.append(packed(reply))
                self._changed.notify_all()

    def _live(self) -> None:
        try:
            duty = self.duty = Duty(self._open(), self._tell, self._address)
            duty.greet()
            while not self._ended and not duty.closed:
                try:
                    order = self._orders.get(timeout=0 if duty.busy else NAP)
                except Empty:
                    duty.step()
                else:
                    duty.take(order_of(order))
            duty.close()
        except Exception as error:
            self._tell(CannotStart(int(code_of(error)), message_of(error)))


class Duty:
    """What a worker does, on its thread."""

    def __init__(self, session: Session, tell: Callable[[Reply], None], address: str) -> None:
        self.session, self.tell, self.address = session, tell, address
        self.meter = Meter()
        self.engine = Engine(session, threaded=False, rounds=self._round_done)
        self.group: Group | None = None
        self._client = StoreClient()
        self.works: dict[str, PartialWork] = {}
        self.closed = False

    @property
    def busy(self) -> bool:
        return bool(self.works)

    def greet(self) -> None:
        """Begin anew, and say what a driver has to know before it asks for anything."""
        self._recall("")
        self.group, self.meter = None, Meter()
        branches, weights = self.engine.branches, [*self.session.models.target.parameters()]
        loaded = Loaded(
            os.getpid(),
            self.address,
            self.session.program.graph.layout.max_active,
            tuple(pool.slot_bytes for pool in branches.pools),
            (weights[0].data_ptr(), sum(one.nbytes for one in weights)),
        )
        self.tell(loaded)

    def take(self, order: Order) -> None:
        """Do what is asked; parts of requests are only begun."""
        match order:
            case FormGroup():
                self.tell(self._grouped(order))
            case Assign():
                self._assign(order)
            case Regroup():
                self.tell(self._regrouped(order))
            case Recall():
                self._recall(order.work)
            case Count():
                self.tell(self._counted(order.number))
            case Greet():
                self.greet()
            case Close():
                self.closed = True

    def step(self) -> None:
        """A step of the engine, if there is something to do, and what it brought."""
        if self.works:
            self.engine.step()
            for work in [*self.works.values()]:
                work.tell_news(self.tell, self._rows)
                if work.handle.done:
                    self.works.pop(work.name, None)
                    self.tell(WorkEnded(work.name))

    def close(self) -> None:
        """Let go of group and engine; whoever waits is told nothing more."""
        self.group = None
        self.engine.close(cancel=True)

    def _round_done(self, summary: RoundSummary) -> None:
        self.meter.forward_done(summary, 0)

    # -- groups, and what travels in them ---------------------------------------------------------

    def _grouped(self, order: FormGroup) -> Grouped:
        self.group, began = None, perf_counter()
        try:
            self.group = Group(order, self._client)
        except RuntimeError as error:
            return Grouped(order.epoch, perf_counter() - began, message_of(error))
        return Grouped(order.epoch, perf_counter() - began)

    def _regrouped(self, order: Regroup) -> Regrouped:
        group = self.group
        if group is None or group.epoch != order.epoch:
            return Regrouped(order.number, 0, False, 0.0, 0.0, "is not in this group")
        began = perf_counter()
        try:
            reply = self._received(order, group)
        except RuntimeError as error:
            self.group = None
            spent = perf_counter() - began
            return Regrouped(order.number, 0, False, spent, spent, message_of(error))
        return replace(reply, seconds=perf_counter() - began)

    def _received(self, order: Regroup, group: Group) -> Regrouped:
        """Take part in the collective, and keep what came.

        Behind the rows stands whether they are any: those who wait for them must not wait in vain.
        """
        branches, models = self.engine.branches, self.session.models
        size = regroup.size_of(branches, order.rows)
        data_N, has = torch.zeros(size + 1, dtype=models.dtype), None
        if group.rank == order.source:
            has = self._fill_(data_N, order)
        spent = timed(lambda: group.broadcast_(data_N, order.source))
        if group.rank == order.source or not bool(data_N[-1]):
            return Regrouped(order.number, 0, False, 0.0, spent, rows=has)
        kept = regroup.put_in_(branches, order.ids, order.rows, data_N[:-1], order.cache_salt)
        count = regroup.bytes_of(branches, order.rows)
        return Regrouped(order.number, count, kept, 0.0, spent)

    def _fill_(self, data_N: torch.Tensor, order: Regroup) -> tuple[int, ...] | None:
        """The rows, if they are kept; else how many of them are."""
        branches, salt = self.engine.branches, order.cache_salt
        try:
            data_N[:-1] = regroup.take_out(branches, order.ids, order.rows, salt)
        except LookupError:  # evicted since
            return regroup.kept_rows(branches, order.ids, salt)
        data_N[-1] = 1
        return None

    # -- parts of requests ------------------------------------------------------------------------

    def _assign(self, order: Assign) -> None:
        settings = RequestSettings(handed=order.handed)
        try:
            handle = self.engine.submit(order.prompt, settings=settings)
        except Exception as error:  # of somebody's tokenizer, or grammar
            self.tell(BranchEnded(order.work, -1, "failed", message_of(error)))
            self.tell(WorkEnded(order.work))
            return
        self.works[order.work] = PartialWork(order, handle)

    def _recall(self, name: str) -> None:
        for work in [*self.works.values()]:
            if name in ("", work.name):
                work.handle.cancel()

    def _rows(self, request: Request) -> tuple[int, ...]:
        """What could be sent to others of the prefix of a request that has ended."""
        return regroup.kept_rows(self.engine.branches, request.body.ids, request.cache_salt)

    def _counted(self, number: int) -> Counted:
        meter, self.meter = self.meter, Meter()
        held = held_figures(meter, self.engine.machine.board)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Counted(number, counts_of(meter), held, len(os.listdir("/dev/fd")), peak)

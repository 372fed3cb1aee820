"""An engine of a worker, alone or as one of several ranks, and what it does of requests."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from ....models.decoder import Decoder
from ....models.sharded import RankLost, Ranks, ShardedDecoder, sharded
from ....states import migration as regroup
from ....states.manager import BranchStateManager
from ....states.request import Request
from ....states.round import RoundSummary
from ...errors import message_of
from ...prepare.request_settings import RequestSettings
from ...record.metrics import Meter, held_figures
from ...run.engine import Engine, EngineError
from ...run.session import Session
from .messages import Assign, BranchEnded, Reply, WorkEnded
from .partial_work import PartialWork

Tell = Callable[[Reply], None]


class Team:
    """One engine of a worker. Several workers that compute a decoder together have one each, which
    do the same; the first of them is heard.

    Args:
        session: with the replica of this worker. rounds: is called with what every forward
            committed, on the first of them. ranks: who computes the target together; None for this
            worker alone.

    Raises:
        RankLost: the others did not come. ModelError, ValueError: the models cannot be shared.
    """

    def __init__(
        self,
        session: Session,
        tell: Tell,
        rounds: Callable[[RoundSummary], None],
        ranks: Ranks | None,
    ) -> None:
        self.ranks = ranks
        leads = ranks is None or ranks.index == 0
        self._tell: Tell = tell if leads else _silent
        if ranks is not None:
            own = sharded(session.models.target, ranks.group, ranks.index, ranks.count)
            session = _over(session, own)
            self.ranks = own.ranks if isinstance(own, ShardedDecoder) else None
        self.session = session
        self.engine = Engine(session, threaded=False, rounds=rounds if leads else None)
        self.works: dict[str, PartialWork] = {}

    @property
    def busy(self) -> bool:
        return bool(self.works)

    @property
    def lost(self) -> str:
        """Why the others are gone, if they are."""
        return "" if self.ranks is None else self.ranks.lost

    @property
    def branches(self) -> BranchStateManager:
        return self.engine.manager

    def assign(self, order: Assign) -> None:
        """Begin with a part of a request."""
        settings = RequestSettings(handed=order.handed)
        try:
            handle = self.engine.submit(order.prompt, settings=settings)
        except Exception as error:  # of somebody's tokenizer, or grammar
            self._tell(BranchEnded(order.work, -1, "failed", message_of(error)))
            self._tell(WorkEnded(order.work))
            return
        self.works[order.work] = PartialWork(order, handle)

    def recall(self, name: str = "") -> None:
        """A part is wanted no more; nothing: no part of any."""
        for work in [*self.works.values()]:
            if name in ("", work.name):
                work.handle.cancel()

    def step(self) -> None:
        """A step of the engine, if there is something to do, and what it brought.

        Raises:
            RankLost: the others are gone; whatever it does cannot go on here.
        """
        if not self.works:
            return
        try:
            self.engine.step()
        except EngineError:
            if not self.lost:
                raise
        if self.lost:
            raise RankLost(self.lost)
        for work in [*self.works.values()]:
            work.tell_news(self._tell, self._rows)
            if work.handle.done:
                self.works.pop(work.name, None)
                self._tell(WorkEnded(work.name))

    def agree(self, count: int) -> int:
        """What the first rank says; raises RankLost."""
        assert self.ranks is not None
        return self.ranks.first(count, self.session.models.device)

    def held(self, meter: Meter) -> dict[str, Any]:
        """`held_figures` of its whole life."""
        return held_figures(meter, self.engine.core.board)

    def close(self) -> None:
        """Let go of engine and pools; whoever waits is told nothing more."""
        self._tell = _silent
        self.works.clear()
        if self.ranks is not None:  # what it was about to do the others do not do with it
            self.ranks.lost = self.lost or "this group has ended"
        self.engine.close(cancel=True)

    def _rows(self, request: Request) -> tuple[int, ...]:
        """What could be sent to others of the prefix of a request that has ended."""
        return regroup.kept_rows(self.branches, request.body.ids, request.cache_salt)


def _over(session: Session, target: Decoder) -> Session:
    """The same session over this rank's decoder of the same weights."""
    own = copy(session)
    own.models = replace(session.models, target=target)
    return own


def _silent(reply: Reply) -> None:
    """The first rank tells what all of them have done."""

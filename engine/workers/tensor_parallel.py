"""An engine of a worker, single or as one rank of several, and its assignments."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from ...models.sharded import RankLost, Ranks, ShardedDecoder, sharded
from ...states.manager import BranchStateManager
from ...states.migration import movable_rows
from ...states.request import Branch, Request
from ...states.round import RoundSummary
from ..errors import message_of
from ..events import OUTLINE
from ..prepare.inputs import RequestSettings
from ..record.metrics import Meter, held_figures
from ..run.engine import Engine, EngineError, Handle
from ..run.session import Session
from .protocol import Assign, AssignmentEnded, BranchEnded, Committed, Reply

Send = Callable[[Reply], None]


class AssignedPart:
    """A part of a request in an engine, with the numbers of tokens sent to the driver."""

    def __init__(self, order: Assign, handle: Handle) -> None:
        assert handle.request is not None
        self.id = order.id
        self.handle = handle
        self.request = handle.request
        self._sent = {branch.index: len(branch.tokens) for branch in order.part.branches}
        self._sent[OUTLINE] = len(order.part.outline)
        self._ended: set[int] = set()

    def report(self, send: Send, rows_of: Callable[[Request], tuple[int, ...]]) -> None:
        """Send new tokens and ends of its branches; the end of an outline with `rows_of` it, once
        its rows are retained."""
        self.request = self.handle.request or self.request  # another one, if it was run again
        root = self.request.root
        branches = self.request.branches
        if self.request.budget:
            for branch in branches:
                self._send_tokens(branch, branch.index, send)
                self._send_end(branch, branch.index, send)
            return
        outline = branches[0] if branches else root  # it may have ended before there was a root
        if outline is not None:
            self._send_tokens(outline, OUTLINE, send)
            if self.handle.done:
                self._send_end(outline, OUTLINE, send, rows_of(self.request))

    def _send_tokens(self, branch: Branch, index: int, send: Send) -> None:
        sent = self._sent.get(index, 0)
        if len(branch.tokens) > sent:
            send(Committed(self.id, index, sent, tuple(branch.tokens[sent:])))
            self._sent[index] = len(branch.tokens)

    def _send_end(self, branch: Branch, index: int, send: Send, rows: tuple[int, ...] = ()) -> None:
        if branch.ended and index not in self._ended:
            self._ended.add(index)
            finish = str(branch.finish)
            send(BranchEnded(self.id, index, finish=finish, note=branch.note, rows=rows))


class TensorParallelEngine:
    """One engine of a worker. Workers that compute a decoder together have one each, which do the
    same; only the first rank sends.

    Args:
        session: with the replica of this worker. on_round: takes what every forward committed, on
            the first rank. ranks: that compute the target together; None for this worker alone.

    Raises:
        RankLost: the other ranks did not come. ModelError, ValueError: the models cannot be
            sharded.
    """

    def __init__(
        self,
        session: Session,
        send: Send,
        on_round: Callable[[RoundSummary], None],
        ranks: Ranks | None,
    ) -> None:
        self.ranks = ranks
        leads = ranks is None or ranks.index == 0
        self._send: Send = send if leads else _discard
        if ranks is not None:
            target = sharded(session.models.target, ranks.group, ranks.index, ranks.count)
            self.ranks = target.ranks if isinstance(target, ShardedDecoder) else None
            models = replace(session.models, target=target)
            session = copy(session)
            session.models = models
        self.session = session
        self.engine = Engine(session, threaded=False, rounds=on_round if leads else None)
        self.parts: dict[str, AssignedPart] = {}

    @property
    def busy(self) -> bool:
        return bool(self.parts)

    @property
    def lost(self) -> str:
        """Why the other ranks are lost, if they are."""
        return "" if self.ranks is None else self.ranks.lost

    @property
    def manager(self) -> BranchStateManager:
        return self.engine.manager

    def assign(self, order: Assign) -> None:
        """Start a part of a request."""
        try:
            handle = self.engine.submit(order.prompt, settings=RequestSettings(handed=order.part))
        except Exception as error:  # of a model's tokenizer, or a grammar
            note = message_of(error)
            self._send(BranchEnded(order.id, OUTLINE, finish="failed", note=note))
            self._send(AssignmentEnded(order.id))
            return
        self.parts[order.id] = AssignedPart(order, handle)

    def cancel(self, id: str = "") -> None:
        """End a part; without an id all of them."""
        for part in self.parts.values():
            if id in ("", part.id):
                part.handle.cancel()

    def drop(self) -> None:
        """End all parts, and send nothing of them."""
        self.cancel()
        self.parts.clear()

    def step(self) -> None:
        """A step of the engine if it has parts, and what it brought.

        Raises:
            RankLost: the other ranks are lost; the parts cannot continue here.
        """
        if not self.parts:
            return
        try:
            self.engine.step()
        except EngineError:
            if not self.lost:
                raise
        if self.lost:
            raise RankLost(self.lost)
        for part in [*self.parts.values()]:
            part.report(self._send, self._rows)
            if part.handle.done:
                self.parts.pop(part.id, None)
                self._send(AssignmentEnded(part.id))

    def agree(self, count: int) -> int:
        """The number of the first rank; raises RankLost."""
        assert self.ranks is not None
        return self.ranks.first(count, self.session.models.device)

    def figures(self, meter: Meter) -> dict[str, Any]:
        """`held_figures` of its whole life."""
        return held_figures(meter, self.engine.core.board)

    def close(self) -> None:
        """Free engine and pools."""
        self._send = _discard
        self.parts.clear()
        if self.ranks is not None:  # the other ranks do not do its next step
            self.ranks.lost = self.lost or "this group has ended"
        self.engine.close(cancel=True)

    def _rows(self, request: Request) -> tuple[int, ...]:
        """Rows of the prefix of an ended request that can be sent to others."""
        return movable_rows(self.manager, request.body.ids, request.cache_salt)


def _discard(reply: Reply) -> None:
    """Only the first rank sends."""

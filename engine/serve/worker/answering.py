"""One request while it is answered, in the engine's process: from notes to text and events."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...events import (
    AnswerReady,
    BranchContext,
    BranchFinished,
    BranchOpened,
    Committed,
    OutlineRead,
    ReadingOrder,
    TokenEvent,
    TokensReused,
)
from ...run.engine import Engine, Handle
from ...text_stream import TextStream
from ..wire.protocol import Ended, Message, Submit, Wrote
from .scores import ScoreRows
from .stops import StopTexts

NOTED_ENDS = ("stop", "length")


@dataclass(slots=True)
class Speculation:
    """Drafts of a request's rounds: how many were accepted, and how many there were."""

    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PartText:
    """A branch's text, token by token."""

    stream: TextStream
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int, *, final: bool) -> str:
        """What becomes certain with this token."""
        self.tokens.append(token)
        return self._more(final)

    def close(self) -> str:
        return self._more(True) if self.tokens else ""

    def _more(self, final: bool) -> str:
        before = len(self.stream.text)
        return self.stream.update(self.tokens, final=final)[before:]


class ServedRequest:
    """What became of one `Submit`.

    Attributes:
        done: it has ended, and that was told.
    """

    def __init__(
        self, engine: Engine, asked: Submit, handle: Handle, speculation: Speculation
    ) -> None:
        self.engine = engine
        self.asked = asked
        self.handle = handle
        raw = asked.text is not None or bool(asked.token_ids)
        self._order = ReadingOrder.of(engine.session.program.graph, raw=raw)
        self._stops = StopTexts(asked.stop)
        self._branches: dict[int, PartText] = {}
        self._scores = ScoreRows.of(engine, asked)
        self.speculation = speculation
        self._taken = self._tokens = 0
        self._text = ""
        self._kept: list[int] | None = None  # tokens of a plain answer up to its stop text
        self.done = False

    def news(self) -> Iterable[Message]:
        """What is new since the last call."""
        noted = self.handle.since(self._taken)
        self._taken += len(noted)
        if not noted:
            return
        events: list[list[Any]] = []
        known = {index: len(one.tokens) for index, one in self._branches.items()}
        text = ""
        step = 0
        last = None
        for one in noted:
            if isinstance(one, AnswerReady):
                last = one
            else:
                step = one.round if isinstance(one, Committed) else step
                text += self._take(one, events)
        if last is not None:
            text += self._close(last)
        self._text += text
        scores = self._scores.take()
        if text or events or scores:
            ids = [[index, new] for index, new in self._ids(known) if new]
            yield Wrote(self.asked.id, text, events, step, self._tokens, scores, ids)
        if last is not None:
            self.done = True
            yield self._ended(last)

    def _ids(self, known: Mapping[int, int]) -> Iterator[tuple[int, list[int]]]:
        """What each branch has written behind so many of its tokens."""
        for index, one in self._branches.items():
            yield index, one.tokens[known.get(index, 0) :]

    def _take(self, one: TokenEvent, events: list[list[Any]]) -> str:
        """The readable text of a note; its events are appended."""
        if self._stops.found is not None:
            return ""  # it was cancelled, and the last step may have brought more
        if isinstance(one, OutlineRead):
            events.append(["outline", -1, list(one.titles)])
            return self._stops.take(self._order.outlined(one.titles))
        if isinstance(one, BranchOpened):
            events.append(["opened", one.index, one.title])
        elif isinstance(one, BranchFinished):
            events.append(["ended", one.index, one.finish])
            return self._through(self._order.ended(one.index))
        elif isinstance(one, TokensReused):
            decode = self.engine.decode
            events.append(["reused", one.index, [[decode(ids), how] for ids, how in one.runs]])
        elif isinstance(one, BranchContext):
            self._scores.begin(one.index, one.tokens)
        elif isinstance(one, Committed):
            return self._written(one, events)
        return ""

    def _written(self, one: Committed, events: list[list[Any]]) -> str:
        decode = self.engine.decode
        branch = self._branches.setdefault(one.branch, PartText(TextStream(decode)))
        pieces = []
        text = ""
        known = len(branch.tokens)
        for token, origin in zip(one.tokens, one.origins, strict=True):
            piece = branch.take(token, final=False)
            self._tokens += 1
            pieces.append([piece, origin])
            text += self._through(self._order.written(one.branch, piece))
            if self._stopped_at(branch):
                break
        self._scores.score(one.branch, branch.tokens[known:])
        if one.final and (rest := branch.close()) and self._stops.found is None:
            pieces.append([rest, one.origins[-1:] or "t"])
            text += self._through(self._order.written(one.branch, rest))
        if pieces:
            events.append(["wrote", one.branch, pieces])
        return text

    def _through(self, text: str) -> str:
        return self._stops.take(text) if text else ""

    def _stopped_at(self, branch: PartText) -> bool:
        """Whether a stop text is complete; then nobody needs the rest."""
        if self._stops.found is None:
            return False
        if self._kept is None:
            self._kept = list(branch.tokens)
            self.handle.cancel()
        return True

    def _close(self, last: AnswerReady) -> str:
        """What is certain at the end."""
        if self._stops.found is not None:
            return ""
        return self._stops.rest()

    def _ended(self, last: AnswerReady) -> Ended:
        found = self._stops.found
        finish = last.finish
        stopped = found is not None
        usage = asdict(last.usage)
        plain = len(last.answer.sections) == 1 and not last.answer.outline_finish
        if stopped and plain and self._kept is not None:
            usage["answer"] = len(self._kept)
        whole = last.finish in NOTED_ENDS and not self._order.raw and not stopped
        text = last.answer.text if whole and not self.asked.stop else self._text
        notes = "; ".join(one.note for one in last.answer.sections if one.note)
        return Ended(
            self.asked.id,
            text,
            "stop" if stopped else finish,
            found,
            notes,
            usage,
            self.speculation.accepted,
            self.speculation.drafted,
        )

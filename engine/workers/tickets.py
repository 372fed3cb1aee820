"""One request of the HTTP side on its way through replicas, any of which may be lost."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, Protocol, TypeVar

from .link import WorkerGoneError
from .placement import TOKENS_READ_PER_WRITTEN
from .protocol import Admitted, Ended, Message, Request, Submit, Wrote

MAX_UNREAD = 4096  # messages that wait for a slow client before it is cut off
MAX_LOSSES = 4  # replicas that may be lost while they have a request; then it fails
ISOLATING_LOSSES = 2  # from then on it does not run together with another such request
MIN_EXPECTED = 8  # tokens of an answer that has not ended
BYTES_PER_TOKEN = 4  # of a text, about
NO_USAGE = {"prompt": 0, "cached": 0, "outline": 0, "answer": 0}
Output = TypeVar("Output", str, list[Any])


class StalledError(RuntimeError):
    """A client did not read its messages."""


class DiffersError(RuntimeError):
    """A second run of a request has another output than the first."""


def prompt_tokens(request: Request) -> int:
    """About how many tokens the prompt of a request has."""
    if not isinstance(request, Submit):
        return 0
    parts = [request.rules, request.question, request.text or ""]
    parts += [text for pair in (*request.past, *request.documents) for text in pair]
    return len(request.token_ids) + sum(map(len, parts)) // BYTES_PER_TOKEN


class DeliveredStream:
    """The output of a request that its client has received.

    A second run of the request repeats it, in steps of other sizes: `new_part` drops what the
    client has. Texts, tokens and scores of a branch come in the same order in every run.

    Attributes:
        ids: tokens of each branch.
    """

    def __init__(self) -> None:
        self._text = ""
        self._tokens = 0
        self._pieces: dict[int, list[str]] = {}
        self.ids: dict[int, list[int]] = {}
        self._rows: Counter[int] = Counter()
        self._events: set[tuple[str, int]] = set()
        self.restart_()

    def restart_(self) -> None:
        """The request runs again from its beginning."""
        self._text_at = 0
        self._pieces_at: Counter[int] = Counter()
        self._ids_at: Counter[int] = Counter()
        self._rows_at: Counter[int] = Counter()

    def new_part(self, output: Wrote) -> Wrote | None:
        """The part of an output that the client does not have; raises DiffersError."""
        text = _new_part(self._text, self._text_at, output.text)
        self._text_at += len(output.text)
        self._text += text
        self._tokens = max(self._tokens, output.tokens)
        for branch, ids in output.ids:
            delivered = self.ids.setdefault(branch, [])
            delivered += _new_part(delivered, self._ids_at[branch], ids)
            self._ids_at[branch] += len(ids)
        events = [event for each in output.events if (event := self._new_event(*each))]
        scores = [row for row in output.scores if self._is_new_row(row[0])]
        if not (text or events or scores):
            return None
        return replace(output, text=text, events=events, tokens=self._tokens, scores=scores, ids=())

    def _new_event(self, name: str, branch: int, details: Sequence[Any]) -> list[Any] | None:
        if name != "wrote":
            known = (name, branch) in self._events
            self._events.add((name, branch))
            return None if known else [name, branch, details]
        pieces = [piece for piece, _ in details]
        delivered = self._pieces.setdefault(branch, [])
        new = _new_part(delivered, self._pieces_at[branch], pieces)
        self._pieces_at[branch] += len(pieces)
        delivered += new
        return [name, branch, list(details)[len(details) - len(new) :]] if new else None

    def _is_new_row(self, branch: int) -> bool:
        self._rows_at[branch] += 1
        new = self._rows_at[branch] > self._rows[branch]
        self._rows[branch] += new
        return new


def _new_part(delivered: Output, at: int, output: Output) -> Output:
    """The end of an output, which starts at position `at`, that was not delivered."""
    known = delivered[at : at + len(output)]
    if output[: len(known)] != known:
        raise DiffersError("a second run of the request has another output than the first")
    return output[len(known) :]


class RoutingCallbacks(Protocol):
    """What a ticket needs of its router."""

    def forget(self, ticket: "Ticket") -> None: ...


class Ticket:
    """One message to the engines, and the messages that answer it, in order.

    Args:
        expected_tokens: of the answer.

    Attributes:
        ended: no further message will come. losses: replicas that were lost while they had it.
    """

    def __init__(self, router: RoutingCallbacks, request: Request, expected_tokens: int) -> None:
        self.request = request
        self.id = request.id
        self.losses = 0
        self.ended = False
        self.delivered = DeliveredStream()
        self._router = router
        self._expected_tokens = expected_tokens
        self._prompt_tokens = prompt_tokens(request)
        self._start_time = monotonic()
        self._admitted = False
        self._written_tokens = 0
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()

    # -- the HTTP side ----------------------------------------------------------------------------

    async def next(self) -> Message:
        """The next message; raises WorkerGoneError, StalledError."""
        if self._messages.qsize() > MAX_UNREAD:
            raise StalledError(f"{MAX_UNREAD} messages were not read")
        message = await self._messages.get()
        if message is None:
            raise WorkerGoneError("the engine's process has ended")
        return message

    @property
    def waiting(self) -> int:
        """Messages that were not read."""
        return self._messages.qsize()

    def close(self) -> None:
        """Read no further; a request that has not ended is cancelled."""
        self._router.forget(self)

    # -- the router -------------------------------------------------------------------------------

    def deliver(self, message: Message | None) -> None:
        """Hand a message to the HTTP side; None: no replica will answer."""
        self.ended = self.ended or not isinstance(message, Admitted | Wrote)
        self._messages.put_nowait(message)

    def deliver_output(self, output: Wrote) -> None:
        """Hand over what is new of an output; raises DiffersError."""
        self._written_tokens = output.tokens
        if new := self.delivered.new_part(output):
            self.deliver(new)

    def deliver_admitted(self, message: Admitted) -> None:
        """Hand it over, once."""
        if not self._admitted:
            self._admitted = True
            self.deliver(message)

    def restart_(self) -> None:
        """The replica that had the request is lost."""
        self.losses += 1
        self._written_tokens = 0
        self.delivered.restart_()

    def fail_(self, why: str, finish: str = "failed") -> None:
        """End the request without an answer."""
        if not isinstance(self.request, Submit):
            self.deliver(None)
            return
        self.deliver_admitted(Admitted(self.id, 0))
        ended = Ended(
            self.id,
            text="",
            finish=finish,
            stop=None,
            note=why,
            usage=NO_USAGE,
            accepted=(),
            drafted=(),
        )
        self.deliver(ended)

    @property
    def isolated(self) -> bool:
        """Whether it runs without other such requests: it may be what ends replicas."""
        return self.losses >= ISOLATING_LOSSES

    @property
    def remaining_tokens(self) -> int:
        """Expected of the replica that has the request."""
        if not isinstance(self.request, Submit):
            return 0
        unread = 0 if self._written_tokens else self._prompt_tokens // TOKENS_READ_PER_WRITTEN
        return unread + max(self._expected_tokens - self._written_tokens, MIN_EXPECTED)

    @property
    def remaining_seconds(self) -> float:
        timeout = self.request.timeout if isinstance(self.request, Submit) else None
        return float("inf") if timeout is None else self._start_time + timeout - monotonic()

    @property
    def remaining_request(self) -> Request:
        """The request, with the answer so far and the remaining time.

        The last token of each branch is written again, so that its end is found again.
        """
        request = self.request
        if not isinstance(request, Submit) or not self.losses:
            return request
        resumed = [[branch, ids[:-1]] for branch, ids in self.delivered.ids.items()]
        timeout = None if request.timeout is None else max(self.remaining_seconds, 0.001)
        return replace(request, resumed=resumed, timeout=timeout)

"""The requests of the HTTP side on their way through replicas, any of which may be lost."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from .link import WorkerGoneError, WorkerLink
from .placement import BLOCK, TOKENS_READ_PER_WRITTEN, Loads, PrefixIndex, prefix_keys, route
from .protocol import Admitted, Ended, Message, Request, Submit, Wrote

MAX_UNREAD = 4096  # messages that wait for a slow client before it is cut off
MAX_LOSSES = 4  # replicas that may be lost while they have a request; then it fails
ISOLATING_LOSSES = 2  # from then on it does not run together with another such request
MIN_EXPECTED = 8  # tokens of an answer that has not ended
BYTES_PER_TOKEN = 4  # of a text, about
MAX_BEGINNING = 32 << 10  # bytes of a prompt that are compared
UNSEEN_PARTS = 4  # parts of an outlined answer before any has ended
AVERAGED_ANSWERS = 8
NO_NUMBER = -1  # of a replica that is not loaded
NO_USAGE = {"prompt": 0, "cached": 0, "outline": 0, "answer": 0}
CountsByGraph = Mapping[str, Mapping[str, Any]]


class StalledError(RuntimeError):
    """A client did not read its messages."""


class DiffersError(RuntimeError):
    """A second run of a request has another output than the first."""


# -- what each replica will write -----------------------------------------------------------------


@dataclass(eq=False)
class Replica(WorkerLink):
    """A worker that decodes whole requests, through all lives of its process. number: of its
    process in the table, once its models are loaded. expected: tokens to be written for
    each of its requests. counts: of its engines, the latest."""

    number: int = NO_NUMBER
    draining: bool = False
    expected: dict[str, int] = field(default_factory=dict)
    counts: CountsByGraph = field(default_factory=dict)


class RoutingTable:
    """The replicas that get requests, what each will write, and which prompts it has read.

    A replica's load is what it has not written yet. So a slow replica gets fewer requests.
    """

    def __init__(self) -> None:
        self._loads = Loads()
        self._index = PrefixIndex(BLOCK * BYTES_PER_TOKEN)
        self._replicas = dict[int, Replica]()
        self._numbers = itertools.count()

    def attach_(self, replica: Replica) -> None:
        if replica.number == NO_NUMBER:
            replica.number = next(self._numbers)
        if replica.number not in self._replicas:
            self._replicas[replica.number] = replica
            self._loads.attach_(replica.number, sum(replica.expected.values()))

    def detach_(self, replica: Replica) -> None:
        if self._replicas.pop(replica.number, None) is not None:
            self._loads.detach_(replica.number)

    def lose_(self, replica: Replica) -> None:
        """The replica's process has ended: its cache is empty when it comes back."""
        self.detach_(replica)
        replica.number = NO_NUMBER

    def choose_(self, request: Request) -> Replica | None:
        """The replica for a request, which has its prompt from then on; None if there is none."""
        if not self._replicas:
            return None
        keys = prefix_keys(_beginning(request), self._index.block)
        holders = self._index.find(keys)
        holders = holders._replace(tokens=holders.tokens // BYTES_PER_TOKEN)
        number = route(prompt_tokens(request), holders, self._loads)
        self._index.note_(keys, number)
        return self._replicas[number]

    def weigh_(self, replica: Replica, id: str, tokens: int) -> None:
        """Set the number of tokens that the replica is expected to write for a request."""
        self._loads.add_(replica.number, tokens - replica.expected.get(id, 0))
        replica.expected[id] = tokens

    def release_(self, replica: Replica, id: str) -> None:
        self._loads.add_(replica.number, -replica.expected.pop(id, 0))


def _beginning(request: Request) -> bytes:
    """What comes first in a prompt: equal bytes are equal prompts up to there."""
    if not isinstance(request, Submit):
        return b""
    texts = [request.graph, request.cache_salt, request.rules]
    texts += itertools.chain(*request.documents, *request.past)
    texts += [request.question if request.text is None else request.text]
    first_ids = request.token_ids[: MAX_BEGINNING // BYTES_PER_TOKEN]
    ids = b"".join(token.to_bytes(BYTES_PER_TOKEN, "big") for token in first_ids)
    return ("\0".join(texts).encode("utf-8", "surrogatepass") + ids)[:MAX_BEGINNING]


def prompt_tokens(request: Request) -> int:
    """About how many tokens the prompt of a request has."""
    if not isinstance(request, Submit):
        return 0
    texts = (request.rules, request.question, request.text or "")
    parts = itertools.chain(texts, *request.past, *request.documents)
    return len(request.token_ids) + sum(map(len, parts)) // BYTES_PER_TOKEN


class AnswerLengths:
    """Mean lengths of the answers of each graph: what the next ones are expected to be."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, bool], float] = {}

    def expected(self, request: Request, graphs: CountsByGraph) -> int:
        """Tokens of an answer with its outline."""
        if not isinstance(request, Submit):
            return 0
        facts = graphs.get(request.graph, {})
        budget = request.max_tokens or int(facts.get("budget", 1))
        outlined = _is_outlined(request, facts)
        default = budget * (UNSEEN_PARTS if outlined else 1)
        mean = self._means.get((request.graph, outlined), default)
        return int(mean if outlined else min(mean, budget))

    def note_(self, request: Request, ended: Ended, graphs: CountsByGraph) -> None:
        if isinstance(request, Submit):
            key = (request.graph, _is_outlined(request, graphs.get(request.graph, {})))
            written = ended.usage["answer"] + ended.usage["outline"]
            mean = self._means.get(key, float(written))
            self._means[key] = mean + (written - mean) / AVERAGED_ANSWERS


def _is_outlined(request: Submit, facts: Mapping[str, Any]) -> bool:
    raw = request.text is not None or bool(request.token_ids) or request.schema is not None
    return bool(facts.get("skeleton")) and request.skeleton and not raw


# -- one request ----------------------------------------------------------------------------------


class DeliveredStream:
    """The output of a request that its client has received.

    A second run of the request repeats it, in steps of other sizes: `new_part` drops what the
    client has. Texts, tokens, scores and events of a branch come in the same order in every run.
    """

    def __init__(self) -> None:
        self._delivered: dict[tuple[str, int], list[Any]] = {}
        self._at: Counter[tuple[str, int]] = Counter()
        self._tokens = 0

    @property
    def ids(self) -> dict[int, list[int]]:
        return {branch: ids for (kind, branch), ids in self._delivered.items() if kind == "ids"}

    def restart_(self) -> None:
        """The request runs again from its beginning."""
        self._at.clear()

    def new_part(self, output: Wrote) -> Wrote | None:
        """The part of an output that the client does not have; raises DiffersError."""
        text = "".join(self._new("text", 0, output.text))
        self._tokens = max(self._tokens, output.tokens)
        for branch, ids in output.ids:
            self._new("ids", branch, ids)
        events = []
        for name, branch, details in output.events:
            if name != "wrote":
                events += [[name, branch, details]] if self._new(name, branch, [name]) else []
            elif new := self._new(name, branch, [piece for piece, _ in details]):
                events.append([name, branch, list(details)[-len(new) :]])
        scores = [row for row in output.scores if self._new("scores", row[0], [row[1]])]
        new_output = output._replace(text=text, events=events, tokens=self._tokens, scores=scores)
        return new_output._replace(ids=()) if text or events or scores else None

    def _new(self, kind: str, branch: int, items: Sequence[Any]) -> Sequence[Any]:
        """The last of these items of a branch: those that were not delivered."""
        delivered = self._delivered.setdefault((kind, branch), [])
        at = self._at[kind, branch]
        self._at[kind, branch] += len(items)
        known = delivered[at : at + len(items)]
        if list(items[: len(known)]) != known:
            raise DiffersError("a second run of the request has another output than the first")
        delivered += items[len(known) :]
        return items[len(known) :]


class Ticket:
    """One message to the engines, and the messages that answer it, in order.

    expected_tokens: of the answer. on_close: is called once the ticket is no longer read. replica:
    that has the request; None while it waits, and after its end. ended: no further message will
    come. losses: replicas that were lost while they had it.
    """

    def __init__(
        self, request: Request, expected_tokens: int, on_close: Callable[["Ticket"], None]
    ) -> None:
        self.request = request
        self.id = request.id
        self.replica: Replica | None = None
        self.losses = 0
        self.ended = False
        self._delivered = DeliveredStream()
        self._on_close = on_close
        self._expected_tokens = expected_tokens
        self._prompt_tokens = prompt_tokens(request)
        self._start_time = monotonic()
        self._admitted = False
        self._written_tokens = 0
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def next(self) -> Message:
        """The next message; raises WorkerGoneError, StalledError."""
        if self._messages.qsize() > MAX_UNREAD:
            raise StalledError(f"{MAX_UNREAD} messages were not read")
        message = await self._messages.get()
        if message is None:
            raise WorkerGoneError("the engine's process has ended")
        return message

    def close(self) -> None:
        """Read no further; a request that has not ended is cancelled."""
        self._on_close(self)

    def deliver(self, message: Message | None) -> None:
        """Hand what is new of a message to the HTTP side; None: no replica will answer. Raises
        DiffersError: it contradicts what was delivered."""
        if isinstance(message, Admitted):
            if self._admitted:
                return
            self._admitted = True
        elif isinstance(message, Wrote):
            self._written_tokens = message.tokens
            if (message := self._delivered.new_part(message)) is None:
                return
        else:
            self.ended = True
        self._messages.put_nowait(message)

    def restart_(self) -> None:
        self.replica = None
        self.losses += 1
        self._written_tokens = 0
        self._delivered.restart_()

    def fail_(self, why: str, finish: str = "failed") -> None:
        """End the request without an answer."""
        if not isinstance(self.request, Submit):
            self.deliver(None)
            return
        self.deliver(Admitted(self.id, 0))
        self.deliver(Ended(self.id, "", finish, NO_USAGE, note=why))

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
        resumed = [[branch, ids[:-1]] for branch, ids in self._delivered.ids.items()]
        timeout = None if request.timeout is None else max(self.remaining_seconds, 0.001)
        return request._replace(resumed=resumed, timeout=timeout)

"""The requests of the HTTP side on their way through replicas, any of which may be lost."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from .link import WorkerGoneError, WorkerLink
from .placement import BLOCK, TOKENS_READ_PER_WRITTEN, PrefixIndex, prefix_keys
from .protocol import Admitted, Ended, Message, Request, Submit, Wrote

MAX_UNREAD = 4096  # messages that wait for a slow client before it is cut off
ISOLATING_LOSSES = 2  # lost replicas after which a request runs without other such requests
MIN_EXPECTED = 8  # tokens of an answer that has not ended
BYTES_PER_TOKEN = 4  # of a text, about
MAX_BEGINNING = 32 << 10  # bytes of a prompt that are compared
UNSEEN_PARTS = 4  # parts of an outlined answer before any has ended
AVERAGED_ANSWERS = 8
NO_USAGE = {"prompt": 0, "cached": 0, "outline": 0, "answer": 0}
CountsByGraph = Mapping[str, Mapping[str, Any]]


class StalledError(RuntimeError):
    """A client did not read its messages."""


class DiffersError(RuntimeError):
    """A second run of a request has another output than the first."""


@dataclass(eq=False)
class Replica(WorkerLink):
    """Decodes whole requests. expected: tokens by request. counts: of its engines, the latest."""

    draining: bool = False
    expected: dict[str, int] = field(default_factory=dict)
    counts: CountsByGraph = field(default_factory=dict)

    @property
    def load(self) -> int:
        """Tokens that it has not written yet, so that a slow one gets fewer requests."""
        return sum(self.expected.values())


def choose_(request: Request, replicas: Iterable[Replica], index: PrefixIndex) -> Replica | None:
    """The replica that would have read a request's prompt first, and has it from then on. index:
    of the replicas that have read prompts, each in one life: its cache ends with its process."""
    beginning, whole = _prompt_of(request)
    keys = prefix_keys(beginning, BLOCK * BYTES_PER_TOKEN)
    holders = index.find(keys)
    unread = max(whole - holders.tokens, 1)

    def wait(replica: Replica) -> int:
        known = (replica.name, replica.lives) in holders.workers
        return replica.load * TOKENS_READ_PER_WRITTEN + (unread if known else whole)

    chosen = min(replicas, key=wait, default=None)
    if chosen is not None:
        index.note_(keys, (chosen.name, chosen.lives))
    return chosen


def _prompt_of(request: Request) -> tuple[bytes, int]:
    """What comes first in a prompt, for comparison, and about how many tokens it has."""
    if not isinstance(request, Submit):
        return b"", 0
    prompt = request.prompt
    ids = request.settings.token_ids
    pairs = [(document.title, document.text) for document in prompt.documents]
    pairs += [(turn.question, turn.answer) for turn in prompt.past]
    texts = [prompt.rules, *itertools.chain(*pairs), prompt.text]
    num_tokens = len(ids) + sum(map(len, texts)) // BYTES_PER_TOKEN
    text = "\0".join([request.graph, prompt.cache_salt, *texts])
    first_ids = ids[: MAX_BEGINNING // BYTES_PER_TOKEN]
    id_bytes = b"".join(token.to_bytes(BYTES_PER_TOKEN, "big") for token in first_ids)
    return (text.encode("utf-8", "surrogatepass") + id_bytes)[:MAX_BEGINNING], num_tokens


class AnswerLengths:
    """Mean lengths of the answers of each graph, with and without an outline."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, bool], float] = {}

    def expected(self, request: Request, graphs: CountsByGraph) -> int:
        """Tokens of an answer with its outline."""
        if not isinstance(request, Submit):
            return 0
        facts = graphs.get(request.graph, {})
        budget = request.prompt.max_new_tokens or int(facts.get("budget", 1))
        outlined = _is_outlined(request, facts)
        default = budget * (UNSEEN_PARTS if outlined else 1)
        mean = self._means.get((request.graph, outlined), default)
        most = mean if outlined else budget
        return int(min(mean, most, request.settings.answer_tokens or most))

    def note_(self, request: Request, ended: Ended, graphs: CountsByGraph) -> None:
        if isinstance(request, Submit):
            key = (request.graph, _is_outlined(request, graphs.get(request.graph, {})))
            written = ended.usage["answer"] + ended.usage["outline"]
            mean = self._means.get(key, float(written))
            self._means[key] = mean + (written - mean) / AVERAGED_ANSWERS


def _is_outlined(request: Submit, facts: Mapping[str, Any]) -> bool:
    return bool(facts.get("skeleton")) and not (request.raw or request.settings.plain)


@dataclass
class DeliveredStream:
    """The output of a request that its client has received. A second run repeats it in steps of
    other sizes: texts, tokens, scores and events of a branch come in the same order."""

    _delivered: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    _at: Counter[tuple[str, int]] = field(default_factory=Counter)
    _tokens: int = 0

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


@dataclass(eq=False, slots=True)
class Ticket:
    """A message to the engines, and those that answer it, in order. on_close: called once it is
    read no longer. replica: None while it waits, and after its end. losses: of replicas with it."""

    request: Request
    expected_tokens: int
    on_close: Callable[["Ticket"], None]
    replica: Replica | None = None
    losses: int = 0
    ended: bool = False
    _delivered: DeliveredStream = field(default_factory=DeliveredStream)
    _start_time: float = field(default_factory=monotonic)
    _admitted: bool = False
    _written_tokens: int = 0
    _messages: asyncio.Queue[Message | None] = field(default_factory=asyncio.Queue)

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
        self.on_close(self)

    def deliver(self, message: Message | None) -> None:
        """Hand over what is new of a message; None: no replica will answer. Raises DiffersError."""
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
        if not isinstance(self.request, Submit):
            self.deliver(None)
            return
        self.deliver(Admitted(self.request.id, 0))
        self.deliver(Ended(self.request.id, "", finish, NO_USAGE, note=why))

    @property
    def isolated(self) -> bool:
        """Whether it runs without other such requests: it may be what ends replicas."""
        return self.losses >= ISOLATING_LOSSES

    @property
    def remaining_tokens(self) -> int:
        """Expected of the replica that has the request."""
        if not isinstance(self.request, Submit):
            return 0
        written = self._written_tokens
        unread = 0 if written else _prompt_of(self.request)[1] // TOKENS_READ_PER_WRITTEN
        return unread + max(self.expected_tokens - written, MIN_EXPECTED)

    @property
    def remaining_seconds(self) -> float:
        timeout = self.request.timeout if isinstance(self.request, Submit) else None
        return float("inf") if timeout is None else self._start_time + timeout - monotonic()

    @property
    def remaining_request(self) -> Request:
        """The rest of the request. Branches write their last token again, and find their end."""
        request = self.request
        if not isinstance(request, Submit) or not self.losses:
            return request
        resumed = {branch: ids[:-1] for branch, ids in self._delivered.ids.items()}
        settings = replace(request.settings, resumed=resumed)
        timeout = None if request.timeout is None else max(self.remaining_seconds, 0.001)
        return request._replace(settings=settings, timeout=timeout)

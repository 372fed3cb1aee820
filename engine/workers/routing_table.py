"""What a router knows of its replicas: their loads, the prompts that they have read, and how long
answers are."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .link import WorkerLink
from .placement import BLOCK, NO_WORKER, Loads, PrefixIndex, prefix_keys, route
from .protocol import Ended, Request, Submit
from .tickets import BYTES_PER_TOKEN, prompt_tokens

MAX_BEGINNING = 32 << 10  # bytes of a prompt that are compared
UNSEEN_PARTS = 4  # parts of an outlined answer before any has ended
AVERAGED_ANSWERS = 8
CountsByGraph = Mapping[str, Mapping[str, Any]]


@dataclass(eq=False, slots=True)
class Replica:
    """A worker that decodes whole requests, through all lives of its process.

    Attributes:
        number: of its process for `Loads`; NO_WORKER until its models are loaded.
        counts: of its engines, the latest.
    """

    link: WorkerLink
    number: int = NO_WORKER
    draining: bool = False
    counts: CountsByGraph = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.link.name


class RoutingTable:
    """The replicas that get requests, what each will write, and which prompts it has read.

    A replica's load is what it has not written yet. So a slow replica gets fewer requests.
    """

    def __init__(self) -> None:
        self._loads = Loads()
        self._index = PrefixIndex(BLOCK * BYTES_PER_TOKEN)
        self._replicas = dict[int, Replica]()
        self._tokens: dict[str, tuple[int, int]] = {}
        self._numbers = itertools.count()

    def attach_(self, replica: Replica) -> None:
        """Send requests to a replica."""
        if replica.number == NO_WORKER:
            replica.number = next(self._numbers)
        if replica.number not in self._replicas:
            self._replicas[replica.number] = replica
            self._loads.attach_(replica.number, self.tokens_of(replica))

    def detach_(self, replica: Replica) -> None:
        """Send no further requests to a replica."""
        if self._replicas.pop(replica.number, None) is not None:
            self._loads.detach_(replica.number)

    def lose_(self, replica: Replica) -> None:
        """The replica's process has ended: its cache is empty when it comes back."""
        self.detach_(replica)
        replica.number = NO_WORKER

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
        number, before = self._tokens.get(id, (replica.number, 0))
        self._tokens[id] = (number, tokens)
        self._loads.add_(number, tokens - before)

    def release_(self, id: str) -> None:
        """Nothing further is expected for a request."""
        if entry := self._tokens.pop(id, None):
            self._loads.add_(entry[0], -entry[1])

    def tokens_of(self, replica: Replica) -> int:
        """What a replica is expected to write."""
        entries = self._tokens.values()
        return sum(tokens for number, tokens in entries if number == replica.number)


def _beginning(request: Request) -> bytes:
    """What comes first in a prompt: equal bytes are equal prompts up to there."""
    if not isinstance(request, Submit):
        return b""
    texts = [request.graph, request.cache_salt, request.rules]
    texts += [part for document in request.documents for part in document]
    texts += [part for turn in request.past for part in turn]
    texts += [request.question if request.text is None else request.text]
    first_ids = request.token_ids[: MAX_BEGINNING // BYTES_PER_TOKEN]
    ids = b"".join(token.to_bytes(BYTES_PER_TOKEN, "big") for token in first_ids)
    return ("\0".join(texts).encode("utf-8", "surrogatepass") + ids)[:MAX_BEGINNING]


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
        """An answer has ended."""
        if not isinstance(request, Submit):
            return
        key = (request.graph, _is_outlined(request, graphs.get(request.graph, {})))
        written = ended.usage["answer"] + ended.usage["outline"]
        mean = self._means.get(key, float(written))
        self._means[key] = mean + (written - mean) / AVERAGED_ANSWERS


def _is_outlined(request: Submit, facts: Mapping[str, Any]) -> bool:
    raw = request.text is not None or bool(request.token_ids) or request.schema is not None
    return bool(facts.get("skeleton")) and request.skeleton and not raw

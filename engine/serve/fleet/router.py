"""Which replica gets what: by what it has read, and by what it has yet to write."""

from dataclasses import dataclass
from itertools import count

from ...cluster.driver.placement import BLOCK, NOBODY, Loads, PrefixIndex, prefix_keys, route
from ..wire.engines import DRAINING, LinkState, ReplicaFacts
from ..wire.link import EngineLink
from .expected import BYTES, Asked, beginning, prompt_tokens


@dataclass(eq=False, slots=True)
class Replica:
    """A process that decodes whole requests, and the one that takes its place when it is lost.

    Attributes:
        number: of this life of it, for the router; NOBODY until its models are loaded.
        draining: it gets nothing more, and ends with the last that it has.
    """

    name: str
    link: EngineLink
    number: int = NOBODY
    draining: bool = False


class Router:
    """The replicas that get something, what each is expected to write, and what it has read.

    A replica's load is what it has not written yet. So one that is slow, for whatever reason, gets
    less: what it has stays longer.
    """

    def __init__(self) -> None:
        self._loads = Loads()
        self._index = PrefixIndex(BLOCK * BYTES)
        self._replicas = dict[int, Replica]()
        self._tokens: dict[str, tuple[int, int]] = {}
        self._numbers = count()

    def attach_(self, replica: Replica) -> None:
        """It gets requests from now on."""
        if replica.number == NOBODY:
            replica.number = next(self._numbers)
        if replica.number not in self._replicas:
            self._replicas[replica.number] = replica
            self._loads.attach_(replica.number, self.tokens_of(replica))

    def detach_(self, replica: Replica) -> None:
        """It gets nothing more."""
        if self._replicas.pop(replica.number, None) is not None:
            self._loads.detach_(replica.number)

    def lose_(self, replica: Replica) -> None:
        """This life of it is over, and with it all that it has read."""
        self.detach_(replica)
        replica.number = NOBODY

    def choose_(self, asked: Asked) -> Replica | None:
        """Who is to have it, and has read it from then on; None if nobody is attached."""
        if not self._replicas:
            return None
        keys = prefix_keys(beginning(asked), self._index.block)
        found = self._index.find(keys)
        found = found._replace(tokens=found.tokens // BYTES)
        number = route(prompt_tokens(asked), found, self._loads)
        self._index.note_(keys, number)
        return self._replicas[number]

    def weigh_(self, replica: Replica, id: str, tokens: int) -> None:
        """So many tokens are expected of it, by now, for a request."""
        number, before = self._tokens.get(id, (replica.number, 0))
        self._tokens[id] = number, tokens
        self._loads.add_(number, tokens - before)

    def release_(self, id: str) -> None:
        """Nothing more is expected for it."""
        if found := self._tokens.pop(id, None):
            self._loads.add_(found[0], -found[1])

    def tokens_of(self, replica: Replica) -> int:
        """What it is expected to write."""
        mine = (tokens for number, tokens in self._tokens.values() if number == replica.number)
        return sum(mine)

    def facts_of(self, replica: Replica) -> ReplicaFacts:
        link = replica.link
        drains = replica.draining and link.state is not LinkState.CLOSED
        state = DRAINING if drains else str(link.state)
        tokens = self.tokens_of(replica)
        done = link.open, tokens, link.written, link.restarts
        return ReplicaFacts(replica.name, state, link.pid, *done)

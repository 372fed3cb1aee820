"""A message on its way through replicas that may be lost; whoever waits sees one course of it."""

from dataclasses import replace
from time import monotonic
from typing import Protocol

from ...cluster.driver.placement import READ
from ..wire.protocol import Admitted, Decode, Encode, Ended, Message, Submit, Wrote
from ..wire.tickets import Ticket
from .expected import prompt_tokens
from .told import ToldAnswer

LIVES = 4  # replicas that may be lost while they have a request; then it fails
ALONE = 2  # from so many on it is run beside no other that lost as many
FEW = 8  # tokens that are expected, at least, of an answer that has not ended
NO_USAGE = {"prompt": 0, "cached": 0, "outline": 0, "answer": 0}


class Fates(Protocol):
    """Who decides what becomes of a message."""

    def forget(self, ticket: Ticket) -> None: ...
    def took(self, ticket: "RoutedTicket", message: Message | None) -> None: ...


class RoutedTicket(Ticket):
    """One message, and what it is still expected to take where it is.

    Args:
        expects: tokens of its answer.

    Attributes:
        losses: replicas that were lost while they had it.
    """

    def __init__(self, fates: Fates, message: Submit | Encode | Decode, expects: int) -> None:
        super().__init__(fates, message.id)
        self.message = message
        self.expects = expects
        self.losses = 0
        self.told = ToldAnswer()
        self._fates = fates
        self._prompt = prompt_tokens(message)
        self._began = monotonic()
        self._admitted = False
        self._tokens = 0

    def put(self, message: Message | None) -> None:
        """What a replica says; None: it is lost."""
        self._fates.took(self, message)

    def deliver(self, message: Message | None) -> None:
        """What whoever waits is told; nothing comes behind anything else than these."""
        self.ended = self.ended or not isinstance(message, Admitted | Wrote)
        super().put(message)

    def again_(self) -> None:
        """The replica that had it is lost."""
        self.losses += 1
        self._tokens = 0
        self.told.again_()

    def news_(self, message: Wrote) -> None:
        """Deliver what of it is new; raises DiffersError."""
        self._tokens = message.tokens
        if more := self.told.more(message):
            self.deliver(more)

    def admitted_(self, message: Admitted) -> None:
        """Deliver it, once."""
        if not self._admitted:
            self._admitted = True
            self.deliver(message)

    def fail_(self, why: str, finish: str = "failed") -> None:
        """End it without an answer."""
        if not isinstance(self.message, Submit):
            self.deliver(None)
            return
        if not self._admitted:
            self.admitted_(Admitted(self.id, 0))
        self.deliver(Ended(self.id, "", finish, None, why, NO_USAGE, (), ()))

    @property
    def alone(self) -> bool:
        """Whether it is to be run beside no other of its kind: it may be what replicas die of."""
        return self.losses >= ALONE

    @property
    def tokens(self) -> int:
        """Expected of the replica that has it."""
        if not isinstance(self.message, Submit):
            return 0
        unread = 0 if self._tokens else self._prompt // READ
        return unread + max(self.expects - self._tokens, FEW)

    @property
    def asked(self) -> Submit | Encode | Decode:
        """The message, with what is written of its answer, and what is left of its time.

        The last token of each branch is written again, so that whatever ended it ends it again.
        """
        message = self.message
        if not isinstance(message, Submit) or not self.losses:
            return message
        begun = [[branch, ids[:-1]] for branch, ids in self.told.ids.items()]
        left = None if message.timeout is None else max(self.left, 0.001)
        return replace(message, begun=begun, timeout=left)

    @property
    def left(self) -> float:
        """Seconds."""
        timeout = self.message.timeout if isinstance(self.message, Submit) else None
        return float("inf") if timeout is None else self._began + timeout - monotonic()

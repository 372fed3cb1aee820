"""What a round drafts by choice, and what drafting costs: host numbers."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Choice:
    """What a round drafts.

    size: nodes of each tree, or drafts of the longest chain. levels: of each tree. lengths: of each
    chain. tokens, ms: what is expected of the round, the target's own tokens included.
    """

    size: int
    levels: int
    tokens: float
    ms: float
    lengths: tuple[int, ...] = ()


class DraftWork(NamedTuple):
    """Forwards of a drafter in a round, and the rows in them (host ints).

    padding: of these rows those that stand for nothing.
    """

    forwards: int = 0
    rows: int = 0
    padding: int = 0

    def plus(self, other: "DraftWork") -> "DraftWork":
        """Both."""
        return DraftWork(*(mine + more for mine, more in zip(self, other, strict=True)))


NO_WORK = DraftWork()

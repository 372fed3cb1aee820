"""What a client was told of a request, which may have to be run again elsewhere."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from ..wire.protocol import Wrote

Said = TypeVar("Said", str, list[Any])


class DiffersError(RuntimeError):
    """A second run says something else than the client was told."""


class ToldAnswer:
    """All that was told of a request. A run that begins anew says nothing until it is behind that:
    texts, tokens and scores come in the same order, however many of them a step brings.

    Attributes:
        ids: tokens of each branch.
    """

    def __init__(self) -> None:
        self._text = ""
        self._tokens = 0
        self._pieces: dict[int, list[str]] = {}
        self.ids: dict[int, list[int]] = {}
        self._rows: Counter[int] = Counter()
        self._once: set[tuple[str, int]] = set()
        self.again_()

    def again_(self) -> None:
        """The request is run from its beginning."""
        self._at = 0
        self._pieces_at: Counter[int] = Counter()
        self._ids_at: Counter[int] = Counter()
        self._rows_at: Counter[int] = Counter()

    def more(self, one: Wrote) -> Wrote | None:
        """What of it is new to the client, if anything; raises DiffersError."""
        text = _behind(self._text, self._at, one.text)
        self._at += len(one.text)
        self._text += text
        self._tokens = max(self._tokens, one.tokens)
        for branch, ids in one.ids:
            told = self.ids.setdefault(branch, [])
            told += _behind(told, self._ids_at[branch], ids)
            self._ids_at[branch] += len(ids)
        events = [event for said in one.events if (event := self._event(*said))]
        scores = [row for row in one.scores if self._is_new(row[0])]
        if not (text or events or scores):
            return None
        return Wrote(one.id, text, events, one.step, self._tokens, scores)

    def _event(self, name: str, branch: int, more: Sequence[Any]) -> list[Any] | None:
        if name != "wrote":
            known = (name, branch) in self._once
            self._once.add((name, branch))
            return None if known else [name, branch, more]
        pieces = [piece for piece, _ in more]
        told = self._pieces.setdefault(branch, [])
        new = _behind(told, self._pieces_at[branch], pieces)
        self._pieces_at[branch] += len(pieces)
        told += new
        return [name, branch, list(more)[len(more) - len(new) :]] if new else None

    def _is_new(self, branch: int) -> bool:
        self._rows_at[branch] += 1
        new = self._rows_at[branch] > self._rows[branch]
        self._rows[branch] += new
        return new


def _behind(told: Said, at: int, said: Said) -> Said:
    """What of it has not been told; raises DiffersError."""
    known = told[at : at + len(said)]
    if said[: len(known)] != known:
        raise DiffersError("its second run says something else than its first")
    return said[len(known) :]

"""Log-probabilities in OpenAI's shapes, in the order in which an answer is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...workers.protocol import Wrote

LOWEST = -9999.0  # what JSON can say: there is no -inf in it


@dataclass(slots=True)
class Scores:
    """The scores of a choice's tokens, as rows of `Wrote.scores`.

    Parts are written side by side: the rows of a part are told when all before it have ended, as
    its text is.
    """

    _rows: dict[int, list[Any]] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _at: int = -1
    _characters: int = 0  # of the tokens that were told

    def add(self, message: Wrote) -> None:
        """What a step brought."""
        for row in message.scores:
            self._rows.setdefault(row[0], []).append(row)
        for name, branch, _ in message.events:
            if name == "ended":
                self._ended.add(branch)

    def more(self) -> list[Any]:
        """What can be told now."""
        rows = self.of(self._at)
        while self._at in self._ended or self._is_plain:
            self._at += 1
            rows += self.of(self._at)
        return rows

    def of(self, branch: int) -> list[Any]:
        """What has not been told of a branch."""
        return self._rows.pop(branch, [])

    def rest(self) -> list[Any]:
        """All that has not been told."""
        return [row for branch in sorted(self._rows) for row in self.of(branch)]

    @property
    def _is_plain(self) -> bool:
        """The first part has begun, and there was no outline."""
        return self._at < 0 and (0 in self._rows or 0 in self._ended)

    def shaped(self, rows: Sequence[Any], *, chat: bool) -> dict[str, Any] | None:
        """Rows as an answer has them; None for none."""
        if not rows:
            return None
        if chat:
            return {"content": [_entry(*row) for row in rows]}
        offsets = []
        for _, _, text, _, _ in rows:
            offsets.append(self._characters)
            self._characters += len(text)
        return {
            "tokens": [text for _, _, text, _, _ in rows],
            "token_logprobs": [None if p is None else _floor(p) for _, _, _, p, _ in rows],
            "top_logprobs": [
                None if p is None else {t: _floor(q) for _, t, q in top} for _, _, _, p, top in rows
            ],
            "text_offset": offsets,
        }


def _entry(branch: int, token: int, text: str, logprob: float, top: Sequence[Any]) -> Any:
    """A token of a chat answer; `branch` is the part that it is of, -1 for the outline."""
    own = {"branch": branch, "top_logprobs": [_pair(t, p) for _, t, p in top]}
    return {**_pair(text, logprob), **own}


def _pair(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _floor(logprob), "bytes": list(text.encode())}


def _floor(logprob: float) -> float:
    return max(logprob, LOWEST)

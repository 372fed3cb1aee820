"""Log-probabilities of what a request writes, each branch behind its own context."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...run.engine import Engine
from ...run.scoring import Scorer, TokenScore
from ..wire.protocol import Submit


@dataclass(slots=True)
class ScoreRows:
    """Scores tokens as they come, and keeps them until they are told.

    Args:
        top: the best tokens that are wanted beside each; -1: nothing is wanted. echo: the
            prompt's tokens are scored as well, the first of which has no score. silent: what is
            written is not.
    """

    engine: Engine
    top: int
    echo: bool = False
    silent: bool = False
    _scorers: dict[int, Scorer] = field(default_factory=dict)
    _rows: list[list[Any]] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine, asked: Submit) -> "ScoreRows":
        return cls(engine, asked.logprobs, asked.echo, asked.max_tokens == 0)

    def begin(self, index: int, before: Sequence[int]) -> None:
        """A branch's answer will stand behind these tokens."""
        if self.top < 0:
            return
        models = self.engine.session.models
        scorer = self._scorers[index] = Scorer(models, models.target.max_positions)
        if not self.echo:
            scorer.read(before)
            return
        self._rows.append([index, before[0], self.engine.decode([before[0]]), None, []])
        scorer.read(before[:1])
        self._add(index, scorer.score(before[1:], self.top))

    def score(self, index: int, tokens: Sequence[int]) -> None:
        """The next tokens of a branch."""
        if self.top >= 0 and tokens and not self.silent:
            self._add(index, self._scorers[index].score(tokens, self.top))

    def take(self) -> list[list[Any]]:
        """What has not been told yet."""
        rows = self._rows
        self._rows = []
        return rows

    def _add(self, index: int, scores: Sequence[TokenScore]) -> None:
        decode = self.engine.decode
        for one in scores:
            top = [[token, decode([token]), logprob] for token, logprob in one.top]
            self._rows.append([index, one.token, decode([one.token]), one.logprob, top])

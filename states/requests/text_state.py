"""What a small language model has yet to read, and how long its chains become."""

from collections.abc import Sequence
from dataclasses import asdict
from math import nan

from ...ops.draft.gamma import (
    GammaRecord,
    GammaState,
    Length,
    first_state,
    next_state,
    plan,
    unpacked,
)
from ...ops.draft.gamma_settings import GammaSettings
from ...ops.drafted import Choice
from .branch import Branch
from .draft_state import CommittedRows, DraftState
from .rounds import RoundResult


class TextState(DraftState):
    """Token ids alone, the next root included: a small language model reads the text itself.

    Attributes:
        settings: the length policy of the round; planned: the lengths that it gave.
        lengths: what it remembers of each branch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings: GammaSettings | None = None
        self.planned: list[Length] = []
        self.lengths: dict[int, GammaState] = {}

    def plan_(
        self,
        branches: Sequence[Branch],
        settings: GammaSettings,
        vocabulary: int,
        choice: Choice | None = None,
    ) -> tuple[int, ...]:
        """How many drafts each branch gets in this round; choice: if somebody else says it."""
        self.settings = settings
        if choice is not None:
            self.planned = [Length(nan, nan, one, nan, one, one) for one in choice.lengths]
            return choice.lengths
        self.planned = [
            plan(settings, self._state(one), vocabulary, one.budget - len(one.tokens))
            for one in branches
        ]
        return tuple(one.gamma_eff for one in self.planned)

    def _state(self, branch: Branch) -> GammaState:
        assert self.settings is not None
        return self.lengths.get(branch.owner) or first_state(self.settings)

    def learn(
        self, ran: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        settings, rounds = self.settings, []
        if settings is None or not ran:
            return ()
        width = max(1, *(one.gamma_eff for one in self.planned))
        seen = unpacked(result.side_outputs_SC, width)
        for branch, one, laws, path in zip(ran, self.planned, seen, paths, strict=True):
            accepted = len(path) - 1
            state = next_state(settings, self._state(branch), one, accepted, laws)
            self.lengths[branch.owner] = state
            rounds.append(GammaRecord(**asdict(one), accepted=accepted))
        return tuple(rounds)

    def take_in(self, part: CommittedRows) -> None:
        first = 1 if part.is_path else 0  # the root was taken in when it was drawn
        self._queue(part, part.position + first, [*part.tokens[first:], *part.following])

    def forget(self, owners: Sequence[int]) -> None:
        super().forget(owners)
        for owner in owners:
            self.lengths.pop(owner, None)

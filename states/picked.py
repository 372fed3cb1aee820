"""The target's features on their way to the drafter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .bim import NOBODY, Segment, Span
from .branches import Branch, Request, Stage


class Picked:
    """Which feature rows of a forward the drafter needs, gathered in one index_select."""

    def __init__(self, features_QF: Tensor | None) -> None:
        self.features_QF = features_QF
        self.parts: list[tuple[int, int, int, Sequence[int], Tensor]] = []

    def add(self, branch: Branch, position: int, tokens: Sequence[int], rows: list[int]) -> None:
        """Rows of a running branch; `tokens` follow each of them (one fewer if it has ended)."""
        if self.features_QF is None:
            return
        features_RF = self._rows(rows)
        branch.feature = features_RF[-1]
        owner, prefix = branch.owner, branch.request.prefix_owner
        if branch.stage is Stage.RUNNING:
            self._add(owner, prefix, position, tokens, features_RF)
        elif branch.is_root:  # what follows its last row is paired by whoever continues there
            self._add(owner, prefix, position, tokens[: len(rows) - 1], features_RF)

    def add_prompt(self, branch: Branch, tokens: Sequence[int], rows: list[int]) -> None:
        """A prompt: its first row pairs the last shared feature with its own first token."""
        if self.features_QF is None:
            return
        shared = branch.request.prefix_feature
        if shared is not None:
            owner, prefix = branch.owner, branch.request.prefix_owner
            self._add(owner, prefix, branch.start - 1, branch.prompt[:1], shared[None])
        self.add(branch, branch.start, tokens, rows)

    def add_prefix(self, request: Request, span: Span, rows: list[int]) -> None:
        """Shared rows; the last one's feature is kept for the branches."""
        if self.features_QF is None:
            return
        features_RF, shared = self._rows(rows), request.prefix_feature
        if shared is not None:
            self._add(span.owner, NOBODY, span.position - 1, span.tokens[:1], shared[None])
        self._add(span.owner, NOBODY, span.position, span.tokens[1:], features_RF)
        request.prefix_feature = features_RF[-1]

    def _rows(self, rows: list[int]) -> Tensor:
        assert self.features_QF is not None
        index = torch.tensor(rows, dtype=torch.int64, device=self.features_QF.device)
        return self.features_QF.index_select(0, index)

    def _add(
        self, owner: int, prefix: int, position: int, tokens: Sequence[int], features_RF: Tensor
    ) -> None:
        size = len(tokens)
        if size:
            self.parts.append((owner, prefix, position, tokens, features_RF[:size]))

    def segments(self) -> list[Segment]:
        return [Segment(*part) for part in self.parts]

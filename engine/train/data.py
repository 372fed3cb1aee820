"""Packed training rows: several samples per row, each seeing only itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

GOLD = 1.0  # weight of what the model has to write; what it reads counts less


@dataclass(slots=True)
class Tokens:
    """A sample as ids with, per token, loss weight, segment (0: trunk) and position."""

    ids: list[int]
    weights: list[float]
    segments: list[int]
    positions: list[int]

    @classmethod
    def linear(cls, ids: list[int], weights: list[float]) -> Tokens:
        return cls(ids, weights, [0] * len(ids), list(range(len(ids))))


Source = Callable[[int], Tokens]
"""An endless row of samples: the sample of a number, always the same."""


@dataclass(slots=True)
class TrainingBatch:
    """Packed `samples`: [rows, length] each; mask [rows, 1, length, length]: a query sees a key."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    weights: Tensor
    mask: Tensor
    samples: list[list[Tokens]]

    def written(self) -> Tensor:
        """float [rows, length], 1 where the token itself is one that the model has to write."""
        counted = (self.weights >= GOLD).float()
        return torch.cat([torch.zeros_like(counted[:, :1]), counted[:, :-1]], dim=1)

    def to(self, device: torch.device) -> TrainingBatch:
        names = ("ids", "positions", "labels", "weights", "mask")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def trimmed(tokens: Tokens, length: int) -> Tokens:
    """The sample without what goes past ``length``."""
    return Tokens(*(getattr(tokens, part.name)[:length] for part in fields(tokens)))


def pack(rows: list[list[Tokens]], length: int) -> TrainingBatch:
    shape = (len(rows), length)
    ids, positions, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    samples, segments = (torch.full(shape, -1, dtype=torch.long) for _ in range(2))
    weights = torch.zeros(shape)
    for r, row in enumerate(rows):
        start = 0
        for number, tokens in enumerate(row):
            span = slice(start, start + len(tokens.ids))
            ids[r, span] = torch.tensor(tokens.ids)
            positions[r, span] = torch.tensor(tokens.positions)
            segments[r, span] = torch.tensor(tokens.segments)
            weights[r, span] = torch.tensor(tokens.weights)
            samples[r, span] = number
            start = span.stop
    labels[:, :-1] = ids[:, 1:]
    weights = torch.cat([weights[:, 1:], weights.new_zeros(len(rows), 1)], dim=1)
    same = samples[:, :, None] == samples[:, None, :]
    related = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    return TrainingBatch(
        ids, positions, labels, weights, mask=(same & related).tril()[:, None], samples=rows
    )


@dataclass(slots=True)
class Packer:
    """Endless batches of about ``tokens`` tokens; ``index`` is the next sample's number."""

    source: Source
    tokens: int
    length: int
    index: int = 0

    def batches(self) -> Iterator[TrainingBatch]:
        """Rows of ``length`` ids, filled first-fit with whole samples."""
        while True:
            rows: list[list[Tokens]] = [[] for _ in range(max(1, self.tokens // self.length))]
            free_tokens = [self.length] * len(rows)
            misses = 0
            while misses < 6 and sum(free_tokens) > self.tokens // 50:
                tokens = trimmed(self.source(self.index), self.length)
                fits = [i for i, free in enumerate(free_tokens) if free >= len(tokens.ids)]
                self.index += 1
                if fits:
                    best = min(fits, key=lambda i: free_tokens[i])
                    rows[best].append(tokens)
                    free_tokens[best] -= len(tokens.ids)
                else:
                    misses += 1
            yield pack(rows, self.length)

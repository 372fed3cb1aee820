"""Packed training rows: several samples per row, each seeing only itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

GOLD = 1.0  # weight of what the model has to write; what it reads counts less


@dataclass(slots=True)
class Tokens:
    """A sample as ids with, per token, loss weight, segment (0: trunk) and position."""

    ids: list[int]
    weights: list[float]
    segments: list[int]
    positions: list[int]

    @classmethod
    def linear(cls, ids: list[int], weights: list[float]) -> "Tokens":
        return cls(ids, weights, [0] * len(ids), list(range(len(ids))))


Source = Callable[[int], Tokens]  # endless: the sample of a number, always the same


@dataclass(slots=True)
class TrainingBatch:
    """Packed samples: [rows, length] each; mask [rows, 1, length, length]: a query sees a key."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    weights: Tensor
    mask: Tensor

    def written(self) -> Tensor:
        """float [rows, length], 1 where the token itself is one that the model has to write."""
        return pad((self.weights >= GOLD)[:, :-1].float(), (1, 0))

    def to(self, device: torch.device) -> "TrainingBatch":
        return TrainingBatch(*(getattr(self, part.name).to(device) for part in fields(self)))


def trimmed(tokens: Tokens, length: int) -> Tokens:
    """The sample without what goes past ``length``."""
    return Tokens(*(getattr(tokens, part.name)[:length] for part in fields(tokens)))


def pack(rows: list[list[Tokens]], length: int) -> TrainingBatch:
    shape = (len(rows), length)
    ids, positions = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
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
    labels, next_weights = (pad(x[:, 1:], (0, 1)) for x in (ids, weights))
    same = samples[:, :, None] == samples[:, None, :]
    related = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    mask = (same & related).tril()[:, None]
    return TrainingBatch(ids, positions, labels, next_weights, mask=mask)


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

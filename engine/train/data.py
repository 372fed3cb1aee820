"""Packed training rows: several samples per row, each seeing only itself."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
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


@dataclass(frozen=True)
class TrainingBatch:
    """Packed samples, [rows, length] each; samples: their numbers in a row, -1 for padding."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    weights: Tensor
    samples: Tensor
    segments: Tensor

    @cached_property
    def mask(self) -> Tensor:
        """bool [rows, 1, length, length]: a query sees a key."""
        same = self.samples[:, :, None] == self.samples[:, None, :]
        trunk = self.segments[:, None, :] == 0
        related = (self.segments[:, :, None] == self.segments[:, None, :]) | trunk
        return (same & related).tril()[:, None]

    def written(self) -> Tensor:
        """float [rows, length], 1 where the token itself is one that the model has to write."""
        return pad((self.weights >= GOLD)[:, :-1].float(), (1, 0))

    def to(self, device: torch.device) -> "TrainingBatch":
        return TrainingBatch(*(getattr(self, part.name).to(device) for part in fields(self)))


def trimmed(tokens: Tokens, length: int) -> Tokens:
    """The sample without what goes past ``length``."""
    return Tokens(*(getattr(tokens, part.name)[:length] for part in fields(tokens)))


def pack(rows: list[list[Tokens]], length: int) -> TrainingBatch:
    def filled(of: Callable[[int, Tokens], Iterable[float]], empty: float, kind: type) -> Tensor:
        table: npt.NDArray[Any] = np.full((len(rows), length), empty, kind)
        for r, row in enumerate(rows):
            values = [value for number, tokens in enumerate(row) for value in of(number, tokens)]
            table[r, : len(values)] = values
        return torch.from_numpy(table)

    ids = filled(lambda _, tokens: tokens.ids, 0, np.int64)
    weights = filled(lambda _, tokens: tokens.weights, 0.0, np.float32)
    labels, next_weights = (pad(x[:, 1:], (0, 1)) for x in (ids, weights))
    return TrainingBatch(
        ids,
        positions=filled(lambda _, tokens: tokens.positions, 0, np.int64),
        labels=labels,
        weights=next_weights,
        samples=filled(lambda number, tokens: repeat(number, len(tokens.ids)), -1, np.int64),
        segments=filled(lambda _, tokens: tokens.segments, -1, np.int64),
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

"""Acceptance on held-out samples: the rounds that a chain of drafts would take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .data import Batch


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt with the target's greedy answer.

    kind: names its group in the log. ids: prompt and answer. first: where the answer begins.
    """

    kind: str
    ids: tuple[int, ...]
    first: int

    def batch(self, device: torch.device) -> Batch:
        """The sample alone, [1, S]; nothing in it has a weight."""
        ids = torch.tensor([self.ids])
        size = ids.shape[1]
        labels = torch.cat((ids[:, 1:], ids[:, :1] * 0), 1)
        mask = torch.ones(1, 1, size, size, dtype=torch.bool).tril()
        return Batch(ids, torch.arange(size)[None], labels, torch.zeros(1, size), mask).to(device)


Hits = Callable[[HeldOutPrompt], Tensor]
"""bool [S, K]: where token t is a round's root, whether its draft k is token t + 1 + k."""


def rounds(hits_SK: Tensor, first: int) -> list[int]:
    """Tokens that each round of a chain commits, the target's own included.

    Whether a draft is right matters only while all before it were, and then it was made behind the
    true tokens; so one look at every root gives the rounds that a run would take.
    """
    rows: list[list[bool]] = hits_SK.tolist()
    root, last, gains = first, len(rows) - 1, []
    while root < last:
        right = next((k for k, hit in enumerate(rows[root]) if not hit), len(rows[root]))
        gains.append(min(right + 1, last - root))
        root += gains[-1]
    return gains


def held_out_tau(samples: Iterable[HeldOutPrompt], hits: Hits) -> dict[str, float]:
    """Tokens per round over all samples, and for each kind of them."""
    gains: defaultdict[str, list[int]] = defaultdict(list)
    for sample in samples:
        found = rounds(hits(sample), sample.first)
        gains[f"held_{sample.kind}"] += found
        gains["held_tau"] += found
    return {kind: sum(found) / len(found) for kind, found in sorted(gains.items()) if found}

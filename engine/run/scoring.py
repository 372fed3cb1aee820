"""How likely the target finds given tokens: forwards beside those that decode."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...ops.attention.metadata import AttentionMetadata
from ...ops.host import HostReader
from ...ops.kv.pool import KVCache
from ...ops.layer_plan import LayerStatus
from ..models import Models

ROWS = 256  # whose logits are there at once


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a token behind all before it, of the raw logits; and the best there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Scorer:
    """Scores tokens as they are written, behind a context that only grows; its K and V are kept in
    a pool of its own.

    Args:
        most: tokens of the context and of what is written behind it, at most.
    """

    def __init__(self, models: Models, most: int) -> None:
        target = models.target
        shape = (target.num_layers, target.kv_heads, target.head_dim)
        self._models = models
        self._kv = KVCache(*shape, most, dtype=models.dtype, device=models.device)
        self._waiting: list[int] = []  # the last of them has no row before another one follows
        self._done = 0

    def read(self, ids: Sequence[int]) -> None:
        """Tokens that nobody wants scores of."""
        self._waiting += ids

    def score(self, ids: Sequence[int], top: int) -> list[TokenScore]:
        """The scores of the next tokens; the first of all has none. top: how many of the best are
        wanted beside each."""
        known = len(self._waiting)
        rows = [*self._waiting, *ids]
        found: list[TokenScore] = []
        for start in range(0, len(rows) - 1, ROWS):
            stop = min(start + ROWS, len(rows) - 1)
            first = min(max(start, known - 1), stop - 1)
            logits_RV = self._forward(rows[start:stop], first - start)
            if stop > known - 1:
                found += _read(logits_RV, self._ids(rows[first + 1 : stop + 1]), top)
        self._waiting = rows[-1:]
        return found

    def _forward(self, ids: Sequence[int], tip: int) -> torch.Tensor:
        """Logits [R, V] of the rows from number `tip` on; all rows stay in the pool."""
        target = self._models.target
        device = self._models.device
        end = self._done + len(ids)
        steps_1Q = torch.arange(self._done, end, device=device)[None]
        steps_1K = torch.arange(end, device=device)[None]
        metadata = AttentionMetadata.dense(steps_1Q[:, :, None] >= steps_1K[:, None], steps_1K)
        statuses = (LayerStatus.FULL,) * target.num_layers
        tips_R = torch.arange(tip, len(ids), device=device)
        with torch.inference_mode():
            output = target.forward(
                self._ids(ids)[None], steps_1Q, steps_1Q, metadata, self._kv, statuses, tips_R, ()
            )
        self._done = end
        logits_RV: torch.Tensor = output.logits_RV
        return logits_RV

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(ids), device=self._models.device)


def _read(logits_RV: torch.Tensor, ids_R: torch.Tensor, top: int) -> list[TokenScore]:
    logs_RV = logits_RV.double().log_softmax(-1)
    own_R1 = logs_RV.gather(1, ids_R[:, None])
    best = logs_RV.topk(min(max(top, 1), logs_RV.shape[1]), dim=-1)
    numbers_RC = torch.cat([own_R1, best.values], 1).view(torch.int64)
    flat = HostReader().read(torch.cat([ids_R[:, None], numbers_RC, best.indices], 1))
    scores = []
    for row in flat:
        floats = row[1 : -best.indices.shape[1]].view("float64").tolist()
        pairs = zip(row[-best.indices.shape[1] :].tolist(), floats[1:], strict=True)
        scores.append(TokenScore(int(row[0]), floats[0], tuple(pairs)[:top]))
    return scores

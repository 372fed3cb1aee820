"""How likely the target finds given tokens: one forward over all of them, in a pool of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...ops.attention.metadata import AttentionMetadata
from ...ops.host import HostReader
from ...ops.kv.pool import KVCache
from ...ops.types import LayerStatus
from ..models import Models

ROWS = 256  # whose logits are there at once


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a token behind all before it, of the raw logits; and the best there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def score(models: Models, ids: Sequence[int], first: int, top: int) -> list[TokenScore]:
    """The scores of the ids from number `first` on, which is 1 at least; top: how many of the best
    are wanted beside each."""
    if len(ids) <= first:
        return []
    target, device, count = models.target, models.device, len(ids) - 1
    shape = (target.num_layers, target.kv_heads, target.head_dim)
    kv = KVCache(*shape, count, dtype=models.dtype, device=device)
    ids_Q = torch.tensor(list(ids), device=device)
    steps_1Q = torch.arange(count, device=device)[None]
    found: list[TokenScore] = []
    with torch.inference_mode():
        for start in range(first - 1, count, ROWS):
            tips_R = steps_1Q[0, start : start + ROWS]
            output = target.forward(
                ids_Q[None, :-1],
                steps_1Q,
                steps_1Q,
                AttentionMetadata.causal(count, device),
                kv,
                (LayerStatus.FULL,) * target.num_layers,
                tips_R,
                (),
            )
            found += _read(output.logits_RV, ids_Q[tips_R + 1], top)
    return found


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

"""One sequence in a KV pool, its rows at any slots: what tests drive a model with."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.forward import TargetOutput
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import decode_plan

GOLDEN = Path(__file__).parents[1] / "golden" / "eagle"


def pool(model: torch.nn.Module, capacity: int, dtype: torch.dtype = torch.float32) -> KVCache:
    """Filled with a large number: whoever reads a slot that holds nothing is caught."""
    kv = KVCache(model.num_layers, model.kv_heads, model.head_dim, capacity, dtype=dtype)
    kv.data.fill_(1e3)
    return kv


def causal(rows: int) -> AttentionPlan:
    """Rows 0 .. rows - 1 at the slots of the same number."""
    positions = torch.arange(rows)[None]
    return AttentionPlan.dense(torch.ones(1, rows, rows, dtype=torch.bool).tril(), positions)


@dataclass
class Pooled:
    """A decoder and its pool; `slots[p]` is where the row at position p lies."""

    model: Decoder
    slots: Tensor
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.kv = pool(self.model, int(self.slots.max()) + 1, self.dtype)

    def visible(self, start: int, rows: int) -> AttentionPlan:
        used = self.slots[: start + rows]
        extent = int(used.max()) + 1
        positions = torch.full((1, extent), 10**6)
        positions[0, used] = torch.arange(start + rows)
        queries = torch.arange(start, start + rows)
        return AttentionPlan.dense(positions[:, None, :] <= queries[None, :, None], positions)

    def forward(self, ids: Tensor, start: int, taps: tuple[int, ...] = ()) -> TargetOutput:
        """All logits of the rows of ids [Q], the first of which stands at `start`."""
        rows = len(ids)
        positions = torch.arange(start, start + rows)
        with torch.inference_mode():
            return self.model(
                ids[None],
                positions[None],
                self.slots[positions][None],
                self.visible(start, rows),
                self.kv,
                decode_plan(self.model.num_layers),
                torch.arange(rows),
                taps,
            )

    def chunks(self, ids: Tensor, sizes: list[int]) -> Tensor:
        """Logits of the whole sequence, computed piece by piece."""
        pieces, start = ids.split(sizes), 0
        found = []
        for piece in pieces:
            found.append(self.forward(piece, start).logits_RV)
            start += len(piece)
        return torch.cat(found)

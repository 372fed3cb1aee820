"""One sequence in a KV pool, its rows at any slots, by a target alone or with a DFlash drafter."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.models.drafters.dflash import DFlashDraftModel
from specsot.models.load.weights import load_dflash, load_target
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.blend import Blend
from specsot.ops.forward import TargetOutput
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import LayerPlan, decode_plan

EAGLE_GOLDEN = Path(__file__).parents[1] / "golden" / "eagle"
DFLASH_GOLDEN = Path(__file__).parents[1] / "golden" / "dflash"


def pool(
    model: torch.nn.Module, capacity: int, dtype: torch.dtype = torch.float32, rows: int = 1
) -> KVCache:
    """Filled with a large number: whoever reads a slot that holds nothing is caught."""
    kv = KVCache(model.num_layers, model.kv_heads, model.head_dim, capacity, rows, dtype=dtype)
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
        return self.run(ids, start, self.visible(start, len(ids)), taps=taps)

    def run(
        self,
        ids: Tensor,
        first: int,
        attention: AttentionPlan,
        *,
        positions: Tensor | None = None,
        plan: LayerPlan | None = None,
        taps: tuple[int, ...] = (),
        blend: Blend | None = None,
    ) -> TargetOutput:
        """Rows from number `first` on; a row without a position is at that of its number."""
        rows = torch.arange(first, first + len(ids))
        with torch.inference_mode():
            return self.model(
                ids[None],
                (rows if positions is None else positions)[None],
                self.slots[rows][None],
                attention,
                self.kv,
                plan or decode_plan(self.model.num_layers),
                torch.arange(len(ids)),
                taps,
                blend,
            )

    def chunks(self, ids: Tensor, sizes: list[int]) -> Tensor:
        pieces, start = ids.split(sizes), 0
        found = []
        for piece in pieces:
            found.append(self.forward(piece, start).logits_RV)
            start += len(piece)
        return torch.cat(found)


def golden_pair() -> tuple[Decoder, DFlashDraftModel]:
    target = load_target(DFLASH_GOLDEN / "target")
    return target, load_dflash(DFLASH_GOLDEN / "draft", target)


@dataclass
class Run:
    """What one run did; `steps` hold (start, block ids, the target's answers, context rows)."""

    ids: list[int]
    accepted: list[int] = field(default_factory=list)
    steps: list[tuple[int, list[int], list[int], int]] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)


class Pair:
    """Both models with their pools; rows lie at slots of a random order."""

    def __init__(
        self, target: Decoder, drafter: DFlashDraftModel, capacity: int = 128, seed: int = 0
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.drafter, self.kv = drafter, pool(drafter, capacity, drafter.fc.weight.dtype)
        self.run = Pooled(target, torch.randperm(capacity, generator=draw))
        self.slots = torch.randperm(capacity, generator=draw)

    def take_in(self, taps_QF: Tensor, start: int) -> None:
        """The features of tokens at positions from `start` on."""
        positions = torch.arange(start, start + len(taps_QF))
        with torch.inference_mode():
            context = self.drafter.fuse(taps_QF)
            self.drafter.write_context_(context, positions, self.slots[positions], self.kv)

    def visible(self, start: int, size: int) -> AttentionPlan:
        """Everything before the block and the block itself."""
        used = self.slots[: start + size]
        extent = int(used.max()) + 1
        positions, mask = torch.full((1, extent), 10**6), torch.zeros(1, size, extent).bool()
        positions[0, used], mask[:, :, used] = torch.arange(start + size), True
        return AttentionPlan.dense(mask, positions)

    def draft(self, anchor: int, start: int, size: int) -> Tensor:
        """hidden [size, H] of a block whose anchor stands at `start`."""
        ids = torch.full((1, size), self.drafter.mask_token_id)
        ids[0, 0] = anchor
        positions = torch.arange(start, start + size)[None]
        with torch.inference_mode():
            visible = self.visible(start, size)
            return self.drafter(ids, positions, self.slots[positions], visible, self.kv)[0]

    def generate(
        self,
        prompt: list[int],
        new: int,
        stops: list[int],
        size: int,
        answer: Callable[[int, Tensor], list[int]] = lambda step, logits: logits.argmax(
            -1
        ).tolist(),
    ) -> Run:
        """Blocks until `new` tokens or a stop id; `answer` is the target's choice after each row
        of a step's block (step -1: after the prompt)."""
        taps = self.drafter.tap_ids
        out = self.run.forward(torch.tensor(prompt), 0, taps)
        run, start = Run(prompt + answer(-1, out.logits_RV[-1:])), len(prompt)
        fresh = out.taps_QF
        while start < len(prompt) + new:
            assert fresh is not None
            self.take_in(fresh, start - len(fresh))
            hidden = self.draft(run.ids[-1], start, size)
            drafts = self.drafter.logits(hidden[1:]).argmax(-1)
            block = torch.cat((torch.tensor(run.ids[-1:]), drafts))
            run.taps.append(fresh)
            run.hidden.append(hidden)
            out = self.run.forward(block, start, taps)
            said, rows = answer(len(run.steps), out.logits_RV), len(fresh)
            agree = (drafts == torch.tensor(said[:-1])).long().cumprod(0).sum()
            count = int(agree) + 1
            run.steps.append((start, block.tolist(), said, rows))
            run.accepted.append(count)
            run.ids += [*block[1:count].tolist(), said[count - 1]]
            assert out.taps_QF is not None
            fresh, start = out.taps_QF[:count], start + count
            if set(run.ids[len(prompt) :]) & set(stops):
                break
        run.ids = cut(run.ids[: len(prompt) + new], len(prompt), stops)
        return run


def cut(ids: list[int], prompt: int, stops: list[int]) -> list[int]:
    """Nothing after the first stop id of the answer."""
    ends = [i + 1 for i in range(prompt, len(ids)) if ids[i] in stops]
    return ids[: ends[0]] if ends else ids

"""Training of a DFlash drafter: blocks of masks behind anchors in the answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.drafters.dflash import DFlashDraftModel, TargetEnds
from ...models.drafters.dflash_config import DFlashConfig, Reach, default_layer_ids
from ..errors import UsageError
from .data import Batch
from .dflash_blocks import Blocks, Packing
from .dflash_loss import OnlineDFlashModel
from .files import replace_files, save_weights
from .held_out import HeldOutPrompt
from .lessons import lessons
from .loop import DrafterTraining, LossReport, train
from .optim import MuonAdamW
from .teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class DFlashTraining(DrafterTraining):
    """A DFlash drafter's shape and how it is trained.

    Attributes:
        layers: of the drafter.
        intermediate: width of its MLP; None for the target's.
        block_size: rows of a block, the anchor included.
        num_anchors: blocks per row of ``length`` tokens, drawn anew for every step.
        loss_decay_gamma: row k counts exp(-(k - 1) / gamma); None for the paper's of that size.
        target_layer_ids: layers (from 0) whose outputs the drafter reads; None for DFlash's rule.
        mask_token_id: stands where a token is to be drafted; None for `mask_id`'s choice.
    """

    layers: int = 2
    intermediate: int | None = 1536
    block_size: int = 8
    num_anchors: int = 128
    loss_decay_gamma: float | None = None
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None


def mask_id(teacher: Teacher) -> int:
    """The tokenizer's mask, else an unused row of the embedding, else the pad or end token."""
    tokenizer, rows = teacher.tokenizer, teacher.config.vocab_size
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < rows:
        return len(tokenizer)
    ends = [tokenizer.pad_token_id, tokenizer.eos_token_id]
    return next(int(i) for i in [*ends, *teacher.stops] if i is not None)


def drafter_config(config: DFlashTraining, teacher: Teacher) -> DFlashConfig:
    """The drafter's shape: the target's width, heads and positions."""
    target = teacher.config
    ids = config.target_layer_ids or default_layer_ids(target.num_layers, config.layers)
    mask = mask_id(teacher) if config.mask_token_id is None else config.mask_token_id
    if not 0 <= min(ids) <= max(ids) < target.num_layers:
        raise UsageError(f"--target-layer-ids {ids}: the target has {target.num_layers} layers")
    if not 0 <= mask < target.vocab_size:
        raise UsageError(f"--mask-token-id {mask}: the target has {target.vocab_size} tokens")
    return DFlashConfig(
        path=config.out / "config.json",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate or target.intermediate_size,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        eps=target.eps,
        rope=target.rope,
        reaches=(Reach(),) * config.layers,
        layer_ids=ids,
        block_size=config.block_size,
        mask_token_id=mask,
        target_layers=target.num_layers,
    )


def new_drafter(config: DFlashTraining, teacher: Teacher) -> DFlashDraftModel:
    """An untrained drafter."""
    torch.manual_seed(config.seed)
    ends = TargetEnds(teacher.embedding, teacher.head)
    drafter = DFlashDraftModel(drafter_config(config, teacher), ends)
    for parameter in drafter.parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
    return drafter.to(teacher.device)


class DFlashCourse:
    """See `train_loop.Course`."""

    name = "dflash"

    def __init__(self, config: DFlashTraining, teacher: Teacher) -> None:
        self.teacher = teacher
        self.model = new_drafter(config, teacher)
        self.online = OnlineDFlashModel(
            self.model, config.num_anchors, gamma=config.loss_decay_gamma
        )
        self.optimizer = MuonAdamW(self.model, config.lr, config.head_lr)

    def teach(self, batch: Batch, draw: torch.Generator) -> LossReport:
        seen = self.teacher.look(batch, self.model.tap_ids)
        packing = Packing(batch.positions, batch.mask[:, 0])
        with self.teacher.low_precision():
            step = self.online(
                batch.ids, seen.features_BSF, batch.written(), generator=draw, packing=packing
            )
        return LossReport(step.loss, {"accuracy": step.accuracy})

    def hits(self, sample: HeldOutPrompt) -> Tensor:
        batch = sample.batch(self.teacher.device)
        seen = self.teacher.look(batch, self.model.tap_ids, exact=True)
        roots = torch.arange(sample.first, batch.ids.shape[1], device=batch.ids.device)[None]
        blocks = Blocks(roots, roots >= 0, self.online.block_size, batch.ids.shape[1])
        hidden_BQH = self.online.hidden(batch.ids, seen.features_BSF, blocks)
        drafts_Q = self.model.logits(hidden_BQH[0]).argmax(-1)
        inside_MP = (blocks.places_BMP < blocks.length)[0]
        right_MP = (drafts_Q.view(inside_MP.shape) == blocks.at(batch.ids)[0]) & inside_MP
        before = right_MP.new_zeros(sample.first, right_MP.shape[1])
        return torch.cat((before, right_MP))[:, 1:]

    def export(self, out: Path) -> None:
        with replace_files(out) as folder:
            save_weights(self.model.published(), folder)
            text = json.dumps(self.model.config.to_json(), indent=2) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")


def train_dflash(config: DFlashTraining) -> Path:
    """Train, saving now and then; returns the folder of the exported drafter."""
    teacher = Teacher(config.target, config.device)
    course = DFlashCourse(config, teacher)
    found = lessons(config, teacher)
    return train(config, course, found.source, found.held)

"""Training of a DFlash drafter: blocks of masks behind anchors in the answers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.drafters.config import DFlashConfig, Reach, default_layer_ids
from ...models.drafters.dflash import DFlashDraftModel, TargetEnds
from ..errors import UsageError
from .data import TrainingBatch
from .dflash_blocks import Blocks, Packing
from .dflash_loss import OnlineDFlashModel
from .files import export_drafter
from .lessons import HeldOutPrompt, LessonSource, frequent_ids
from .loop import LossReport, train
from .optim import MuonAdamW
from .settings import DFlashTraining
from .teacher import Teacher, load_teacher


def mask_id(teacher: Teacher) -> int:
    """The tokenizer's mask, else an unused row of the embedding, else the pad or end token."""
    tokenizer = teacher.tokenizer
    size = len(teacher.tokenizer)
    unused = size if size < teacher.config.vocab_size else None
    ends = (tokenizer.pad_token_id, tokenizer.eos_token_id, *teacher.stops)
    return next(int(i) for i in (tokenizer.mask_token_id, unused, *ends) if i is not None)


def drafter_config(settings: DFlashTraining, teacher: Teacher) -> DFlashConfig:
    """The drafter's shape: the target's width, heads and positions."""
    target = teacher.config
    ids = settings.layer_ids or default_layer_ids(target.num_layers, settings.layers)
    mask = mask_id(teacher) if settings.mask_token_id is None else settings.mask_token_id
    if not 0 <= min(ids) <= max(ids) < target.num_layers:
        raise UsageError(f"--target-layer-ids {ids}: the target has {target.num_layers} layers")
    if not 0 <= mask < target.vocab_size:
        raise UsageError(f"--mask-token-id {mask}: the target has {target.vocab_size} tokens")
    own = {"path": settings.out / "config.json", "intermediate_size": settings.intermediate}
    return DFlashConfig(
        **target.sizes() | own,
        reaches=(Reach(),) * settings.layers,
        layer_ids=ids,
        block_size=settings.block_size,
        mask_token_id=mask,
        target_layers=target.num_layers,
    )


def new_drafter(settings: DFlashTraining, teacher: Teacher) -> DFlashDraftModel:
    """An untrained drafter."""
    torch.manual_seed(settings.seed)
    ends = TargetEnds(teacher.embedding, teacher.head)
    drafter = DFlashDraftModel(drafter_config(settings, teacher), ends)
    for parameter in drafter.parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
    inherit(drafter, teacher)
    return drafter.to(teacher.device)


@torch.no_grad()
def inherit(drafter: DFlashDraftModel, teacher: Teacher) -> None:
    """The layers begin as the target's last ones, which read the last tap.

    What has another shape than the target's begins as chance has it.
    """
    target = teacher.model.base_model
    drafter.norm.weight.copy_(target.norm.weight)
    drafter.hidden_norm.weight.copy_(target.layers[-1].input_layernorm.weight)
    drafter.fc.weight[:, -len(drafter.fc.weight) :].fill_diagonal_(1.0)
    for mine, layer in zip(reversed(drafter.stack), reversed(target.layers), strict=False):
        theirs = dict(layer.named_parameters())
        for name, own in mine.named_parameters():
            if name in theirs and theirs[name].shape == own.shape:
                own.copy_(theirs[name])


class DFlashCourse:
    """See `loop.Course`."""

    name = "dflash"

    def __init__(
        self, settings: DFlashTraining, teacher: Teacher, candidates: Tensor | None = None
    ) -> None:
        self.teacher = teacher
        self.model = new_drafter(settings, teacher)
        self.online = OnlineDFlashModel(
            self.model,
            settings.num_anchors,
            settings.loss_decay_gamma,
            candidates=candidates,
            distillation=settings.distillation,
        )
        self.optimizer = MuonAdamW(self.model, settings.lr, settings.head_lr)

    def teach(self, batch: TrainingBatch, draw: torch.Generator) -> LossReport:
        told = self.teacher.look(batch, self.model.tap_ids)
        with self.teacher.low_precision():
            step = self.online(
                batch.ids,
                told.features_BSF,
                batch.written(),
                generator=draw,
                packing=Packing(batch.positions, batch.mask[:, 0]),
                told_BSH=told.hidden_BSH if self.online.distillation else None,
            )
        return step.loss, {"accuracy": step.accuracy}

    def hits(self, sample: HeldOutPrompt) -> Tensor:
        batch = sample.batch(self.teacher.device)
        features_BSF = self.teacher.look(batch, self.model.tap_ids, exact=True).features_BSF
        roots = torch.arange(sample.first, batch.ids.shape[1], device=batch.ids.device)[None]
        blocks = Blocks(roots, roots >= 0, self.online.block_size, batch.ids.shape[1])
        hidden_BQH = self.online.hidden(batch.ids, features_BSF, blocks)
        drafts_Q = self.model.logits(hidden_BQH[0]).argmax(-1)
        inside_MP = (blocks.places_BMP < blocks.length)[0]
        right_MP = (drafts_Q.view(inside_MP.shape) == blocks.at(batch.ids)[0]) & inside_MP
        before = right_MP.new_zeros(sample.first, right_MP.shape[1])
        return torch.cat((before, right_MP))[:, 1:]

    def export(self, out: Path) -> None:
        export_drafter(self.model, out)


def train_dflash(settings: DFlashTraining, source: LessonSource) -> Path:
    """Train, saving now and then; returns the folder of the exported drafter."""
    teacher = load_teacher(settings)
    size = settings.loss_vocabulary
    lessons = source(settings, teacher)
    whole = teacher.config.vocab_size
    candidates = None if size is None else frequent_ids(lessons, min(size, whole), whole)
    return train(settings, DFlashCourse(settings, teacher, candidates), lessons)

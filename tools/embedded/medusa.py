"""Training of Medusa's heads (arXiv 2401.10774): the cross-entropy of each head with the tokens
that it shall draft, with a lower weight for later heads."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from specsot.engine.prepare.options import option
from specsot.engine.train.data import GOLD, TrainingBatch
from specsot.engine.train.dataset import HeldOutPrompt
from specsot.engine.train.eagle import shift
from specsot.engine.train.loop import LossReport, Trainer, replace_files, write_json
from specsot.engine.train.settings import DrafterTraining
from specsot.engine.train.teacher import Teacher
from specsot.models.drafters.medusa import Medusa, MedusaConfig


@dataclass(frozen=True, kw_only=True)
class MedusaTraining(DrafterTraining):
    heads: int = option(3, "Drafted levels; published: 5.", min=1)
    blocks: int = option(2, "Residual blocks of a head; published: 1.", min=1)
    decay: float = option(0.8, "Weight of a head over the one before.", min=0.0)
    own_heads: bool = option(False, "Products of their own, as published, not the target's head.")


class MedusaTrainer(Trainer):
    name = "medusa"
    settings: MedusaTraining
    model: Medusa

    @torch.no_grad()
    def __init__(self, settings: MedusaTraining, teacher: Teacher) -> None:
        """Heads that start as the target's own: their blocks add nothing."""
        target = teacher.config
        config = MedusaConfig(
            path=settings.out / "config.json",
            heads=settings.heads,
            blocks=settings.blocks,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
        )
        drafter = Medusa(config, (target.num_layers,)).to(teacher.device)
        if not settings.own_heads:
            head_VH = nn.Parameter(teacher.head, requires_grad=False)
            drafter.borrow_(drafter.ends, head_VH)
        for name, view in drafter.published().items():
            if name in drafter.ends:
                view.copy_(teacher.head)
            else:
                view.zero_()
        super().__init__(settings, teacher, drafter)

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> LossReport:
        hidden_RH = self.teacher.read(batch).hidden_BSH.flatten(0, 1)
        steps = range(1, self.settings.heads + 1)
        labels_RD = torch.stack([shift(batch.labels, step).flatten() for step in steps], 1)
        weights_RD = torch.stack([shift(batch.weights, step).flatten() for step in steps], 1)
        counted_RD = weights_RD >= GOLD
        rows = counted_RD.any(1).nonzero().flatten()
        with self.teacher.low_precision():
            logits_RDV = self.model.forward(hidden_RH[rows].float())
        labels_RD = labels_RD[rows]
        counted_RD = counted_RD[rows]
        losses_RD = F.cross_entropy(logits_RDV.transpose(1, 2), labels_RD, reduction="none")
        right_RD = logits_RDV.argmax(-1) == labels_RD
        count_D = counted_RD.sum(0).clamp_min(1)
        losses_D = (losses_RD * counted_RD).sum(0) / count_D
        accuracies_D = (right_RD & counted_RD).sum(0) / count_D
        decay_D = self.settings.decay ** torch.arange(len(steps), device=losses_D.device)
        by_head = {f"acc{head}": accuracy for head, accuracy in enumerate(accuracies_D)}
        return (losses_D * decay_D).sum(), {"accuracy": accuracies_D[0], **by_head}

    def draft_hits(self, sample: HeldOutPrompt) -> Tensor:
        batch = sample.batch(self.teacher.device)
        ids_S = batch.ids[0]
        hidden_SH = self.teacher.read(batch, exact=True).hidden_BSH[0]
        drafts_SD = self.model.forward(hidden_SH).argmax(-1)
        right_SD = torch.zeros_like(drafts_SD, dtype=torch.bool)
        for head, drafts_S in enumerate(drafts_SD.t()):
            after_S = ids_S[head + 2 :]  # row j drafts after the root token j + 1
            right_SD[1 : len(after_S) + 1, head] = drafts_S[: len(after_S)] == after_S
        return right_SD

    def export(self, out: Path) -> None:
        tensors = {n: v.detach().cpu().bfloat16() for n, v in self.model.published().items()}
        with replace_files(out) as folder:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            write_json(self.model.config.to_json(), folder / "config.json")

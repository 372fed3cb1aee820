"""Training of Medusa's heads (arXiv 2401.10774): the cross-entropy of each head with the tokens
that it shall draft, with a lower weight for later heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.drafters.medusa import Medusa, MedusaConfig
from .data import GOLD, TrainingBatch
from .dataset import HeldOutPrompt
from .eagle import shift
from .loop import LossReport, Trainer
from .settings import MedusaTraining
from .teacher import Teacher


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

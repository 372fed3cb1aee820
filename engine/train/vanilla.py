"""Training of a vanilla drafter: a small language model of the target's tokenizer."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import Qwen3Config, Qwen3ForCausalLM

from .data import GOLD, TrainingBatch
from .dataset import HeldOutPrompt
from .loop import LossReport, Trainer, export_beside
from .settings import VanillaTraining
from .teacher import Teacher, run_rows


class VanillaTrainer(Trainer):
    name = "vanilla"
    settings: VanillaTraining
    model: Qwen3ForCausalLM

    def __init__(self, settings: VanillaTraining, teacher: Teacher) -> None:
        target = teacher.config
        rope: dict[str, Any] = {"rope_type": target.rope.kind, "rope_theta": target.rope.theta}
        config = Qwen3Config(
            vocab_size=target.vocab_size,
            hidden_size=settings.hidden,
            intermediate_size=settings.intermediate,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            head_dim=settings.hidden // settings.heads,
            max_position_embeddings=target.rope.trained,
            rms_norm_eps=target.eps,
            tie_word_embeddings=True,
            rope_parameters=rope | dict(target.rope.settings),
            bos_token_id=next(iter(target.bos_ids), None),
            eos_token_id=next(iter(teacher.stops), None),
            pad_token_id=next(iter(target.pad_ids), None),
        )
        torch.manual_seed(settings.seed)
        model: Any = Qwen3ForCausalLM(config)
        super().__init__(settings, teacher, model.to(teacher.device))

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> LossReport:
        rows = (batch.weights.flatten() >= GOLD).nonzero().flatten()
        labels_R = batch.labels.flatten()[rows]
        hidden_BSH = self.teacher.read(batch).hidden_BSH
        teacher_RV = log_softmax(self.teacher.logits(hidden_BSH.flatten(0, 1)[rows]).float(), -1)
        with self.teacher.low_precision():
            own_BSH = run_rows(self.model.model, batch).last_hidden_state
            logits_RV = own_BSH.flatten(0, 1)[rows] @ self.model.lm_head.weight.T
        drafts_RV = log_softmax(logits_RV.float(), -1)
        plain = cross_entropy(logits_RV.float(), labels_R)
        distilled = kl_div(drafts_RV, teacher_RV, reduction="batchmean", log_target=True)
        share = self.settings.distillation
        right = drafts_RV.argmax(-1) == teacher_RV.argmax(-1)
        figures = {"accuracy": right.float().mean(), "cross_entropy": plain.detach()}
        return (1.0 - share) * plain + share * distilled, figures

    def draft_hits(self, sample: HeldOutPrompt) -> Tensor:
        batch = sample.batch(self.teacher.device)
        hidden_SH = run_rows(self.model.model, batch).last_hidden_state[0]
        drafts_S = (hidden_SH @ self.model.lm_head.weight.T).argmax(-1)
        right_S = drafts_S == batch.labels[0]
        right_S[-1] = False  # nothing follows
        later = torch.cat((right_S, right_S.new_zeros(self.settings.gamma - 1)))
        return later.unfold(0, self.settings.gamma, 1)

    def export(self, out: Path) -> None:
        export_beside(self.model, self.teacher.folder, out)

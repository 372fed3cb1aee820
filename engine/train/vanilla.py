"""Training of a vanilla drafter: a small language model of the target's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import Qwen3Config, Qwen3ForCausalLM

from .data import GOLD, Batch
from .files import export_beside
from .held_out import HeldOutPrompt
from .lessons import lessons
from .loop import DrafterTraining, LossReport, train
from .optim import MuonAdamW
from .teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class VanillaTraining(DrafterTraining):
    """The small model's shape and its loss.

    Attributes:
        heads: of ``hidden`` // ``heads`` dimensions each, queries and keys alike.
        distillation: weight of the divergence from the target's distribution; the rest is
            cross-entropy with the text.
        gamma: length of the chains that held-out acceptance is measured with.
    """

    layers: int = 2
    hidden: int = 128
    intermediate: int = 1024
    heads: int = 4
    distillation: float = 0.5
    gamma: int = 4


def model_config(config: VanillaTraining, teacher: Teacher) -> Qwen3Config:
    """The shape of the small model: the target's vocabulary, special ids and positions."""
    target = teacher.config
    rope: dict[str, Any] = {"rope_type": target.rope.kind, "rope_theta": target.rope.theta}
    return Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.hidden // config.heads,
        max_position_embeddings=target.rope.trained,
        rms_norm_eps=target.eps,
        tie_word_embeddings=True,
        rope_parameters=rope | dict(target.rope.settings),
        bos_token_id=next(iter(target.bos_ids), None),
        eos_token_id=next(iter(teacher.stops), None),
        pad_token_id=next(iter(target.pad_ids), None),
    )


class VanillaCourse:
    """See `train_loop.Course`."""

    name = "vanilla"

    def __init__(self, config: VanillaTraining, teacher: Teacher) -> None:
        self.config, self.teacher = config, teacher
        torch.manual_seed(config.seed)
        self.model = Qwen3ForCausalLM(model_config(config, teacher))
        self.model.to(teacher.device)  # type: ignore[arg-type]
        self.optimizer = MuonAdamW(self.model, config.lr, config.head_lr)

    def _hidden(self, batch: Batch) -> Tensor:
        """[B, S, H], what the head is applied to."""
        hidden: Tensor = self.model.model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        return hidden

    def teach(self, batch: Batch, draw: torch.Generator) -> LossReport:
        rows = (batch.weights.flatten() >= GOLD).nonzero().flatten()
        labels_R = batch.labels.flatten()[rows]
        seen = self.teacher.look(batch).hidden_BSH.flatten(0, 1)[rows]
        wanted_RV = log_softmax(self.teacher.logits(seen).float(), -1)
        with self.teacher.low_precision():
            logits_RV = self._hidden(batch).flatten(0, 1)[rows] @ self.model.lm_head.weight.T
        found_RV = log_softmax(logits_RV.float(), -1)
        plain = cross_entropy(logits_RV.float(), labels_R)
        distilled = kl_div(found_RV, wanted_RV, reduction="batchmean", log_target=True)
        share = self.config.distillation
        right = found_RV.argmax(-1) == wanted_RV.argmax(-1)
        figures = {"accuracy": right.float().mean(), "cross_entropy": plain.detach()}
        return LossReport((1.0 - share) * plain + share * distilled, figures)

    def hits(self, sample: HeldOutPrompt) -> Tensor:
        batch = sample.batch(self.teacher.device)
        drafts_S = (self._hidden(batch)[0] @ self.model.lm_head.weight.T).argmax(-1)
        right_S = drafts_S == batch.labels[0]
        right_S[-1] = False  # nothing follows
        later = torch.cat((right_S, right_S.new_zeros(self.config.gamma - 1)))
        return later.unfold(0, self.config.gamma, 1)

    def export(self, out: Path) -> None:
        export_beside(self.model, self.teacher.folder, out)


def train_vanilla(config: VanillaTraining) -> Path:
    """Train, saving now and then; returns the folder of the exported drafter."""
    teacher = Teacher(config.target, config.device)
    course = VanillaCourse(config, teacher)
    found = lessons(config, teacher)
    return train(config, course, found.source, found.held)

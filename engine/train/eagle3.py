"""Training of an EAGLE-3 drafter: a few drafted steps unrolled behind every token."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.config import RopeConfig
from ...models.drafters.eagle3 import Eagle3
from ...models.drafters.eagle3_config import Eagle3Config, default_taps
from ..errors import UsageError
from .data import GOLD, Batch, Source
from .eagle3_loss import Lesson, guesses, rehearse, shift
from .files import load_checkpoint, replace_files, save_weights
from .held_out import HeldOutPrompt
from .lessons import Lessons, lessons
from .loop import DrafterTraining, LossReport, train
from .optim import MuonAdamW
from .teacher import Teacher

COUNTED = 4000  # samples that the draft vocabulary is chosen from


@dataclass(frozen=True, kw_only=True)
class Eagle3Training(DrafterTraining):
    """An EAGLE-3 drafter's shape and how it is trained.

    Attributes:
        steps: drafted steps that are unrolled; also the chain that acceptance is measured with.
        decay: weight of each step's loss, relative to the one before.
        draft_vocabulary: how many of the most frequent ids it can draft.
        intermediate: width of its MLP.
    """

    tokens: float = 12_000_000
    steps: int = 4
    decay: float = 0.8
    draft_vocabulary: int = 2048
    intermediate: int = 2048


def draft_vocabulary(source: Source, samples: int, size: int, vocabulary: int) -> Tensor:
    """The most frequent ids of the texts to be written, increasing, int64 [size]."""
    counts: Counter[int] = Counter(dict.fromkeys(range(vocabulary), 0))
    for index in range(samples):
        tokens = source(index)
        counts.update(i for i, w in zip(tokens.ids, tokens.weights, strict=True) if w >= GOLD)
    return torch.tensor(sorted(i for i, _ in counts.most_common(size)))


def drafter_config(config: Eagle3Training, teacher: Teacher) -> Eagle3Config:
    """The drafter's shape: the target's width and heads, one layer."""
    target = teacher.config
    return Eagle3Config(
        path=config.out / "config.json",
        vocab_size=target.vocab_size,
        draft_vocab_size=config.draft_vocabulary,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=config.intermediate,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        eps=target.eps,
        rope=RopeConfig("default", target.rope.theta, {}, target.rope.trained),
        taps=default_taps(target.num_layers),
    )


def new_drafter(config: Eagle3Training, teacher: Teacher, ids: Tensor) -> Eagle3:
    """An untrained drafter that shares the target's embedding; its head starts from the target's.

    Args:
        ids: what it can draft, increasing, int64 [draft vocabulary].
    """
    torch.manual_seed(config.seed)
    drafter = Eagle3(drafter_config(config, teacher))
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        elif name != "embed_tokens.weight":
            nn.init.normal_(parameter, std=0.02)
    drafter.lm_head.weight.data.copy_(teacher.head[ids])
    drafter.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.t2d.fill_(False)[ids] = True
    drafter.to(teacher.device)
    drafter.embed_tokens.weight = nn.Parameter(teacher.embedding, requires_grad=False)
    return drafter


def chain_tau(accuracies: list[Tensor]) -> Tensor:
    """Tokens per verification of a chain of drafts, from the accuracy of each step."""
    return 1.0 + torch.stack(list(accumulate(accuracies, mul))).sum()


class Eagle3Course:
    """See `train_loop.Course`."""

    name = "eagle3"

    def __init__(self, config: Eagle3Training, teacher: Teacher, ids: Tensor) -> None:
        self.config, self.teacher = config, teacher
        self.model = new_drafter(config, teacher, ids)
        self.optimizer = MuonAdamW(self.model, config.lr, config.head_lr)

    def lesson(self, batch: Batch, *, exact: bool = False) -> Lesson:
        """What the target says about a batch of packed rows.

        Branches of one sample share the row that pairs the trunk's end with their first token;
        after an outline that token is the same for all.

        Args:
            exact: hidden states in float32, as in a run.
        """
        seen = self.teacher.look(batch, self.model.config.taps, exact=exact)
        return Lesson(
            taps_BSF=seen.features_BSF,
            tokens_BS=batch.labels,
            teacher_BSV=shift(self.teacher.logits(seen.hidden_BSH)),
            counted_BS=(shift(batch.weights) >= GOLD).float(),
            positions_BS=batch.positions,
            visible_BSS=batch.mask[:, 0],
        )

    def teach(self, batch: Batch, draw: torch.Generator) -> LossReport:
        lesson = self.lesson(batch)
        with self.teacher.low_precision():
            verdict = rehearse(self.model, lesson, self.config.steps)
        loss = verdict.total(self.config.decay) / lesson.counted_BS.mean().clamp_min(1e-3)
        found = list(verdict.accuracies)
        figures = {"accuracy": found[0], **{f"acc{i}": value for i, value in enumerate(found)}}
        return LossReport(loss, figures | {"tau": chain_tau(found)})

    def hits(self, sample: HeldOutPrompt) -> Tensor:
        lesson = self.lesson(sample.batch(self.teacher.device), exact=True)
        steps = self.config.steps
        drafts_SK = guesses(self.model, lesson, steps)[0]
        right_SK = torch.zeros_like(drafts_SK, dtype=torch.bool)
        for step in range(steps):  # row j drafts behind the root token j + 1
            wanted_S = lesson.tokens_BS[0, step + 1 :]
            right_SK[1 : len(wanted_S) + 1, step] = drafts_SK[: len(wanted_S), step] == wanted_S
        return right_SK

    def export(self, out: Path) -> None:
        with replace_files(out) as folder:
            save_weights(self.model.published(), folder)
            text = json.dumps(self.model.config.to_json(), indent=2) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")


def _vocabulary(config: Eagle3Training, found: Lessons, whole: int) -> Tensor:
    """As the checkpoint has it, else counted."""
    if config.resume and config.state.exists():
        state: dict[str, Any] = load_checkpoint(config.state)
        ids: Tensor = state["model"].get("t2d", torch.zeros(0)).nonzero().flatten()
        if len(ids) != config.draft_vocabulary:
            raise UsageError(f"{config.state}: of a training that drafts {len(ids)} different ids")
        return ids
    samples = min(COUNTED, found.distinct or COUNTED)
    return draft_vocabulary(found.source, samples, config.draft_vocabulary, whole)


def train_eagle3(config: Eagle3Training) -> Path:
    """Train, saving now and then; returns the folder of the exported drafter."""
    teacher = Teacher(config.target, config.device)
    whole = teacher.config.vocab_size
    if config.draft_vocabulary > whole:
        raise UsageError(f"--draft-vocabulary {config.draft_vocabulary}: the target has {whole}")
    found = lessons(config, teacher)
    course = Eagle3Course(config, teacher, _vocabulary(config, found, whole))
    return train(config, course, found.source, found.held)

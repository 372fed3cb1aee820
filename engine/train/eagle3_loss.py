"""The training-time test of EAGLE-3: a few drafted steps unrolled, each scored by the target.

At step i, row j holds the drafter's own feature for token j + i beside the true token j + i + 1 and
predicts token j + i + 2. It sees the rows of step 0 that a causal mask allows and, of later steps,
only itself: the tree mask of an unrolled chain.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.drafters.eagle import Eagle3
from .data import by_head


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target said about a batch of sequences; all but `taps` already shifted by one.

    taps_BSF: the target's tapped hidden states of token j.
    tokens_BS: int64, token j + 1. teacher_BSV: the target's logits after token j + 1.
    counted_BS: float, 1 where row j counts at step 0.
    positions_BS: int64, the position of token j.
    visible_BSS: bool, True where row j (second axis) sees row k (third axis) of step 0.
    """

    taps_BSF: Tensor
    tokens_BS: Tensor
    teacher_BSV: Tensor
    counted_BS: Tensor
    positions_BS: Tensor
    visible_BSS: Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """losses: one scalar per step; accuracies: share of counted rows whose best id is right."""

    losses: tuple[Tensor, ...]
    accuracies: tuple[Tensor, ...]

    def total(self, decay: float = 0.8) -> Tensor:
        """Sum of decay ** i times the loss of step i."""
        weighted = [loss * decay**i for i, loss in enumerate(self.losses)]
        return torch.stack(weighted).sum()


def shift(x: Tensor, by: int = 1) -> Tensor:
    """Rows moved to the left along axis 1, zeros entering at the end."""
    if by == 0:
        return x
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)


def rehearse(drafter: Eagle3, lesson: Lesson, steps: int) -> LossTerms:
    """Unroll `steps` drafted steps; gradients flow through the fed-back features."""
    chain = _Chain(drafter, lesson)
    hidden_BSH = drafter.fuse(lesson.taps_BSF)
    losses: list[Tensor] = []
    accuracies: list[Tensor] = []
    for step in range(steps):
        hidden_BSH = chain.advance(hidden_BSH, step)
        loss, accuracy = _score(drafter, hidden_BSH, lesson, step)
        losses.append(loss)
        accuracies.append(accuracy)
    return LossTerms(tuple(losses), tuple(accuracies))


def guesses(drafter: Eagle3, lesson: Lesson, steps: int) -> Tensor:
    """int64 [B, S, steps]: the best id of every row at every step, in the target's vocabulary.

    Row j drafts behind token j + 1, so its guess at step i is compared with token j + i + 2. What
    it drafts at step i is what a chain of drafts would, if its earlier guesses were right.
    """
    chain = _Chain(drafter, lesson)
    hidden_BSH = drafter.fuse(lesson.taps_BSF)
    found: list[Tensor] = []
    for step in range(steps):
        hidden_BSH = chain.advance(hidden_BSH, step)
        best_BS = drafter.logits(hidden_BSH.flatten(0, 1)).argmax(-1).view(hidden_BSH.shape[:2])
        found.append(drafter.to_target(best_BS))
    return torch.stack(found, -1)


def _score(drafter: Eagle3, hidden_BSH: Tensor, lesson: Lesson, step: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the target's distribution over the draft vocabulary, and accuracy."""
    teacher_BSV, counted_BS = shift(lesson.teacher_BSV, step), shift(lesson.counted_BS, step)
    known_BS = drafter.t2d[teacher_BSV.argmax(-1)] * counted_BS
    rows = known_BS.flatten().nonzero().flatten()  # nothing else contributes
    wanted_RV = teacher_BSV.flatten(0, 1)[rows][:, drafter.t2d].float().softmax(-1)
    logits_RV = drafter.logits(hidden_BSH.flatten(0, 1)[rows])
    losses_R = -(wanted_RV * F.log_softmax(logits_RV, -1)).sum(-1)
    weights_R = known_BS.flatten()[rows]
    right_R = (logits_RV.argmax(-1) == wanted_RV.argmax(-1)) * weights_R
    accuracy = right_R.sum() / counted_BS.sum().clamp_min(1e-6)
    return (losses_R * weights_R).sum() / known_BS.numel(), accuracy.detach()


class _Chain:
    """Keys and values of all steps so far."""

    def __init__(self, drafter: Eagle3, lesson: Lesson) -> None:
        self.drafter, self.lesson = drafter, lesson
        self.keys: list[Tensor] = []  # one [B, heads, S, d] per step
        self.values: list[Tensor] = []
        hidden = torch.zeros(lesson.visible_BSS.shape)
        self.bias_B1SS = hidden.masked_fill(~lesson.visible_BSS, float("-inf"))[:, None]

    def advance(self, hidden_BSH: Tensor, step: int) -> Tensor:
        """One step of all rows: [B, S, H] -> [B, S, H]."""
        drafter, shape = self.drafter, hidden_BSH.shape
        tokens_BS = shift(self.lesson.tokens_BS, step)
        angles = drafter.angles((self.lesson.positions_BS + step).flatten())
        embedded_NH = drafter.embed_tokens(tokens_BS.flatten()).to(drafter.fc.weight.dtype)
        mixed_NW, residual_NH = drafter.midlayer.mix(embedded_NH, hidden_BSH.flatten(0, 1))
        q, k, v = drafter.midlayer.self_attn.project(mixed_NW, angles)
        groups = q.shape[1] // k.shape[1]
        self.keys.append(by_head(k.repeat_interleave(groups, 1), shape[0]))
        self.values.append(by_head(v.repeat_interleave(groups, 1), shape[0]))
        attended = self._attend(by_head(q, shape[0])).transpose(1, 2).flatten(2).flatten(0, 1)
        out_NH = drafter.midlayer.finish(residual_NH, attended)
        if drafter.config.norm_output:
            out_NH = drafter.norm(out_NH)
        return out_NH.view(shape)

    def _attend(self, q_BhSd: Tensor) -> Tensor:
        """One softmax over the visible rows of step 0 and, of later steps, the row itself."""
        scale = q_BhSd.shape[-1] ** -0.5
        scores = [(q_BhSd @ self.keys[0].transpose(-1, -2)).float() * scale + self.bias_B1SS]
        scores += [(q_BhSd * k).sum(-1, keepdim=True).float() * scale for k in self.keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1).to(self.values[0].dtype)
        length = q_BhSd.shape[2]
        out = weights[..., :length] @ self.values[0]
        for i, value in enumerate(self.values[1:]):
            out = out + weights[..., length + i, None] * value
        return out

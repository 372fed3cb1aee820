"""The training loop of all drafters: batches, steps, the log, checkpoints, an exact resume.

What a step does depends on the samples, the seed and the step's number alone, and on the time only
where the time is what ends the training. So a run that was killed and resumed takes the same steps
as one that was not.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .data import Batch, Packer
from .files import load_checkpoint, save_atomically
from .held_out import HeldOutPrompt, held_out_tau
from .lessons import Lessons
from .log import TrainingLog, keep_lines
from .optim import MuonAdamW
from .settings import DrafterTraining


@dataclass(slots=True)
class Progress:
    """What has been trained so far; ``index`` is the next sample's number."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    index: int = 0

    def done(self, settings: DrafterTraining) -> float:
        """The share of the training that is over."""
        return settings.share_done(self.seconds / 60.0, self.tokens, self.step)


@dataclass(frozen=True, slots=True)
class LossReport:
    """loss: to be differentiated. figures: what the log says beside it, by name."""

    loss: Tensor
    figures: dict[str, Tensor]


class Course(Protocol):
    """What one kind of drafter brings: its model, its loss, and how it is measured and saved.

    Attributes:
        name: the drafter's kind.
    """

    name: str
    optimizer: MuonAdamW

    @property
    def model(self) -> nn.Module:
        """What is trained; its state is the checkpoint's."""
        ...

    def teach(self, batch: Batch, draw: torch.Generator) -> LossReport:
        """The loss on a batch, which lies on the model's device; ``draw`` is a CPU generator."""
        ...

    def hits(self, sample: HeldOutPrompt) -> Tensor:
        """bool [S, K]: where token t is a round's root, whether draft k is token t + 1 + k."""
        ...

    def export(self, out: Path) -> None:
        """Write the folder that ``models.weights`` loads; each file is replaced whole."""
        ...


def train(settings: DrafterTraining, course: Course, lessons: Lessons) -> Path:
    """Train until the end, saving now and then; returns the folder of the exported drafter."""
    progress = _restore(settings, course)
    log_file = settings.run_folder / "log.jsonl"
    keep_lines(log_file, progress.step)
    packer = Packer(lessons.source, settings.batch_tokens, settings.length, progress.index)
    batches = packer.batches()
    saved = measured = progress.seconds
    with TrainingLog(log_file, course.name) as log:
        while progress.done(settings) < 1.0:
            values = _step(settings, course, next(batches), progress)
            progress.index, done = packer.index, progress.done(settings)
            due = done >= 1.0 or _past(progress, measured, settings.measure_minutes)
            if lessons.held_out and due:
                measured = progress.seconds
                tau = measure(course, lessons.held_out)
                log.standing = f"held-out tau {tau['held_tau']:.2f}"
                values |= tau
            log.report(done, **values, step=progress.step, tokens=progress.tokens)
            if done < 1.0 and _past(progress, saved, settings.save_minutes):
                saved = progress.seconds
                _checkpoint(settings, course, progress)
    _checkpoint(settings, course, progress)
    return settings.out


def measure(course: Course, held_out: list[HeldOutPrompt]) -> dict[str, float]:
    """Tokens per round on held-out samples; the model is left as it was."""
    with torch.no_grad():
        return held_out_tau(held_out, course.hits)


def generator(seed: int, step: int) -> torch.Generator:
    """The chance of one step; nothing is left over from earlier ones."""
    return torch.Generator().manual_seed(Random(f"{seed}:{step}").getrandbits(63))


def _past(progress: Progress, since: float, minutes: float) -> bool:
    return progress.seconds - since > 60.0 * minutes


def _step(
    settings: DrafterTraining, course: Course, batch: Batch, progress: Progress
) -> dict[str, float]:
    """One update; returns the loss and the course's figures."""
    start = time.monotonic()
    batch = batch.to(torch.device(settings.device))
    report = course.teach(batch, generator(settings.seed, progress.step))
    report.loss.backward()  # type: ignore[no-untyped-call]
    trained = [p for p in course.model.parameters() if p.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    course.optimizer.step(progress.done(settings))
    values = {"loss": report.loss.item(), **{k: v.item() for k, v in report.figures.items()}}
    if not math.isfinite(values["loss"]):
        raise UsageError(f"the loss of step {progress.step + 1} is not finite: try a lower --lr")
    progress.step += 1
    progress.tokens += batch.ids.numel()
    progress.seconds += time.monotonic() - start
    return values


def _checkpoint(settings: DrafterTraining, course: Course, progress: Progress) -> None:
    state: dict[str, object] = {
        "model": course.model.state_dict(),
        "optimizer": course.optimizer.state_dict(),
        "progress": asdict(progress),
    }
    save_atomically(state, settings.checkpoint)
    course.export(settings.out)


def _restore(settings: DrafterTraining, course: Course) -> Progress:
    if not settings.checkpoint.exists():
        return Progress()
    if not settings.resume:
        raise UsageError(
            f"{settings.run_folder} holds a training: --resume goes on with it, or another --run"
        )
    state: dict[str, Any] = load_checkpoint(settings.checkpoint)
    try:
        course.model.load_state_dict(state["model"])
        course.optimizer.load_state_dict(state["optimizer"])
        return Progress(**state["progress"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UsageError(
            f"{settings.checkpoint}: of a training with other settings ({reason})"
        ) from None

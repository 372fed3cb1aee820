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
from .data import Batch, Packer, Source
from .files import load_checkpoint, save_atomically
from .held_out import HeldOutPrompt, held_out_tau
from .log import TrainingLog, keep_lines
from .optim import MuonAdamW


@dataclass(frozen=True, kw_only=True)
class DrafterTraining:
    """What all drafters' trainings have in common.

    The first of ``minutes``, ``tokens`` and ``updates`` ends the run, and the learning rate follows
    whichever is furthest; with infinite ``minutes`` nothing depends on the time.

    Attributes:
        prompts: JSONL of prompts or conversations; None for the embedded family's corpus.
        regenerate: the target writes all answers itself.
        held_out: prompts of each kind that are kept for measuring acceptance.
        batch_tokens: tokens of an update, in rows of ``length``.
        save_minutes, measure_minutes: of training, between checkpoints and measurements.
    """

    target: Path
    out: Path
    run: Path
    prompts: Path | None = None
    regenerate: bool = False
    held_out: int = 8
    minutes: float = 25.0
    tokens: float = math.inf
    updates: float = math.inf
    lr: float = 3e-3
    head_lr: float = 2e-3
    batch_tokens: int = 3072
    length: int = 768
    seed: int = 5
    resume: bool = False
    save_minutes: float = 3.0
    measure_minutes: float = 3.0
    device: str = "cpu"

    @property
    def state(self) -> Path:
        """The checkpoint."""
        return self.run / "state.pt"


@dataclass(slots=True)
class Progress:
    """What has been trained so far; ``index`` is the next sample's number."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    index: int = 0

    def done(self, config: DrafterTraining) -> float:
        """The share of the training that is over."""
        minutes = self.seconds / 60.0 / config.minutes
        return max(minutes, self.tokens / config.tokens, self.step / config.updates)


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


def train(
    config: DrafterTraining, course: Course, source: Source, held: list[HeldOutPrompt]
) -> Path:
    """Train until the end, saving now and then; returns the folder of the exported drafter."""
    progress = _restore(config, course)
    log_file = config.run / "log.jsonl"
    keep_lines(log_file, progress.step)
    packer = Packer(source, config.batch_tokens, config.length, progress.index)
    batches = packer.batches()
    saved = measured = progress.seconds
    with TrainingLog(log_file, course.name) as log:
        while progress.done(config) < 1.0:
            values = _step(config, course, next(batches), progress)
            progress.index, done = packer.index, progress.done(config)
            if held and (done >= 1.0 or _past(progress, measured, config.measure_minutes)):
                measured = progress.seconds
                tau = measure(course, held)
                log.standing = f"held-out tau {tau['held_tau']:.2f}"
                values |= tau
            log.report(done, **values, step=progress.step, tokens=progress.tokens)
            if done < 1.0 and _past(progress, saved, config.save_minutes):
                saved = progress.seconds
                _checkpoint(config, course, progress)
    _checkpoint(config, course, progress)
    return config.out


def measure(course: Course, held: list[HeldOutPrompt]) -> dict[str, float]:
    """Tokens per round on held-out samples; the model is left as it was."""
    with torch.no_grad():
        return held_out_tau(held, course.hits)


def generator(seed: int, step: int) -> torch.Generator:
    """The chance of one step; nothing is left over from earlier ones."""
    return torch.Generator().manual_seed(Random(f"{seed}:{step}").getrandbits(63))


def _past(progress: Progress, since: float, minutes: float) -> bool:
    return progress.seconds - since > 60.0 * minutes


def _step(
    config: DrafterTraining, course: Course, batch: Batch, progress: Progress
) -> dict[str, float]:
    """One update; returns the loss and the course's figures."""
    start = time.monotonic()
    there = batch.to(torch.device(config.device))
    taught = course.teach(there, generator(config.seed, progress.step))
    taught.loss.backward()  # type: ignore[no-untyped-call]
    trained = [p for p in course.model.parameters() if p.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    course.optimizer.step(progress.done(config))
    values = {"loss": taught.loss.item(), **{k: v.item() for k, v in taught.figures.items()}}
    if not math.isfinite(values["loss"]):
        raise UsageError(f"the loss of step {progress.step + 1} is not finite: try a lower --lr")
    progress.step += 1
    progress.tokens += batch.ids.numel()
    progress.seconds += time.monotonic() - start
    return values


def _checkpoint(config: DrafterTraining, course: Course, progress: Progress) -> None:
    state: dict[str, object] = {
        "model": course.model.state_dict(),
        "optimizer": course.optimizer.state_dict(),
        "progress": asdict(progress),
    }
    save_atomically(state, config.state)
    course.export(config.out)


def _restore(config: DrafterTraining, course: Course) -> Progress:
    if not config.state.exists():
        return Progress()
    if not config.resume:
        raise UsageError(
            f"{config.run} holds a training: --resume goes on with it, or another --run"
        )
    state: dict[str, Any] = load_checkpoint(config.state)
    try:
        course.model.load_state_dict(state["model"])
        course.optimizer.load_state_dict(state["optimizer"])
        return Progress(**state["progress"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UsageError(f"{config.state}: of a training with other settings ({reason})") from None

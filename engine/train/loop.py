"""The training loop of all drafters: batches, steps, the log, checkpoints, an exact resume.

What a step does depends on the samples, the seed and the step's number alone, and on the time only
where the time is what ends the training. So a run that was killed and resumed takes the same steps
as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Protocol

import torch
from rich import progress as bars
from rich.console import Console
from torch import Tensor, nn

from ..errors import UsageError
from .data import Packer, TrainingBatch
from .files import load_checkpoint, save_atomically
from .lessons import HeldOutPrompt, Lessons, held_out_tau
from .optim import MuonAdamW
from .settings import MINUTES, DrafterTraining

PRINTED_EVERY = 10.0  # seconds between lines where there is no terminal
KNOWN_BY = 8  # samples that texts are recognised by
LIMITS = ("minutes", "tokens", "steps", "save_minutes", "measure_minutes")
FREE = (*LIMITS, "out", "run", "resume", "force", "device", "threads")  # may change on the way


@dataclass(slots=True)
class Progress:
    """What has been trained so far; ``index`` is the next sample's number."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    index: int = 0

    def done(self, settings: DrafterTraining) -> float:
        """The share of the training that is over."""
        minutes = self.seconds / 60.0
        spent = (minutes, self.tokens, self.step)
        limits = (settings.minutes, settings.tokens, settings.steps)
        shares = [part / most for part, most in zip(spent, limits, strict=True) if most is not None]
        return max(shares, default=minutes / MINUTES)


LossReport = tuple[Tensor, dict[str, Tensor]]
"""The loss, to be differentiated, and what the log says beside it, by name."""


class Course(Protocol):
    """What one kind of drafter brings: its model, its loss, and how it is measured and saved."""

    name: str
    optimizer: MuonAdamW

    @property
    def model(self) -> nn.Module:
        """What is trained; its state is the checkpoint's."""
        ...

    def teach(self, batch: TrainingBatch, draw: torch.Generator) -> LossReport:
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
    if settings.keep_features and lessons.distinct is None:
        raise UsageError("--keep-features: these texts have no end")
    progress = _restore(settings, course, lessons)
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
                tau = held_out_tau(lessons.held_out, course.hits)
                log.standing = f"held-out tau {tau['held_tau']:.2f}"
                values |= tau
            log.report(done, **values, step=progress.step, tokens=progress.tokens)
            if done < 1.0 and _past(progress, saved, settings.save_minutes):
                saved = progress.seconds
                _checkpoint(settings, course, lessons, progress)
    _checkpoint(settings, course, lessons, progress)
    return settings.out


def generator(seed: int, step: int) -> torch.Generator:
    """The chance of one step; nothing is left over from earlier ones."""
    return torch.Generator().manual_seed(Random(f"{seed}:{step}").getrandbits(63))


def _past(progress: Progress, since: float, minutes: float) -> bool:
    return progress.seconds - since > 60.0 * minutes


def _step(
    settings: DrafterTraining, course: Course, batch: TrainingBatch, progress: Progress
) -> dict[str, float]:
    """One update; returns the loss and the course's figures."""
    start = time.monotonic()
    batch = batch.to(torch.device(settings.device))
    loss, figures = course.teach(batch, generator(settings.seed, progress.step))
    loss.backward()  # type: ignore[no-untyped-call]
    trained = [p for p in course.model.parameters() if p.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    course.optimizer.step(progress.done(settings))
    values = {name: value.item() for name, value in {"loss": loss, **figures}.items()}
    if not math.isfinite(values["loss"]):
        raise UsageError(f"the loss of step {progress.step + 1} is not finite: try a lower --lr")
    progress.step += 1
    progress.tokens += batch.ids.numel()
    progress.seconds += time.monotonic() - start
    return values


def _identity(settings: DrafterTraining, lessons: Lessons) -> dict[str, str]:
    """What must be the same in both parts of a training for the second to go on with the first."""
    own = {k: str(v) for k, v in asdict(settings).items() if k not in FREE}
    samples = [lessons.source(index).ids for index in range(KNOWN_BY)]
    texts = hashlib.sha256(repr((lessons.distinct, samples)).encode()).hexdigest()
    return own | {"texts": texts[:12]}


def _checkpoint(
    settings: DrafterTraining, course: Course, lessons: Lessons, progress: Progress
) -> None:
    state: dict[str, object] = {
        "identity": _identity(settings, lessons),
        "model": course.model.state_dict(),
        "optimizer": course.optimizer.state_dict(),
        "progress": asdict(progress),
    }
    save_atomically(state, settings.checkpoint)
    course.export(settings.out)


def _restore(settings: DrafterTraining, course: Course, lessons: Lessons) -> Progress:
    if not settings.checkpoint.exists():
        return Progress()
    if not settings.resume:
        raise UsageError(
            f"{settings.run_folder} holds a training: --resume goes on with it, or another --run"
        )
    state = load_checkpoint(settings.checkpoint)
    before = state.get("identity", {})
    now = _identity(settings, lessons)
    other = [f"{k} {before[k]} then, {now.get(k)} now" for k in before if before[k] != now.get(k)]
    if other and not settings.force:
        reason = f"of a training with other settings ({'; '.join(other)}); --force goes on"
        raise UsageError(f"{settings.checkpoint}: {reason}")
    try:
        course.model.load_state_dict(state["model"])
        course.optimizer.load_state_dict(state["optimizer"])
        return Progress(**state["progress"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UsageError(
            f"{settings.checkpoint}: of a training with other settings ({reason})"
        ) from None


def keep_lines(path: Path, count: int) -> None:
    """Drop what a log says behind its first ``count`` lines: steps that will be taken again."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        os.truncate(path, sum(map(len, lines[:count])))


class TrainingLog(bars.Progress):
    """Writes one JSON line per report and shows the progress (0..1).

    Attributes:
        standing: shown behind the latest values until it is replaced.
    """

    def __init__(self, path: Path, title: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.title = title
        self.standing = ""
        self.printed = 0.0
        columns = ("{task.description}", bars.BarColumn(), bars.TimeRemainingColumn())
        screen = Console(stderr=True)
        shown = sys.stderr.isatty()
        super().__init__(*columns, "{task.fields[note]}", console=screen, disable=not shown)
        self.task = self.add_task(title, total=1.0, note="")

    def report(self, done: float, **values: float) -> None:
        """Log values at this share of the work; the screen is updated now and then."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"done": round(done, 5), **values}) + "\n")
        note = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        note = f"{note} {self.standing}".rstrip()
        self.update(self.task, completed=min(done, 1.0), note=note)
        if self.disable and time.monotonic() - self.printed > PRINTED_EVERY:
            self.printed = time.monotonic()
            print(f"{self.title} {done:.1%} {note}", flush=True)

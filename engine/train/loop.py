"""The training loop of all drafters: steps, optimizers, the log, checkpoints, an exact resume.

A step depends on the samples, the seed and the number of the step; on the time only if a limit in
minutes ends the training. So an interrupted and resumed training takes the same steps."""

import errno
import json
import math
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...models.drafters.dflash import DFlashDraftModel
from ...models.drafters.eagle import Eagle, Eagle3
from ...models.drafters.medusa import Medusa
from ...models.layers import PoolModel
from ...models.load.chat_format import SETTINGS, TEMPLATE
from ...models.load.tokenizer import VOCABULARIES
from ...states.yaml.source import number_of
from ..errors import UsageError, first_line
from ..prepare.job import model_folder, set_up_torch
from ..shell import complain, working
from .data import Packer, TrainingBatch
from .dataset import Dataset, DatasetBuilder, HeldOutPrompt, held_out_tau
from .settings import MINUTES, DrafterTraining
from .teacher import Teacher

UNLIKE_LAYERS = re.compile("embed|lm_head")


def learning_rate(done: float, peak: float, warmup: float = 0.02, floor: float = 0.05) -> float:
    """Linear warm-up, then cosine down to ``floor * peak``; ``done`` is the share trained."""
    if done < warmup:
        return peak * max(done, 1e-4) / warmup
    progress = min(1.0, (done - warmup) / (1.0 - warmup))
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


class MuonAdamW:
    """Muon for the layers' matrices, AdamW for the rest; fused ones are trained in their parts."""

    def __init__(self, model: nn.Module, lr: float, head_lr: float) -> None:
        self.model = model
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parts: dict[str, nn.Parameter] = {}
        if isinstance(model, PoolModel):
            views = model.published(lambda p: p.detach())
            named = [(n, nn.Parameter(v)) for n, v in views.items() if v.is_floating_point()]
            self.parts = dict(named)
        matrices = [p for name, p in named if p.ndim == 2 and not UNLIKE_LAYERS.search(name)]
        others = [p for name, p in named if p.ndim != 2 or UNLIKE_LAYERS.search(name)]
        muon = torch.optim.Muon(matrices, lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(others, head_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.optimizers: dict[str, torch.optim.Optimizer] = {"layers": muon, "others": adam}

    def step(self, done: float) -> None:
        """One update at the learning rates for this share of the training."""
        if isinstance(self.model, PoolModel):
            gradients = self.model.published(
                lambda p: torch.zeros_like(p) if p.grad is None else p.grad
            )
            for name, part in self.parts.items():
                part.grad = gradients[name]
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(done, peak=optimizer.defaults["lr"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


TOKENIZER_FILES = [*VOCABULARIES, SETTINGS, TEMPLATE, "merges.txt", "added_tokens.json"]
TOKENIZER_FILES += ["generation_config.json", "special_tokens_map.json"]


def load_checkpoint(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, map_location="cpu", weights_only=True))


@contextmanager
def replace_files(out: Path) -> Iterator[Path]:
    """A folder to write into; at the end each of its files replaces the one in ``out``, whole.
    Raises OSError with the path, and ``out`` as it was: a full disk, a missing right."""
    out.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f"{out.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)  # of a killed process
    folder.mkdir()
    try:
        yield folder
        for path in sorted(folder.iterdir()):
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(path, out / path.name)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch may raise an error of its own while it handles that of the file.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError | SafetensorError):
            raise
        reason = getattr(cause, "strerror", None) or first_line(cause)
        raise OSError(errno.EIO, reason, str(out)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_atomically(state: dict[str, object], path: Path) -> None:
    with replace_files(path.parent) as folder, (folder / path.name).open("wb") as file:
        torch.save(state, file)


def export_drafter(drafter: Eagle | Eagle3 | DFlashDraftModel | Medusa, out: Path) -> None:
    """Write a drafter's folder: its weights in bf16 and its config."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else value.dtype)
        for name, value in drafter.published().items()
    }
    with replace_files(out) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(drafter.config.to_json(), folder / "config.json")


def export_beside(model: PreTrainedModel, target: Path, out: Path) -> None:
    """Write a folder in bf16 that transformers loads, with the tokenizer of another model."""
    with replace_files(out) as folder:
        deepcopy(model).bfloat16().save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # for older readers
        write_json(config, folder / "config.json")
        for file in TOKENIZER_FILES:
            if (target / file).is_file():
                shutil.copyfile(target / file, folder / file)


def write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


FEW_TOKENS = 1_000_000  # drafters that help have seen millions
FREE = (  # settings that may differ when a training is resumed
    *("minutes", "tokens", "steps", "save_minutes", "measure_minutes"),
    *("out", "run", "resume", "force", "device", "threads"),
)


@dataclass(slots=True)
class Progress:
    """The progress of a training; ``index`` is the number of the next sample."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    index: int = 0

    def done(self, settings: DrafterTraining) -> float:
        limits = {"minutes": settings.minutes, "tokens": settings.tokens, "steps": settings.steps}
        spent = {"minutes": self.seconds / 60.0, "tokens": self.tokens, "steps": self.step}
        shares = [spent[name] / limit for name, limit in limits.items() if limit is not None]
        return max(shares, default=spent["minutes"] / MINUTES)


LossReport = tuple[Tensor, dict[str, Tensor]]  # the loss, and further figures of the log by name


class Trainer(ABC):
    """One kind of drafter in training: its model, its loss, its measurement and its export."""

    name: str
    settings: DrafterTraining
    model: nn.Module

    def __init__(self, settings: DrafterTraining, teacher: Teacher, model: nn.Module) -> None:
        self.settings = settings
        self.teacher = teacher
        self.model = model
        self.optimizer = MuonAdamW(model, settings.lr, settings.head_lr)

    @classmethod
    def create(cls, settings: Any, teacher: Teacher, dataset: Dataset) -> "Trainer":
        """A trainer of this dataset; raises UsageError for settings that the target excludes."""
        return cls(settings, teacher)  # type: ignore[call-arg]

    @abstractmethod
    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> LossReport:
        """The loss of a batch on the model's device; the generator is on the CPU."""

    @abstractmethod
    def draft_hits(self, sample: HeldOutPrompt) -> Tensor:
        """bool [S, K]: with token t as the root, whether draft k equals token t + 1 + k."""

    def export(self, out: Path) -> None:
        assert isinstance(self.model, Eagle | Eagle3 | DFlashDraftModel | Medusa)
        export_drafter(self.model, out)


def train_drafter(kind: type[Trainer], settings: DrafterTraining, source: DatasetBuilder) -> Path:
    """Train to the limit with periodic checkpoints; returns the folder of the exported drafter."""
    set_up_torch(settings.threads or torch.get_num_threads(), settings.device)
    teacher = Teacher(model_folder(settings.target, "target"), settings.device)
    dataset = source(settings, teacher)
    trainer = kind.create(settings, teacher, dataset)
    progress = _restore(trainer, dataset)
    log_file = settings.run_folder / "log.jsonl"
    if log_file.exists():  # later steps will be repeated
        lines = log_file.read_bytes().splitlines(keepends=True)
        os.truncate(log_file, sum(map(len, lines[: progress.step])))
    packer = Packer(dataset.source, settings.batch_tokens, settings.length, progress.index)
    batches = packer.batches()
    batch = next(batches)
    saved = measured = progress.seconds
    standing = ""
    with training_log(log_file, trainer.name) as report:
        while progress.done(settings) < 1.0:
            start = time.monotonic()
            batch = batch.to(torch.device(settings.device))
            loss, figures = trainer.loss(batch, step_generator(settings.seed, progress.step))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step(progress.done(settings))
            progress.tokens += batch.ids.numel()
            progress.index = packer.index
            batch = next(batches)  # while a GPU computes
            values = {name: value.item() for name, value in {"loss": loss, **figures}.items()}
            progress.step += 1
            if not math.isfinite(values["loss"]):
                what = f"the loss of step {progress.step} is not finite"
                raise UsageError(f"{what}: try a lower --lr")
            progress.seconds += time.monotonic() - start
            done = progress.done(settings)
            measure_due = progress.seconds - measured > 60.0 * settings.measure_minutes
            if dataset.held_out and (done >= 1.0 or measure_due):
                measured = progress.seconds
                tau = held_out_tau(dataset.held_out, trainer.draft_hits)
                standing = f"held-out tau {tau['held_tau']:.2f}"
                values |= tau
            report(done, standing, **values, step=progress.step, tokens=progress.tokens)
            if done < 1.0 and progress.seconds - saved > 60.0 * settings.save_minutes:
                saved = progress.seconds
                _checkpoint(trainer, dataset, progress)
    _checkpoint(trainer, dataset, progress)
    if progress.tokens < FEW_TOKENS:
        seen = f"{progress.tokens:,} tokens in {number_of(progress.step, 'step')}"
        complain(f"note: {seen} are far too few for a useful drafter; --resume continues")
    return settings.out


def step_generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(Random(f"{seed}:{step}").getrandbits(63))


def _identity(settings: DrafterTraining, dataset: Dataset) -> dict[str, str]:
    identity = {k: str(v) for k, v in asdict(settings).items() if k not in FREE}
    samples = [dataset.source(index).ids for index in range(8)]  # they identify the dataset
    identity["texts"] = sha256(repr((dataset.distinct, samples)).encode()).hexdigest()[:12]
    return identity


def _checkpoint(trainer: Trainer, dataset: Dataset, progress: Progress) -> None:
    state: dict[str, object] = {
        "identity": _identity(trainer.settings, dataset),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "progress": asdict(progress),
    }
    save_atomically(state, trainer.settings.checkpoint)
    trainer.export(trainer.settings.out)


def _restore(trainer: Trainer, dataset: Dataset) -> Progress:
    settings = trainer.settings
    file = settings.checkpoint
    if not file.exists():
        return Progress()
    if not settings.resume:
        raise UsageError(f"{settings.run_folder} holds a training: --resume it, or another --run")
    state = load_checkpoint(file)
    before = state.get("identity", {})
    now = _identity(settings, dataset)
    other = [f"{k} {before[k]} then, {now.get(k)} now" for k in before if before[k] != now.get(k)]
    if other and not settings.force:
        reason = f"of a training with other settings ({'; '.join(other)}); --force continues"
        raise UsageError(f"{file}: {reason}")
    try:
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        return Progress(**state["progress"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = first_line(error)
        raise UsageError(f"{file}: of a training with other settings ({reason})") from None


@contextmanager
def training_log(path: Path, title: str) -> Iterator[Callable[..., None]]:
    """Yields report(done, standing="", **values), which appends to a log and shows a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, working(title, bar=True) as show:

        def report(done: float, standing: str = "", **values: float) -> None:
            file.write(json.dumps({"done": round(done, 5), **values}) + "\n")
            file.flush()
            note = " ".join(f"{name} {value:.4g}" for name, value in values.items())
            show(f"{title} {done:.1%} {note} {standing}".rstrip(), min(done, 1.0))

        yield report

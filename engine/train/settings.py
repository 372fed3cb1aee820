"""What a training of a drafter can be told; every field is an option of `specsot train`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..prepare.options import option

MINUTES = 25.0  # of a training that is given no limit
MLP = "Width of the MLP."
OUT: Any = option(..., "Folder of the finished model.")
RUN: Any = option(None, "Checkpoints and the log; default OUT.run.")
share = partial(option, min=0, max=1)
unset = partial(option, None)


@dataclass(frozen=True, kw_only=True)
class DrafterTraining:
    """What all trainings have in common. The first of ``minutes``, ``tokens`` and ``steps`` that is
    reached ends it, the learning rate follows the furthest; only ``minutes`` depend on the time."""

    out: Path = OUT
    target: str = option("embedded", "`embedded`, a checkpoint folder or a Hub id.")
    run: Path | None = RUN
    held_out: int = option(8, "Prompts that acceptance is measured with.", min=0)
    minutes: float | None = unset(f"Time limit; default {MINUTES:g}, without another.", min=0.001)
    tokens: int | None = unset("Stop after this many tokens.", min=1)
    steps: int | None = unset("Stop after this many updates.", min=1)
    lr: float = option(3e-3, "Peak learning rate of the layers.", min=0.0)
    head_lr: float = option(2e-3, "Peak learning rate of the rest.", min=0.0)
    batch_tokens: int = option(3072, "Tokens of an update.", min=16)
    length: int = option(768, "Tokens of a row; longer samples are cut.", min=16)
    seed: int = option(5, "Another seed, other samples and weights.")
    resume: bool = option(False, "Continue from the last checkpoint.")
    force: bool = option(False, "Even with other settings or texts.")
    save_minutes: float = option(3.0, "Of training, between checkpoints.", min=0.0)
    measure_minutes: float = option(3.0, "Of training, between looks.", min=0.0)
    device: str = option("cpu", "cpu, cuda, cuda:1 ...")
    threads: int | None = unset("Of a CPU.", min=1)

    @property
    def run_folder(self) -> Path:
        return self.run or self.out.with_name(f"{self.out.name}.run")

    @property
    def checkpoint(self) -> Path:
        return self.run_folder / "state.pt"


@dataclass(frozen=True, kw_only=True)
class EagleTraining(DrafterTraining):
    unroll: int = option(4, "Drafted steps per token.", min=1)
    decay: float = option(0.8, "Weight of a step over the one before.", min=0.0)


@dataclass(frozen=True, kw_only=True)
class Eagle2Training(EagleTraining):
    intermediate: int = option(1536, MLP, min=1)
    classification: float = option(0.1, "Weight of the loss on the target's distribution.", min=0.0)


@dataclass(frozen=True, kw_only=True)
class Eagle3Training(EagleTraining):
    intermediate: int = option(2048, MLP, min=1)
    draft_vocabulary: int = option(2048, "Number of most frequent ids that it can draft.", min=1)


@dataclass(frozen=True, kw_only=True)
class DFlashTraining(DrafterTraining):
    layers: int = option(2, "Published drafters have 5.", min=1)
    intermediate: int = option(1536, MLP, min=1)
    block_size: int = option(8, "Rows with the anchor; published: 16.", min=2)
    num_anchors: int = option(128, "Random blocks per row of a step.", min=1)
    distillation: float = share(0.0, "Share of divergence in the loss, for few texts.")
    target_layer_ids: str | None = option(
        None, "Layers of the target, from 0, e.g. 1,5; default: evenly spread."
    )
    mask_token_id: int | None = unset("Default: the tokenizer's mask, else an unused row.", min=0)

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        if self.target_layer_ids is None:
            return None
        parts = [part.strip() for part in self.target_layer_ids.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise UsageError(f"--target-layer-ids {self.target_layer_ids}: numbers with commas")
        return tuple(int(part) for part in parts)


@dataclass(frozen=True, kw_only=True)
class MedusaTraining(DrafterTraining):
    heads: int = option(3, "Drafted levels; published: 5.", min=1)
    blocks: int = option(2, "Residual blocks of a head; published: 1.", min=1)
    decay: float = option(0.8, "Weight of a head over the one before.", min=0.0)
    own_heads: bool = option(False, "Products of their own, as published, not the target's head.")


@dataclass(frozen=True, kw_only=True)
class VanillaTraining(DrafterTraining):
    """A small language model's shape and its loss; each head has ``hidden`` / ``heads`` numbers."""

    layers: int = option(2, "Layers.", min=1)
    hidden: int = option(128, "Width.", min=2)
    intermediate: int = option(1024, MLP, min=1)
    heads: int = option(4, "Attention heads, of queries and keys alike.", min=1)
    distillation: float = share(0.5, "Share of the loss that is divergence from the target.")
    gamma: int = option(4, "Chain that acceptance is measured with.", min=1)


@dataclass(frozen=True, kw_only=True)
class ConversationFile:
    prompts: Sequence[Path] = option(
        ...,
        "JSONL: answers of `specsot train answers`, or {'messages': [{'role', 'content'},"
        " ...]} (or ShareGPT's 'conversations') per line. May be repeated.",
    )

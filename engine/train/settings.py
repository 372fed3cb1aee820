"""What a training of a drafter can be told; every field is an option of `specsot train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from ..errors import UsageError

MINUTES = 25.0  # of a training that is given no limit

Intermediate = Annotated[int, Option(min=1, help="Width of the MLP.")]


@dataclass(frozen=True, kw_only=True)
class DrafterTraining:
    """What all drafters' trainings have in common. The first of ``minutes``, ``tokens`` and
    ``steps`` ends the training, and the learning rate follows whichever is furthest; without
    ``minutes`` nothing depends on the time."""

    out: Annotated[Path, Option(help="Folder of the finished model.")]
    target: Annotated[str, Option(help="`embedded`, a checkpoint folder or a Hub id.")] = "embedded"
    run: Annotated[Path | None, Option(help="Checkpoints and the log; default OUT.run.")] = None
    held_out: Annotated[int, Option(min=0, help="Prompts that acceptance is measured with.")] = 8
    minutes: Annotated[
        float | None, Option(min=0.001, help=f"Time limit; default {MINUTES:g}, without another.")
    ] = None
    tokens: Annotated[int | None, Option(min=1, help="Stop after this many tokens.")] = None
    steps: Annotated[int | None, Option(min=1, help="Stop after this many updates.")] = None
    lr: Annotated[float, Option(min=0.0, help="Peak learning rate of the layers.")] = 3e-3
    head_lr: Annotated[float, Option(min=0.0, help="Peak learning rate of the rest.")] = 2e-3
    batch_tokens: Annotated[int, Option(min=16, help="Tokens of an update.")] = 3072
    length: Annotated[int, Option(min=16, help="Tokens of a row; longer samples are cut.")] = 768
    keep_features: Annotated[
        bool, Option("--keep-features", help="Read every text once: some KB of memory per token.")
    ] = False
    seed: Annotated[int, Option(help="Another seed, other samples and weights.")] = 5
    resume: Annotated[bool, Option("--resume", help="Continue from the last checkpoint.")] = False
    force: Annotated[bool, Option("--force", help="Even with other settings or texts.")] = False
    save_minutes: Annotated[float, Option(min=0.0, help="Of training, between checkpoints.")] = 3.0
    measure_minutes: Annotated[float, Option(min=0.0, help="Of training, between looks.")] = 3.0
    device: Annotated[str, Option(help="cpu, cuda, cuda:1 ...")] = "cpu"
    threads: Annotated[int | None, Option(min=1, help="Of a CPU.")] = None

    @property
    def run_folder(self) -> Path:
        return self.run or self.out.with_name(f"{self.out.name}.run")

    @property
    def checkpoint(self) -> Path:
        return self.run_folder / "state.pt"


@dataclass(frozen=True, kw_only=True)
class EagleTraining(DrafterTraining):
    unroll: Annotated[int, Option(min=1, help="Drafted steps per token.")] = 4
    decay: Annotated[float, Option(min=0.0, help="Weight of a step over the one before.")] = 0.8


@dataclass(frozen=True, kw_only=True)
class Eagle2Training(EagleTraining):
    intermediate: Intermediate = 1536
    classification: Annotated[
        float, Option(min=0.0, help="Weight of the loss on the target's distribution.")
    ] = 0.1


@dataclass(frozen=True, kw_only=True)
class Eagle3Training(EagleTraining):
    intermediate: Intermediate = 2048
    draft_vocabulary: Annotated[
        int, Option(min=1, help="Number of most frequent ids that it can draft.")
    ] = 2048


@dataclass(frozen=True, kw_only=True)
class DFlashTraining(DrafterTraining):
    layers: Annotated[int, Option(min=1, help="Published drafters have 5.")] = 2
    intermediate: Intermediate = 1536
    block_size: Annotated[int, Option(min=2, help="Rows with the anchor; published: 16.")] = 8
    num_anchors: Annotated[int, Option(min=1, help="Random blocks per row of a step.")] = 128
    distillation: Annotated[
        float, Option(min=0, max=1, help="Share of divergence in the loss, for few texts.")
    ] = 0.0
    target_layer_ids: Annotated[
        str | None, Option(help="Layers of the target, from 0, e.g. 1,5; default: evenly spread.")
    ] = None
    mask_token_id: Annotated[
        int | None, Option(min=0, help="Default: the tokenizer's mask, else an unused row.")
    ] = None

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        if self.target_layer_ids is None:
            return None
        parts = [part.strip() for part in self.target_layer_ids.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise UsageError(f"--target-layer-ids {self.target_layer_ids}: numbers with commas")
        return tuple(int(part) for part in parts)


@dataclass(frozen=True, kw_only=True)
class VanillaTraining(DrafterTraining):
    """A small language model's shape and its loss; each head has ``hidden`` / ``heads`` numbers."""

    layers: Annotated[int, Option(min=1, help="Layers.")] = 2
    hidden: Annotated[int, Option(min=2, help="Width.")] = 128
    intermediate: Intermediate = 1024
    heads: Annotated[int, Option(min=1, help="Attention heads, of queries and keys alike.")] = 4
    distillation: Annotated[
        float, Option(min=0, max=1, help="Share of the loss that is divergence from the target.")
    ] = 0.5
    gamma: Annotated[int, Option(min=1, help="Chain that acceptance is measured with.")] = 4


@dataclass(frozen=True, kw_only=True)
class ConversationFile:
    prompts: Annotated[
        list[Path],
        Option(
            help="JSONL: answers of `specsot train answers`, or {'messages': [{'role', 'content'},"
            " ...]} (or ShareGPT's 'conversations') per line. May be repeated."
        ),
    ]

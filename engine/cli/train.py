"""`specsot train`: drafters for any target. What trains is imported only when a command runs."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..prepare.options import RunOptions
from ..train.settings import (
    ConversationFile,
    DFlashTraining,
    DrafterTraining,
    Eagle2Training,
    Eagle3Training,
    VanillaTraining,
)
from .options import flat_options, option, takes

if TYPE_CHECKING:
    from ..train.loop import Trainer

train = typer.Typer(help="Train drafters for any target.", no_args_is_help=True)


@train.command()
@takes(
    *("graph", "profile", "model", "seed", "device", "dtype", "threads", "max_new_tokens", "sets")
)
def answers(
    options: RunOptions,
    prompts: Annotated[Path, option("JSONL: {'prompt': ...} or {'messages': [...]} per line.")],
    out: Annotated[Path, option("File of answers; what is in it is not asked again.")],
    at_once: Annotated[int, option("Branches that are written together.", min=1)] = 32,
    length: Annotated[int, option("Tokens of a whole conversation.", min=16)] = 768,
) -> None:
    """Let a target answer prompts through a graph: texts that its drafters are trained on."""
    from ..train.answers import answer_file

    typer.echo(f"{answer_file(options, prompts, out, at_once, length)} answers in {out}")


@train.command()
@flat_options
def eagle2(settings: Eagle2Training, file: ConversationFile) -> None:
    """Train a head for EAGLE-1 and EAGLE-2. The defaults are the shape of the embedded one."""
    from ..train.eagle import Eagle2Trainer

    _train(Eagle2Trainer, settings, file)


@train.command()
@flat_options
def eagle3(settings: Eagle3Training, file: ConversationFile) -> None:
    """Train an EAGLE-3 drafter. The defaults are the shape of the embedded one."""
    from ..train.eagle import Eagle3Trainer

    _train(Eagle3Trainer, settings, file)


@train.command()
@flat_options
def dflash(settings: DFlashTraining, file: ConversationFile) -> None:
    """Train a DFlash drafter. The defaults are the shape of the embedded one."""
    from ..train.dflash import DFlashTrainer

    _train(DFlashTrainer, settings, file)


@train.command()
@flat_options
def vanilla(settings: VanillaTraining, file: ConversationFile) -> None:
    """Train a small language model as a drafter. The defaults are the shape of the embedded one."""
    from ..train.vanilla import VanillaTrainer

    _train(VanillaTrainer, settings, file)


def _train(kind: "type[Trainer]", settings: DrafterTraining, file: ConversationFile) -> None:
    from ..train.dataset import conversation_dataset
    from ..train.loop import train_drafter

    typer.echo(train_drafter(kind, settings, partial(conversation_dataset, file)))

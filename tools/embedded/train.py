"""How the embedded models are made: the target, and its drafters on the same generated texts.

    python -m tools.embedded.train target --out out/target --minutes 60
    python -m tools.embedded.train eagle3 --target out/target --out out/eagle3 --minutes 18

`python -m tools.embedded.train KIND --help` lists the options of each."""

from collections.abc import Callable
from inspect import Signature
from typing import Any

import typer

from specsot.engine.cli.options import parameters_of
from specsot.engine.train.dflash import DFlashTrainer
from specsot.engine.train.eagle import Eagle2Trainer, Eagle3Trainer
from specsot.engine.train.loop import train_drafter
from specsot.engine.train.medusa import MedusaTrainer
from specsot.engine.train.settings import (
    DFlashTraining,
    Eagle2Training,
    Eagle3Training,
    MedusaTraining,
    VanillaTraining,
)
from specsot.engine.train.vanilla import VanillaTrainer

from .lessons import corpus_lessons
from .target import TargetTraining, train_target

app = typer.Typer(help="Train the embedded target and its drafters.", no_args_is_help=True)


def add(name: str, help: str, kind: type[Any], train: Callable[[Any], object]) -> None:
    """Add a command with an option for each setting."""

    def command(**values: Any) -> None:
        typer.echo(train(kind(**values)))

    command.__signature__ = Signature([*parameters_of(kind)])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    app.command(name, help=help)(command)


def drafter(trainer: Any) -> Callable[[Any], object]:
    return lambda settings: train_drafter(trainer, settings, corpus_lessons)


TARGET = "Train tokenizer and target on texts generated from the almanac."
add("target", TARGET, TargetTraining, train_target)
EAGLE2 = "Train the head of EAGLE-1 and EAGLE-2."
add("eagle2", EAGLE2, Eagle2Training, drafter(Eagle2Trainer))
add("eagle3", "Train the EAGLE-3 drafter.", Eagle3Training, drafter(Eagle3Trainer))
add("dflash", "Train the DFlash drafter.", DFlashTraining, drafter(DFlashTrainer))
add("medusa", "Train heads of Medusa.", MedusaTraining, drafter(MedusaTrainer))
VANILLA = "Train the small language model that drafts."
add("vanilla", VANILLA, VanillaTraining, drafter(VanillaTrainer))


if __name__ == "__main__":
    app()

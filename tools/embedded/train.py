"""How the embedded models are made: the target, and its drafters on the same generated texts.

    python -m tools.embedded.train target --out out/target --minutes 60
    python -m tools.embedded.train eagle3 --target out/target --out out/eagle3 --minutes 18

`python -m tools.embedded.train KIND --help` lists the options of each.
"""

import typer

from specsot.engine.cli.options import flat_options
from specsot.engine.train.dflash import DFlashTrainer
from specsot.engine.train.eagle import Eagle2Trainer, Eagle3Trainer
from specsot.engine.train.loop import train_drafter
from specsot.engine.train.settings import (
    DFlashTraining,
    Eagle2Training,
    Eagle3Training,
    VanillaTraining,
)
from specsot.engine.train.vanilla import VanillaTrainer

from .lessons import corpus_lessons
from .target import TargetTraining, train_target

app = typer.Typer(help="Train the embedded target and its drafters.", no_args_is_help=True)


@app.command()
@flat_options
def target(settings: TargetTraining) -> None:
    """Train tokenizer and target on texts generated from the almanac."""
    typer.echo(train_target(settings))


@app.command()
@flat_options
def eagle2(settings: Eagle2Training) -> None:
    """Train the head of EAGLE-1 and EAGLE-2."""
    typer.echo(train_drafter(Eagle2Trainer, settings, corpus_lessons))


@app.command()
@flat_options
def eagle3(settings: Eagle3Training) -> None:
    """Train the EAGLE-3 drafter."""
    typer.echo(train_drafter(Eagle3Trainer, settings, corpus_lessons))


@app.command()
@flat_options
def dflash(settings: DFlashTraining) -> None:
    """Train the DFlash drafter."""
    typer.echo(train_drafter(DFlashTrainer, settings, corpus_lessons))


@app.command()
@flat_options
def vanilla(settings: VanillaTraining) -> None:
    """Train the small language model that drafts."""
    typer.echo(train_drafter(VanillaTrainer, settings, corpus_lessons))


if __name__ == "__main__":
    app()

"""`specsot train`: drafters for any target. What trains is imported only when a command runs."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from ..prepare.options import RunOptions
from ..shell import user_errors
from ..train import settings
from .options import option, takes

train = typer.Typer(help="Train drafters for any target.", no_args_is_help=True)


@train.command()
@takes("graph", "profile", "model", "seed", "device", "dtype", "threads", "max_new_tokens", "sets")
def answers(
    options: RunOptions,
    prompts: Path = option("JSONL: {'prompt': ...} or {'messages': [...]} per line.", default=...),
    out: Path = option("File of answers; questions in it are skipped.", default=...),
    at_once: int = option("Branches that are written together.", default=32, min=1),
    length: int = option("Tokens of a whole conversation.", default=768, min=16),
) -> None:
    """Let a target answer prompts through a graph: texts that its drafters are trained on."""
    from ..train.answers import answer_file

    typer.echo(f"{answer_file(options, prompts, out, at_once, length=length)} answers in {out}")


def _add(kind: type[settings.DrafterTraining], trainer: str, help: str) -> None:
    """Add a command that trains drafters; trainer: `module.Class` in engine/train."""
    module, _, class_name = trainer.partition(".")

    def command(_: RunOptions, training: Any, file: settings.ConversationFile) -> None:
        from ..train.dataset import conversation_dataset
        from ..train.loop import train_drafter

        with user_errors():
            made = getattr(import_module(f"..train.{module}", __package__), class_name)
            typer.echo(train_drafter(made, training, partial(conversation_dataset, file)))

    command.__annotations__["training"] = kind
    text = f"{help} The defaults are the shape of the embedded one."
    train.command(class_name.removesuffix("Trainer").lower(), help=text)(takes()(command))


_add(settings.Eagle2Training, "eagle.Eagle2Trainer", "Train a head for EAGLE-1 and EAGLE-2.")
_add(settings.Eagle3Training, "eagle.Eagle3Trainer", "Train an EAGLE-3 drafter.")
_add(settings.DFlashTraining, "dflash.DFlashTrainer", "Train a DFlash drafter.")
_add(settings.MedusaTraining, "medusa.MedusaTrainer", "Train heads of Medusa.")
_add(
    settings.VanillaTraining, "vanilla.VanillaTrainer", "Train a small language model as a drafter."
)

"""`specsot train`: drafters for any target. What trains is imported only when a command runs."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

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
    out: Path = option("File of answers; what is in it is not asked again.", default=...),
    at_once: int = option("Branches that are written together.", default=32, min=1),
    length: int = option("Tokens of a whole conversation.", default=768, min=16),
) -> None:
    """Let a target answer prompts through a graph: texts that its drafters are trained on."""
    from ..train.answers import answer_file

    typer.echo(f"{answer_file(options, prompts, out, at_once, length)} answers in {out}")


def parameters_of(kind: type[Any]) -> Iterator[Parameter]:
    """An option for each `Annotated` field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if get_origin(hint := hints[field.name]) is Annotated:
            default = Parameter.empty if field.default is MISSING else field.default
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _add(kind: type[settings.DrafterTraining], trainer: str, help: str) -> None:
    """Add a command that trains drafters; trainer: `module.Class` in engine/train."""
    module, _, class_name = trainer.partition(".")

    def command(prompts: list[Path], **values: Any) -> None:
        from ..train.dataset import conversation_dataset
        from ..train.loop import train_drafter

        with user_errors():
            made = getattr(import_module(f"..train.{module}", __package__), class_name)
            texts = partial(conversation_dataset, settings.ConversationFile(prompts=prompts))
            typer.echo(train_drafter(made, kind(**values), texts))

    parameters = [*parameters_of(kind), *parameters_of(settings.ConversationFile)]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    text = f"{help} The defaults are the shape of the embedded one."
    train.command(class_name.removesuffix("Trainer").lower(), help=text)(command)


_add(settings.Eagle2Training, "eagle.Eagle2Trainer", "Train a head for EAGLE-1 and EAGLE-2.")
_add(settings.Eagle3Training, "eagle.Eagle3Trainer", "Train an EAGLE-3 drafter.")
_add(settings.DFlashTraining, "dflash.DFlashTrainer", "Train a DFlash drafter.")
_add(
    settings.VanillaTraining, "vanilla.VanillaTrainer", "Train a small language model as a drafter."
)

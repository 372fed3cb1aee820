"""`specsot train`: drafters for any target. What trains is imported only when a command runs."""

from functools import partial

import typer

from ..train.settings import ConversationFile, DFlashTraining, Eagle3Training, VanillaTraining
from .options import flat_options

train = typer.Typer(help="Train drafters for any target.", no_args_is_help=True)


@train.command()
@flat_options
def eagle3(settings: Eagle3Training, file: ConversationFile) -> None:
    """Train an EAGLE-3 drafter. The defaults are the shape of the embedded one."""
    from ..train.eagle3 import train_eagle3
    from ..train.lessons import conversation_lessons

    typer.echo(train_eagle3(settings, partial(conversation_lessons, file)))


@train.command()
@flat_options
def dflash(settings: DFlashTraining, file: ConversationFile) -> None:
    """Train a DFlash drafter. The defaults are the shape of the embedded one."""
    from ..train.dflash import train_dflash
    from ..train.lessons import conversation_lessons

    typer.echo(train_dflash(settings, partial(conversation_lessons, file)))


@train.command()
@flat_options
def vanilla(settings: VanillaTraining, file: ConversationFile) -> None:
    """Train a small language model as a drafter. The defaults are the shape of the embedded one."""
    from ..train.lessons import conversation_lessons
    from ..train.vanilla import train_vanilla

    typer.echo(train_vanilla(settings, partial(conversation_lessons, file)))

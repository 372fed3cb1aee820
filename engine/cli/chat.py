"""`specsot chat`: several turns in the terminal, each behind the ones before."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import typer

from ..prepare.options import SESSION, RunOptions
from .completing import graph_names_of
from .options import takes

GRAPH = typer.Argument(
    metavar="GRAPH",
    help="A shipped graph or a graph file [specsot.yaml's].",
    show_default=False,
    autocompletion=graph_names_of,
)


@takes(*(name for name in SESSION if name != "outline"))
def chat(options: RunOptions, graph: Annotated[str | None, GRAPH] = None) -> None:
    """Talk with the model: answers come as they are written, parts in reading order.

    Ctrl-C stops an answer; Ctrl-D or /quit ends, /new forgets what was said. Without a terminal
    every line of standard input is a turn. Examples: `specsot chat`, `specsot chat eagle`,
    `specsot chat eagle --profile smollm2`.
    """
    from .conversation import chat_command

    raise typer.Exit(chat_command(options, graph, lines()))


def lines() -> Iterator[str]:
    """What is typed, with a prompt, or the lines of standard input."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import_module("readline")  # makes `input` edit lines and remember them
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)", file=sys.stderr)

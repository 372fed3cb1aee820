"""The command line. The module of a command is imported when that command is called."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

import typer
from typer import Exit
from typer.core import TyperGroup

from ..shell import complain, one_line_for_faults, open_streams, show_renamed_keys, user_errors
from ..signals import let_close
from .completing import command_line

PROGRAM = "specsot"
COMPLETING = "_SPECSOT_COMPLETE"  # set where a shell asks for completions


class Command(NamedTuple):
    """Where a command's function is, and its line in the list of commands."""

    name: str
    module: str
    help: str
    function: str = ""  # without one it has the name of the command


COMMANDS = (
    Command("run", "run_command", "Answer a prompt, live, from a graph."),
    Command("chat", "chat", "Talk with the model, turn by turn."),
    Command("serve", "serve", "Serve graphs: OpenAI's API, and a page."),
    Command("cluster", "serve", "Workers of this machine: up, status, scale, down."),
    Command("compare", "decoding", "Compare graphs: equal tokens, and the cost."),
    Command("sweep", "decoding", "Vary settings of a graph: what each costs."),
    Command("bench", "decoding", "Measure experiments: paired, with intervals, against hf."),
    Command("certify", "decoding", "Certify that a graph is lossless."),
    Command("verify-run", "runs", "Compare a run folder with plain transformers."),
    Command("check", "graphs", "Check graphs: every problem with its place."),
    Command("show", "graphs", "Print a graph; --full, --resolved, --mermaid."),
    Command("explain", "graphs", "The meaning of a problem code or an exit code."),
    Command("init", "graphs", "Copy graphs, prompts and settings to change."),
    Command("list", "graphs", "The shipped graphs and their purpose.", "list_graphs"),
    Command("schema", "graphs", "The JSON schema of graph files."),
    Command("train", "train", "Train a drafter for any target."),
    Command("models", "models", "Models: list, get, inspect, convert, remove."),
    Command("simulate", "decoding", "Policies on arrivals, without a model."),
    Command("replay", "runs", "Play a recorded run: forwards, backwards, at any speed."),
    Command("view", "serve", "A recorded run in the browser, forwards and backwards."),
    Command("runs", "runs", "Recorded runs: list, show, diff, clean."),
    Command("trace", "runs", "Traces of recorded runs: export, for ui.perfetto.dev too."),
    Command("cache", "models", "Cached chunks of documents: add, list, drop."),
    Command("doctor", "doctor", "Report the environment and test the installation."),
)

RENAMED = {  # options by their old names, which this release still reads
    "--patience": "--read-timeout",
    "--stall": "--write-timeout",
    "--grace": "--shutdown-timeout",
    "--slow": "--step-delay",
    "--skip-scan": "--no-nan-check",
}

EXIT_CODES = (
    "Exit codes: 0 good, 1 the run failed, 2 wrong usage, 3 a graph or configuration has problems, "
    "4 a model cannot be used, 5 results differ that must be equal, 6 slower than the baseline, "
    "130 interrupted."
)


class Commands(TyperGroup):
    """Every command ends with the exit code that it returns, and with one message after an error of
    the user; click would end an interruption without a word."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        with user_errors():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with user_errors():
            if code := super().invoke(ctx):
                raise Exit(code)


def build(names: Sequence[str]) -> typer.Typer:
    """The application; only the commands of these names are imported."""
    text = "Speculative decoding x skeleton-of-thought, driven by YAML graphs."
    plain: Any = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
    plain |= {"no_args_is_help": True, "epilog": EXIT_CODES}
    app = typer.Typer(name=PROGRAM, cls=Commands, help=text, **plain)
    app.callback()(_root)
    for command in COMMANDS:
        if command.name not in names:
            app.command(command.name, help=command.help)(lambda: None)
            continue
        module = import_module(f".{command.module}", __package__)
        name = command.function or command.name.replace("-", "_")
        function: Callable[..., Any] | typer.Typer = getattr(module, name)
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=command.name, help=command.help)
        else:
            app.command(command.name)(function)
    return app


def _version(show: bool) -> None:
    if show:
        print(f"{PROGRAM} {version(PROGRAM)}")
        raise Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def _current(word: str) -> str:
    """An argument with the present name of its option, and a warning about an old one."""
    old, *value = word.split("=", 1)
    if old not in RENAMED:
        return word
    complain(f"{old} is now called {RENAMED[old]}")
    return "=".join((RENAMED[old], *value))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of this process, or the arguments of a call from Python."""
    words = list(sys.argv[1:] if argv is None else argv)
    named = command_line() if COMPLETING in os.environ else words
    names = [word for word in named if not word.startswith("-")][:1]
    open_streams()
    show_renamed_keys()
    end = words.index("--") if "--" in words else len(words)
    words[:end] = map(_current, words[:end])
    # Spinning threads halve the speed when other processes use the CPU; passive waiting costs a
    # fifth on an idle machine. Other programs are measured as they run by default.
    if names != ["bench"]:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A broken specsot.yaml, or a folder that does not exist, has no completions.
    faults = suppress(Exception) if COMPLETING in os.environ else one_line_for_faults()
    try:
        with faults:
            build(names)(args=words, prog_name=PROGRAM)
    finally:
        if argv is None:
            let_close()

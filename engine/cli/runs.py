"""`specsot runs list | show | diff | clean`, `trace export`, `replay`, `verify-run`: saved runs.
Only `verify-run` needs a model; torch is imported only there, and where a trace is read."""

import os
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import Literal

import typer

from ...states.yaml.source import number_of
from ..errors import Code, UsageError
from ..record import run_folder
from ..shell import aligned, complain, printable, put, shortened
from .options import JSON, RUN, RUNS_DIR, WHICH, argument, flag, option, show_result

UNLIMITED = 10_000  # characters of a line that goes to a file or a pipe

runs = typer.Typer(help="Recorded runs: list, show, diff, clean.", no_args_is_help=True)
trace = typer.Typer(help="Traces of recorded runs: export.", no_args_is_help=True)


@runs.command("list")
def list_runs(runs_dir: Path = RUNS_DIR, as_json: bool = JSON) -> int:
    """List recorded runs, the newest last; exit code 1 if a run folder is damaged."""
    readable, broken = run_folder.readable_runs(runs_dir)
    rows = [*readable.values()]
    table = [("run", "status", "tokens", "seconds", "model", "digest", "prompt")]
    for row in rows:
        tokens = "" if row["tokens"] is None else str(row["tokens"])
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        digest = (row["digest"] or "")[:8]
        prompt = printable(row["prompt"] or "", "")
        model = Path(row["model"] or "").name
        table.append((row["name"], row["status"] or "", tokens, seconds, model, digest, prompt))
    width = get_terminal_size((UNLIMITED, 0)).columns  # of a terminal, or COLUMNS
    lines = [shortened(line, width) for line in aligned(table)] if rows else []
    lines.append(f"{number_of(len(rows), 'run')} in {runs_dir}")
    show_result(as_json, lines, folder=str(runs_dir), runs=rows, broken=broken)
    for reason in broken.values():
        complain(f"broken run: {reason}")
    return Code.FAILED if broken else Code.OK


@runs.command()
def show(run: str = RUN, runs_dir: Path = RUNS_DIR) -> None:
    """Print a run: settings, figures, states, parts; on a terminal with the answers."""
    saved = run_folder.find_run(run, runs_dir)
    if not sys.stdout.isatty():
        put(saved.text("summary.md"))
        return
    from rich.console import Console

    from ..view.run_page import run_page

    console = Console(highlight=False)
    with console.capture() as page:
        console.print(run_page(saved))
    put(page.get())


@runs.command()
def diff(
    first: str = argument(WHICH, ..., metavar="RUN"),
    second: str = argument("Another.", run_folder.LATEST, metavar="RUN"),
    runs_dir: Path = RUNS_DIR,
    as_json: bool = JSON,
) -> int:
    """Compare two runs: settings, the first different token, figures; code 5 if any differs."""
    sides = [run_folder.find_run(name, runs_dir) for name in (first, second)]
    result = run_folder.difference(*sides)
    texts = {name: [shortened(v, 48) for v in both] for name, both in result["settings"].items()}
    lines = [f"{name}: {' | '.join(both)}" for name, both in texts.items()]
    lines = lines or ["settings: the same"]
    difference = result["first"]
    if difference is None:
        lines.append("tokens: all equal")
    elif "only_in" in difference:
        side = difference["only_in"]
        lines.append(f"tokens: request {difference['request']} is in run {side} only")
    else:
        a, b = difference["ids"]
        one, other = difference["texts"]
        place = f"request {difference['request']}, {difference['where']}"
        lines.append(f"tokens: {place}, token {difference['token']}: {a} | {b}")
        if one or other:
            lines.append(f"  ...{difference['before']!r} then {one!r} | {other!r}")
    for name, (a, b) in result["figures"].items():
        ratio = f"  x {b / a:.2f}" if a and b else ""
        numbers = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in (a, b)]
        lines.append(f"{name}: {' | '.join(numbers)}{ratio}")
    show_result(as_json, lines, **result)
    return Code.OK if result["equal"] else Code.UNEQUAL


@runs.command()
def clean(
    keep: int | None = option("Keep the newest N.", min=0),
    older_than: float | None = option("Only runs older than this.", min=0, metavar="DAYS"),
    dry_run: bool = flag("Only name them.", "--dry-run"),
    runs_dir: Path = RUNS_DIR,
) -> None:
    """Delete recorded runs; unfinished runs and other folders stay."""
    if keep is None and older_than is None:
        raise UsageError("say which: --keep N, --older-than DAYS, or both")
    chosen = run_folder.removable_runs(runs_dir, keep, older_than)
    size = 0
    for run in chosen:
        print(run.path.name)
        size += 0 if dry_run else run_folder.remove(run)
    done = f"{number_of(len(chosen), 'run')} {'would be ' if dry_run else ''}removed"
    complain(f"{done}, {size / 1e6:.1f} MB")


@trace.command()
def export(
    run: str = RUN,
    form: Literal["perfetto", "csv"] = option(
        "For ui.perfetto.dev, or a table.", "--format", default="perfetto"
    ),
    out: Path | None = option("The file [standard output].", "--out"),
    runs_dir: Path = RUNS_DIR,
) -> None:
    """Export a run's trace in another format.

    Example: `specsot trace export latest --out trace.json`, opened in ui.perfetto.dev."""
    from ..record.replay import as_csv, as_perfetto, records_of

    saved = run_folder.find_run(run, runs_dir)
    records = records_of(saved)
    with run_folder.valid(saved):
        text = as_csv(records) if form == "csv" else as_perfetto(records, saved.path.name)
    if out is None:
        put(text)
    else:
        out.write_text(text, encoding="utf-8")
        complain(f"wrote {out}, {out.stat().st_size:,} bytes")


def replay(
    run: str = RUN,
    speed: float = option("1 as fast as the run was, 0.1 ten times slower.", default=1.0),
    runs_dir: Path = RUNS_DIR,
) -> None:
    """Play a recorded run; without a terminal, print its last picture as text.

    Examples: `specsot replay`, `specsot replay latest --speed 0.1`."""
    from rich.console import Console

    from ..record.replay import Replay
    from ..shell import usable
    from ..view.keys import Keys
    from ..view.tui import MAX_SPEED, MIN_SPEED, Player, frame, play

    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise UsageError(f"--speed takes {MIN_SPEED:g} to {MAX_SPEED:g}")
    replayed = Replay(run_folder.find_run(run, runs_dir))
    for missing in replayed.missing:
        complain(f"note: {replayed.run.path.name}: {missing} are not in this run folder")
    console = Console()
    player = Player(replayed, speed)
    if usable(console, dict(os.environ)):
        with Keys(sys.stdin) as keys:
            play(player, console, keys)
    else:
        player.press("end")
    height = console.size.height - 1
    with console.capture() as picture:
        last = frame(replayed.scene, replayed.snapshot(player.frame), console.size.width, height)
        console.print(last, height=height)
    put(picture.get())


def verify_run(
    run: str = RUN,
    runs_dir: Path = RUNS_DIR,
    as_json: bool = JSON,
    threads: int | None = option("CPU threads [the run's].", envvar="SPECSOT_THREADS"),
) -> int:
    """Compare the tokens of a finished run with plain transformers.

    Example: `specsot run bim_eagle`, then `specsot verify-run latest`."""
    from ..certify.verify_run import verify_command

    return verify_command(run, runs_dir, as_json, threads)

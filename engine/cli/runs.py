"""`specsot runs list | show | diff | clean` and `specsot trace export`: runs that were kept."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import Code, UsageError
from ..record.kept_runs import difference, find_run, kept_runs, remove, to_clean
from ..record.trace_export import as_csv, as_perfetto, records_of
from ..shell import complain, print_json, put, user_errors
from .completing import runs_of
from .options import RUNS_DIR, WHICH, Json, Runs, Which

runs = typer.Typer(help="Kept runs: list, show, diff, clean.", no_args_is_help=True)
trace = typer.Typer(help="Traces of kept runs: export.", no_args_is_help=True)


@runs.command("list")
def list_runs(runs_dir: Runs = RUNS_DIR, as_json: Json = False) -> None:
    """The kept runs, the newest at the end."""
    with user_errors():
        rows = [one.row for one in kept_runs(runs_dir)]
    if as_json:
        print_json(folder=str(runs_dir), runs=rows)
        return
    for row in rows:
        speed = f"{row['tokens']} tokens, {row['seconds']:.1f} s" if row["tokens"] else ""
        print(
            f"{row['name']}  {row['status']}  {speed}  {row['model']}  {(row['digest'] or '')[:12]}"
        )
    print(f"{len(rows)} runs in {runs_dir}")


@runs.command()
def show(run: Which = "latest", runs_dir: Runs = RUNS_DIR) -> None:
    """The summary of a run: settings, figures, states, parts."""
    with user_errors():
        put(find_run(run, runs_dir).text("summary.md"))


@runs.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="RUN", help=WHICH, autocompletion=runs_of)],
    second: Annotated[
        str, typer.Argument(metavar="RUN", help="Another.", autocompletion=runs_of)
    ] = "latest",
    runs_dir: Runs = RUNS_DIR,
    as_json: Json = False,
) -> None:
    """What differs between two runs: settings, the first token, figures; code 5 if tokens do."""
    with user_errors():
        found = difference(find_run(first, runs_dir), find_run(second, runs_dir))
    if as_json:
        print_json(**asdict(found))
    else:
        put("".join(f"{line}\n" for line in _lines(found)))
    raise typer.Exit(Code.OK if found.equal else Code.UNEQUAL)


def _lines(found: Any) -> list[str]:
    lines = [f"{name}: {_short(a)} | {_short(b)}" for name, (a, b) in found.settings.items()]
    lines = lines or ["settings: the same"]
    if found.first is None:
        lines.append("tokens: all equal")
    elif "only_in" in found.first:
        lines.append(
            f"tokens: request {found.first['request']} is in run {found.first['only_in']} only"
        )
    else:
        at, (a, b) = found.first, found.first["ids"]
        lines.append(
            f"tokens: request {at['request']}, {at['where']}, token {at['token']}: {a} | {b}"
        )
        if any(at["texts"]):
            lines.append(f"  ...{at['before']!r} then {at['texts'][0]!r} | {at['texts'][1]!r}")
    for name, (a, b) in found.figures.items():
        ratio = f"  x {b / a:.2f}" if a and b else ""
        lines.append(f"{name}: {_number(a)} | {_number(b)}{ratio}")
    return lines


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@runs.command()
def clean(
    keep: Annotated[int | None, typer.Option(min=0, help="Leave so many, the newest.")] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Only those that began before.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which.")] = False,
    runs_dir: Runs = RUNS_DIR,
) -> None:
    """Delete kept runs; those that still run and everything that is no run folder stay."""
    with user_errors():
        if keep is None and older_than is None:
            raise UsageError("say which: --keep N, --older-than DAYS, or both")
        chosen = to_clean(runs_dir, keep, older_than)
        size = 0
        for one in chosen:
            print(one.path.name)
            size += 0 if dry_run else remove(one)
    complain(f"{len(chosen)} runs {'would be ' if dry_run else ''}removed, {size / 1e6:.1f} MB")


@trace.command()
def export(
    run: Which = "latest",
    form: Annotated[
        Literal["perfetto", "csv"],
        typer.Option("--format", help="For ui.perfetto.dev, or a table."),
    ] = "perfetto",
    out: Annotated[Path | None, typer.Option("--out", help="The file [standard output].")] = None,
    runs_dir: Runs = RUNS_DIR,
) -> None:
    """A run's trace in another format.

    Example: `specsot trace export latest --out trace.json`, opened in ui.perfetto.dev.
    """
    with user_errors():
        kept = find_run(run, runs_dir)
        records = records_of(kept)
        text = as_csv(records) if form == "csv" else as_perfetto(records, kept.path.name)
        if out is None:
            put(text)
        else:
            out.write_text(text, encoding="utf-8")

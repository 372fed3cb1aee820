"""`specsot bench`: an experiment, measured so that others believe it."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.command import RoundPlan, compare_jobs
from ..errors import Code, UsageError
from ..limits import disturbance
from ..prepare.options import SESSION, RunOptions
from ..record.run_folder import BestEffortRunFolder
from ..shell import complain, deliver, exit_code, json_text
from ..terminal import working
from .baseline import FigureChange, changes, check_same, read_baseline
from .read import references_of
from .setting_up import BenchOptions, Prepared, prepare_experiment

if TYPE_CHECKING:
    from ..bench.report import Comparison
    from .rows import Row

WARM = 16  # rounds of the first prompt before anything counts
RESULT = "result.json"
CSV = "table.csv"
PAGE = "table.md"
ASKED = "asked.json"
KEPT = (*SESSION, "prompts")  # options that an interrupted experiment goes on with
PATHS = ("prompts", "outline")
MOST_SHOWN = 20


@exit_code
def bench_command(asked: BenchOptions, options: RunOptions, resume: Path | None = None) -> int:
    """Measure and return the exit code; what a user can mend ends as one message.

    Args:
        resume: a folder in which an experiment was begun, which goes on.
    """
    if resume is not None:
        asked, options = resumed(resume, asked, options)
    before = None if asked.baseline is None else read_baseline(asked.baseline)
    if asked.plot:
        from .plot import load_matplotlib

        load_matplotlib()
        if asked.out is None:
            raise UsageError("--plot: name a folder for the pictures with --out DIR")
    prepared = prepare_experiment(asked, options)
    begin(asked, options)
    for note in prepared.notes:
        complain(f"note: {note}")
    files = None if asked.out is None else BestEffortRunFolder.at(asked.out)
    comparison, result, rows = measure(prepared, files)
    worse, better = _judged(before, result, asked.baseline)
    notes = [*_notes(result, comparison), *_changed(worse, better, before is not None)]
    if files is not None:
        _write(prepared, result, rows, notes, files, asked.plot)
    delivered = _show(prepared, result, rows, notes, options, asked.out)
    faults = _complaints(prepared, comparison, asked, files)
    if comparison.code:
        return comparison.code
    return Code.FAILED if faults or not delivered else Code.REGRESSION if worse else Code.OK


def resumed(
    folder: Path, asked: BenchOptions, options: RunOptions
) -> tuple[BenchOptions, RunOptions]:
    """What was asked when the folder was begun; `asked` has what is of this call alone.

    Raises:
        UsageError: nothing was begun there, or something else is asked now.
    """
    if asked.refs or asked.vary or asked.repeats or asked.count or asked.against or asked.out:
        raise UsageError("--resume DIR goes on with what was asked then, and takes nothing else")
    try:
        kept = json.loads((folder / ASKED).read_text(encoding="utf-8"))
        old = BenchOptions(**kept["asked"])
        given: dict[str, Any] = kept["options"]
        given |= {name: Path(given[name]) for name in PATHS if name in given}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "damaged"
        raise UsageError(f"--resume {folder}: no experiment was begun there: {reason}") from None
    now = replace(old, out=folder, baseline=asked.baseline, plot=asked.plot)
    return now, replace(options, **given)


def begin(asked: BenchOptions, options: RunOptions) -> None:
    """Say in the folder what was asked, before the first round; raises UsageError."""
    if asked.out is not None and not (asked.out / ASKED).exists():
        BestEffortRunFolder.at(asked.out).write_json(ASKED, _kept(asked, options))


def _kept(asked: BenchOptions, options: RunOptions) -> dict[str, Any]:
    own = {n: v for n, v in asdict(asked).items() if n not in ("out", "baseline", "plot")}
    given = {name: getattr(options, name) for name in KEPT}
    usual = {one.name: one.default for one in fields(RunOptions)}
    shown = {n: str(v) if n in PATHS else v for n, v in given.items() if v not in (None, usual[n])}
    return {"asked": own, "options": shown}


def measure(
    prepared: Prepared, files: BestEffortRunFolder | None
) -> "tuple[Comparison, dict[str, Any], list[Row]]":
    """All rounds, and what came of them."""
    # Here and not above: a mistake is told at once, torch takes seconds to import.
    from ..bench.results import setup_of
    from .peers import dressed
    from .rows import document, rows_of

    experiment = prepared.experiment
    entries = prepared.entries
    jobs = prepared.jobs
    plan = RoundPlan(
        repeats=experiment.repeats,
        warm=WARM,
        shuffled=True,
        collected=True,
        dress=dressed([entry.peer for entry in entries]),
        facts={"repeats": experiment.repeats, "probe": experiment.probe},
    )
    comparison, folder = compare_jobs(jobs, files, plan)
    prompts = prepared.prompts.items
    references = references_of(experiment, entries)
    probed = _probed(prepared, comparison)
    rows = rows_of(comparison, entries, references, probed)
    argv = jobs[0].options.argv
    setup = setup_of(comparison.sides, prompts, argv) if folder is None else folder.setup
    return comparison, document(experiment, comparison, rows, setup, references), rows


def _probed(prepared: Prepared, comparison: "Comparison") -> Mapping[str, float]:
    if not prepared.experiment.probe or comparison.code:
        return {}
    from ..run.runner import StopSignal
    from .probe import probe_all

    with working("comparing what is blended with full prefills ..."), StopSignal() as halt:
        return probe_all(comparison.sides, prepared.prompts.items, halt)


def _judged(
    before: Mapping[str, Any] | None, result: Mapping[str, Any], file: Path | None
) -> tuple[list[FigureChange], list[FigureChange]]:
    if before is None or file is None or not result["rows"]:
        return [], []
    check_same(before, result, file)
    return changes(before, result)


def _notes(result: Mapping[str, Any], comparison: "Comparison") -> list[str]:
    from ..bench.table import equality_lines

    if not result["rows"]:
        return ["No prompt was answered by every side."]
    first = comparison.sides[0].letter
    ratios = (
        f"Ratios are to {first}, within rounds: their median, and 95 % of bootstrap draws"
        if result["experiment"].get("pairing") != "point"
        else "Ratios are to the first side at the same point, within rounds: median and interval"
    )
    return [*equality_lines(comparison), f"{ratios}."]


def _changed(
    worse: Sequence[FigureChange], better: Sequence[FigureChange], asked: bool
) -> list[str]:
    if not asked:
        return []
    lines = [f"worse than the baseline: {one}" for one in worse[:MOST_SHOWN]]
    lines += [f"better than the baseline: {one}" for one in better[:MOST_SHOWN]]
    return ["", *(lines or ["nothing is worse than the baseline"])]


def _write(
    prepared: Prepared,
    result: Mapping[str, Any],
    rows: "Sequence[Row]",
    notes: Sequence[str],
    files: BestEffortRunFolder,
    plot: bool,
) -> None:
    from .output import csv_of, markdown_table, page

    files.write_json(RESULT, result)
    if not rows:
        return
    table = markdown_table(prepared.experiment, rows)
    files.write_text(CSV, csv_of(rows))
    files.write_text(PAGE, page(result, table, notes))
    if plot:
        from .plot import draw_all

        draw_all(prepared.experiment, rows, files.path)


def _show(
    prepared: Prepared,
    result: Mapping[str, Any],
    rows: "Sequence[Row]",
    notes: Sequence[str],
    options: RunOptions,
    out: Path | None,
) -> bool:
    from .output import measured_words
    from .table import render

    if options.as_json:
        text = json_text(result)
    else:
        said = [*notes, *(measured_words(result) if rows else ())]
        text = render(prepared.experiment, rows, said, sys.stdout, dict(os.environ))
    return deliver(text, "" if out is None else str(out))


def _complaints(
    prepared: Prepared,
    comparison: "Comparison",
    asked: BenchOptions,
    files: BestEffortRunFolder | None,
) -> list[str]:
    """What went wrong, on stderr; returns what could not be written."""
    every = len(prepared.prompts.items) * prepared.experiment.repeats
    for line in comparison.problems[:MOST_SHOWN]:
        complain(line)
    if (warning := disturbance(comparison.cpu_share)) is not None:
        complain(f"warning: {warning}")
    if comparison.failures:
        complain(f"{comparison.failures} branches differ where equality is promised")
    if len(comparison.prompts) < every:
        way = "" if asked.out is None else f"; --resume {asked.out} goes on from there"
        complain(f"{comparison.status} after {len(comparison.prompts)} of {every} rounds{way}")
    faults = [] if files is None else files.faults
    for fault in faults:
        complain(fault)
    return faults

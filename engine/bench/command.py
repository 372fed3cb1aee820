"""`specsot bench`: an experiment with repeats, intervals and a comparison with a baseline."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Code, UsageError
from ..limits import disturbance
from ..prepare.options import SESSION, RunOptions
from ..record.run_folder import BestEffortRunFolder
from ..shell import complain, deliver, exit_code, json_text
from ..terminal import working
from .compare import RoundPlan, compare_jobs
from .experiment import RESULT_SCHEMA, BenchOptions, Prepared, prepare_experiment, references_of
from .figures import FIGURES, Figure

if TYPE_CHECKING:
    from .comparison import Comparison
    from .rows import Row


LEAST = 0.05  # of a figure from clocks: less is not called a change, however sure it is
EXACT = 0.01  # of one that only what is computed decides
SAME = ("prompts", "dtype", "models")  # what must be equal of two results


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A figure of a row, before and now, with its interval if it has one."""

    row: str
    figure: str
    before: list[float | None]
    now: list[float | None]

    def __str__(self) -> str:
        form = FIGURES[self.figure].form
        return f"{self.row}: {self.figure} {_words(self.before, form)} -> {_words(self.now, form)}"


def _words(values: list[float | None], form: str) -> str:
    value, *edges = (format(number, form) for number in values if number is not None)
    return f"{value} ({' to '.join(edges)})" if edges else value


def read_baseline(file: Path) -> dict[str, Any]:
    """Raises UsageError if the file is not a result of `specsot bench`."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if result["schema_version"] != RESULT_SCHEMA or not isinstance(result["rows"], dict):
            raise ValueError("of another version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a result of `specsot bench`"
        raise UsageError(f"--baseline {file}: {reason}") from None
    return dict(result)


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], file: Path) -> None:
    """Raises UsageError where the two measured different things."""
    old = _facts(before)
    new = _facts(now)
    unlike = [name for name in SAME if old[name] != new[name]]
    if unlike:
        raise UsageError(f"--baseline {file}: was measured with other {', '.join(unlike)}")
    if not before["rows"].keys() & now["rows"].keys():
        raise UsageError(f"--baseline {file}: has no row of these")


def _facts(result: Mapping[str, Any]) -> dict[str, Any]:
    graphs = result["setup"]["graphs"].values()
    return {
        "prompts": result["setup"]["prompts"],
        "dtype": sorted({graph["dtype"] for graph in graphs}),
        "models": sorted({graph["model_hash"] for graph in graphs}),
    }


def changes(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[FigureChange], list[FigureChange]]:
    """The figures that became worse and those that became better, of rows that both results have.

    Absolute times depend on the load of the machine, so timed figures are compared only as ratios
    to the reference row. A ratio has changed if the intervals are disjoint and the values differ by
    at least LEAST.
    """
    differences = [*_changes(before, now)]
    worse = [change for change, sign in differences if sign < 0]
    return worse, [change for change, sign in differences if sign > 0]


def _changes(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[FigureChange, int]]:
    for label, row in now["rows"].items():
        old = before["rows"].get(label, {"figures": {}, "reference": None})
        for name, values in row["figures"].items():
            figure = FIGURES[name]
            past = old["figures"].get(name)
            if past is None or not figure.better or (figure.timed and figure.kind != "paired"):
                continue
            if sign := _sign(figure, past, values):
                yield FigureChange(label, name, past, values), sign


def _sign(figure: Figure, past: list[float | None], values: list[float | None]) -> int:
    """1 for better, -1 for worse, 0 for a difference within noise."""
    old, old_low, old_high = past
    new, low, high = values
    if (
        old is None
        or new is None
        or abs(new - old) <= (LEAST if figure.timed else EXACT) * abs(old)
    ):
        return 0
    if figure.timed:
        if old_low is None or old_high is None or low is None or high is None:
            return 0  # a single round has no interval
        if low <= old_high and old_low <= high:
            return 0
    return figure.better if new > old else -figure.better


WARM = 16  # rounds of the first prompt before anything counts
RESULT = "result.json"
CSV = "table.csv"
PAGE = "table.md"
REQUEST_FILE = "asked.json"
SAVED_OPTIONS = (*SESSION, "prompts")  # options that an interrupted experiment goes on with
PATHS = ("prompts", "outline")
MOST_SHOWN = 20


@exit_code
def bench_command(
    bench_options: BenchOptions, options: RunOptions, resume: Path | None = None
) -> int:
    """Measure and return the exit code; an error of the user ends as one message.

    Args:
        resume: the folder of an interrupted experiment to continue.
    """
    if resume is not None:
        bench_options, options = resumed(resume, bench_options, options)
    before = None if bench_options.baseline is None else read_baseline(bench_options.baseline)
    if bench_options.plot:
        from .plot import load_matplotlib

        load_matplotlib()
        if bench_options.out is None:
            raise UsageError("--plot: name a folder for the pictures with --out DIR")
    prepared = prepare_experiment(bench_options, options)
    begin(bench_options, options)
    for note in prepared.notes:
        complain(f"note: {note}")
    files = None if bench_options.out is None else BestEffortRunFolder.at(bench_options.out)
    comparison, result, rows = measure(prepared, files)
    worse, better = _judged(before, result, bench_options.baseline)
    notes = [*_notes(result, comparison), *_changed(worse, better, before is not None)]
    if files is not None:
        _write(prepared, result, rows, notes, files, bench_options.plot)
    delivered = _show(prepared, result, rows, notes, options, bench_options.out)
    faults = _complaints(prepared, comparison, bench_options, files)
    if comparison.code:
        return comparison.code
    return Code.FAILED if faults or not delivered else Code.REGRESSION if worse else Code.OK


def resumed(
    folder: Path, bench_options: BenchOptions, options: RunOptions
) -> tuple[BenchOptions, RunOptions]:
    """The options of the interrupted experiment, with the baseline and plots of this call.

    Raises:
        UsageError: the folder has no experiment, or the call has other options.
    """
    if (
        bench_options.refs
        or bench_options.vary
        or bench_options.repeats
        or bench_options.count
        or bench_options.against
        or bench_options.out
    ):
        raise UsageError("--resume DIR goes on with what was asked then, and takes nothing else")
    try:
        saved = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
        old = BenchOptions(**saved["asked"])
        saved_options: dict[str, Any] = saved["options"]
        saved_options |= {
            name: Path(saved_options[name]) for name in PATHS if name in saved_options
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "damaged"
        raise UsageError(f"--resume {folder}: no experiment was begun there: {reason}") from None
    now = replace(old, out=folder, baseline=bench_options.baseline, plot=bench_options.plot)
    return now, replace(options, **saved_options)


def begin(bench_options: BenchOptions, options: RunOptions) -> None:
    """Save the options of the call before the first round; raises UsageError."""
    if bench_options.out is not None and not (bench_options.out / REQUEST_FILE).exists():
        BestEffortRunFolder.at(bench_options.out).write_json(
            REQUEST_FILE, _saved_request(bench_options, options)
        )


def _saved_request(bench_options: BenchOptions, options: RunOptions) -> dict[str, Any]:
    bench_values = {
        n: v for n, v in asdict(bench_options).items() if n not in ("out", "baseline", "plot")
    }
    run_values = {name: getattr(options, name) for name in SAVED_OPTIONS}
    usual = {option.name: option.default for option in fields(RunOptions)}
    shown = {
        n: str(v) if n in PATHS else v for n, v in run_values.items() if v not in (None, usual[n])
    }
    return {"asked": bench_values, "options": shown}


def measure(
    prepared: Prepared, files: BestEffortRunFolder | None
) -> "tuple[Comparison, dict[str, Any], list[Row]]":
    """Run all rounds; returns the comparison, the result as plain data, and its rows."""
    # Local, so that a wrong option is an error before torch is imported.
    from .peers import dressed
    from .results import setup_of
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
    from .rows import probe_all

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
    from .tables import equality_lines

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
    worse: Sequence[FigureChange], better: Sequence[FigureChange], compared: bool
) -> list[str]:
    if not compared:
        return []
    lines = [f"worse than the baseline: {change}" for change in worse[:MOST_SHOWN]]
    lines += [f"better than the baseline: {change}" for change in better[:MOST_SHOWN]]
    return ["", *(lines or ["nothing is worse than the baseline"])]


def _write(
    prepared: Prepared,
    result: Mapping[str, Any],
    rows: "Sequence[Row]",
    notes: Sequence[str],
    files: BestEffortRunFolder,
    plot: bool,
) -> None:
    from .tables import csv_of, experiment_page, markdown_table

    files.write_json(RESULT, result)
    if not rows:
        return
    table = markdown_table(prepared.experiment, rows)
    files.write_text(CSV, csv_of(rows))
    files.write_text(PAGE, experiment_page(result, table, notes))
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
    from .tables import measured_words, render_experiment

    if options.as_json:
        text = json_text(result)
    else:
        lines = [*notes, *(measured_words(result) if rows else ())]
        text = render_experiment(prepared.experiment, rows, lines, sys.stdout, dict(os.environ))
    return deliver(text, "" if out is None else str(out))


def _complaints(
    prepared: Prepared,
    comparison: "Comparison",
    bench_options: BenchOptions,
    files: BestEffortRunFolder | None,
) -> list[str]:
    """Report problems on stderr; returns the files that could not be written."""
    every = len(prepared.prompts.items) * prepared.experiment.repeats
    for line in comparison.problems[:MOST_SHOWN]:
        complain(line)
    if (warning := disturbance(comparison.cpu_share)) is not None:
        complain(f"warning: {warning}")
    if comparison.failures:
        complain(f"{comparison.failures} branches differ where equality is promised")
    if len(comparison.prompts) < every:
        hint = (
            ""
            if bench_options.out is None
            else f"; --resume {bench_options.out} goes on from there"
        )
        complain(f"{comparison.status} after {len(comparison.prompts)} of {every} rounds{hint}")
    faults = [] if files is None else files.faults
    for fault in faults:
        complain(fault)
    return faults

"""`specsot compare`, `sweep` and `bench`: prompts through several sides, and what they show.

`bench` measures an experiment: repeated, with intervals, with other programs, compared with a
baseline. `bench --tune` measures the settings of a drafter one after another. Nothing here imports
torch before the command line is checked.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...states.text.outline import OutlineError
from ...states.yaml.source import GraphError, Problem
from ..errors import Code, UsageError
from ..limits import disturbance
from ..prepare.files import SHIPPED
from ..prepare.inputs import Prompts, read_file
from ..prepare.job import Job, prepare
from ..prepare.options import SESSION, RunOptions
from ..record.run_folder import RunFolder
from ..shell import complain, deliver, exit_code, json_text
from .experiment import (
    FIGURES,
    PARTS,
    BenchOptions,
    Figure,
    Prepared,
    axis_of,
    prepare_experiment,
    read_side,
    text_of,
)

if TYPE_CHECKING:
    from .comparison import Comparison

TEN_PROMPTS = SHIPPED / "prompts" / "ten.txt"  # plans, broad subjects, one with a short answer
MOST_GRAPHS = 26
MOST_POINTS = 256
MOST_SHOWN = 20  # problems and changes of an experiment
RESULT = "result.json"
TABLE = "table.csv"
PAGE = "table.md"

# -- compare, sweep ----------------------------------------------------------------------------


@exit_code
def compare_command(sides: Sequence[str], options: RunOptions, out: Path | None = None) -> int:
    """Compare sides, each GRAPH or GRAPH@SET,SET...; returns the exit code."""
    if not 2 <= len(sides) <= MOST_GRAPHS:
        raise UsageError(f"compare takes from 2 to {MOST_GRAPHS} graphs, not {len(sides)}")
    return _compare("compare", sides, options, out)


@exit_code
def sweep_command(
    graph: str, vary: Sequence[str], options: RunOptions, out: Path | None = None
) -> int:
    """Compare all points of a grid; the output ends with the best one, and omits single prompts."""
    return _compare("sweep", points(graph, vary), options, out)


def points(graph: str, vary: Sequence[str]) -> list[str]:
    """The grid as sides of a comparison, the last path fastest; raises UsageError."""
    axes: dict[str, tuple[str, ...]] = {}
    for text in vary:
        path, values = axis_of(text)
        if path in axes:
            raise UsageError(f"--vary {text}: {path} varies already")
        axes[path] = values
    count = prod(map(len, axes.values()))
    if not 2 <= count <= MOST_POINTS:
        raise UsageError(f"--vary: a sweep has from 2 to {MOST_POINTS} points, not {count}")
    name, graph_sets = read_side(graph)
    grid = product(*([f"{path}={value}" for value in values] for path, values in axes.items()))
    return [f"{name}@{','.join((*graph_sets, *point))}" for point in grid]


def _compare(command: str, sides: Sequence[str], options: RunOptions, out: Path | None) -> int:
    prompts = read_file(options.prompts or TEN_PROMPTS)
    jobs = prepare_all(sides, options, prompts)
    files = None if out is None else RunFolder.at(out)
    # Local, so that a wrong graph is an error before torch is imported.
    from . import render
    from .comparison import compare_jobs

    comparison = compare_jobs(jobs, files)
    rated = command == "sweep"
    best = comparison.best_line() if rated else ""
    result = comparison.document()
    if files is not None:
        setup = comparison.setup
        facts = {"command": f"`{setup['command']}`", "prompts": setup["prompts"]["count"]}
        facts |= {"status": comparison.status, **setup["machine"], **setup["versions"]}
        facts["a busy loop got of a CPU"] = f"{comparison.cpu_share:.0%}"
        notes = [*render.equality_lines(comparison), best, disturbance(comparison.cpu_share) or ""]
        files.write_text(TABLE, render.csv_text(result["table"]))
        page = render.page(
            f"specsot {command}",
            render.comparison_markdown(result["table"]),
            filter(None, notes),
            facts=[f"{name}: {value}" for name, value in facts.items()],
        )
        files.write_text(PAGE, page)
        files.write_json(RESULT, {**result, "setup": setup})
    if options.as_json:
        text = json_text({**result, "best": best} if rated else result)
    elif comparison.prompts:
        parts = partial(render.comparison_parts, comparison, each=not rated)
        text = render.rendered(parts, sys.stdout) + (f"{best}\n" if best else "")
    else:
        text = ""
    hint = "" if out is None else "; the same command goes on from there"
    return _finish(comparison, files, text, (len(prompts.items), f"prompts{hint}"))


def prepare_all(sides: Sequence[str], options: RunOptions, prompts: Prompts) -> list[Job]:
    """Every graph checked, without torch; raises the problems of all graphs."""
    jobs: list[Job] = []
    problems: list[Problem] = []
    for side in sides:
        graph, side_sets = read_side(side)
        changed = replace(options, graph=graph, sets=(*options.sets, *side_sets))
        try:
            jobs.append(prepare(changed, prompts=prompts))
        except GraphError as error:
            for problem in error.problems:
                option = problem.file.removeprefix("--set ")
                if option in side_sets and option != problem.file:
                    problem = replace(problem, file=f"{graph}@{option}")
                elif side_sets:
                    problem = replace(problem, file=f"{side}: {problem.file}")
                problems.append(problem)
        except (UsageError, OutlineError) as error:
            raise UsageError(f"{side}: {error}" if side_sets else str(error)) from None
    if problems:
        raise GraphError(problems)
    return jobs


def _finish(
    comparison: "Comparison",
    files: RunFolder | None,
    text: str,
    requested: tuple[int, str],
    most: int | None = None,
) -> int:
    """Deliver the text, report problems on stderr; returns the exit code. requested: number and
    name of the rounds."""
    faults = [] if files is None else files.faults
    delivered = not text or deliver(text, str(files.path) if files and not faults else "")
    for line in comparison.problems[:most]:
        complain(line)
    if (warning := disturbance(comparison.cpu_share)) is not None:
        complain(f"warning: {warning}")
    if failures := comparison.failures:
        branches = "1 branch differs" if failures == 1 else f"{failures} branches differ"
        complain(f"{branches} where equality is promised")
    every, unit = requested
    if (count := len(comparison.prompts)) < every:
        complain(f"{comparison.status} after {count} of {every} {unit}")
    for fault in faults:
        complain(fault)
    return comparison.code or (Code.OK if delivered and not faults else Code.FAILED)


# -- bench -------------------------------------------------------------------------------------

LEAST = 0.05  # of a figure from clocks: less is not called a change, however sure it is
EXACT = 0.01  # of one that only what is computed decides
REQUEST_FILE = "asked.json"
SAVED_OPTIONS = (*SESSION, "prompts")  # options that an interrupted experiment goes on with
OF_THIS_CALL = ("out", "baseline", "plot")  # options that it does not


@exit_code
def bench_command(
    bench_options: BenchOptions, options: RunOptions, resume: Path | None = None
) -> int:
    """Measure and return the exit code; resume: the folder of an interrupted experiment."""
    if resume is not None:
        bench_options, options = _resumed(resume, bench_options, options)
    out = bench_options.out
    baseline = bench_options.baseline
    before = None if baseline is None else _read_baseline(baseline)
    if bench_options.plot and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'specsot[plot]'")
    if bench_options.plot and out is None:
        raise UsageError("--plot: name a folder for the pictures with --out DIR")
    prepared = prepare_experiment(bench_options, options)
    experiment = prepared.experiment
    files = None if out is None else RunFolder.at(out)
    if files is not None and not (files.path / REQUEST_FILE).exists():
        usual = RunOptions()
        values = {name: getattr(options, name) for name in SAVED_OPTIONS}
        asked = {n: v for n, v in asdict(bench_options).items() if n not in OF_THIS_CALL}
        changed = {n: v for n, v in values.items() if v not in (None, getattr(usual, n))}
        files.write_json(REQUEST_FILE, {"asked": asked, "options": changed})
    for note in prepared.notes:
        complain(f"note: {note}")
    comparison, result = measure(prepared, files)
    rows = [*result["rows"].values()]
    from . import render

    worse: list[str] = []
    notes = ["No prompt was answered by every side."]
    if rows:
        ratios = "the first side at the same point, within rounds: median and interval"
        if experiment.pairing == "first":
            first = comparison.sides[0].letter
            ratios = f"{first}, within rounds: their median, and 95 % of bootstrap draws"
        notes = [*render.equality_lines(comparison), f"Ratios are to {ratios}."]
        if before is not None and baseline is not None:
            _check_same(before, result, baseline)
            worse, better = changes(before, result)
            lines = [f"worse than the baseline: {change}" for change in worse[:MOST_SHOWN]]
            lines += [f"better than the baseline: {change}" for change in better[:MOST_SHOWN]]
            notes += ["", *(lines or ["nothing is worse than the baseline"])]
    measured = render.measured_words(result) if rows else []
    if files is not None:
        files.write_json(RESULT, result)
    if files is not None and rows:
        title = f"{experiment.name}\n\n{experiment.doc}"
        table = render.experiment_markdown(experiment, rows)
        facts = [*measured, f"command: `{comparison.setup['command']}`"]
        files.write_text(TABLE, render.csv_of(rows))
        files.write_text(PAGE, render.page(title, table, notes, facts))
        if bench_options.plot:
            render.draw_all(experiment, rows, files.path)
    if options.as_json:
        text = json_text(result)
    else:
        parts = partial(render.experiment_parts, experiment, rows, [*notes, *measured])
        text = render.rendered(parts, sys.stdout)
    hint = "" if out is None else f"; --resume {out} goes on from there"
    requested = (len(prepared.prompts.items) * experiment.repeats, f"rounds{hint}")
    code = _finish(comparison, files, text, requested, most=MOST_SHOWN)
    return code or (Code.REGRESSION if worse else Code.OK)


def measure(prepared: Prepared, files: RunFolder | None) -> "tuple[Comparison, dict[str, Any]]":
    """All rounds: the comparison, and the result as plain data."""
    # Local, so that a wrong option is an error before torch is imported.
    from .comparison import compare_jobs, experiment_document

    comparison = compare_jobs(prepared.jobs, files, prepared)
    return comparison, experiment_document(comparison, prepared)


def _resumed(
    folder: Path, bench_options: BenchOptions, options: RunOptions
) -> tuple[BenchOptions, RunOptions]:
    now: dict[str, Any] = {"baseline": bench_options.baseline, "plot": bench_options.plot}
    if bench_options != BenchOptions((), **now):
        raise UsageError("--resume DIR goes on with what was asked then, and takes nothing else")
    try:
        saved = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
        old = BenchOptions(**saved["asked"])
        values: dict[str, Any] = saved["options"]
        values |= {name: Path(values[name]) for name in ("prompts", "outline") if name in values}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "damaged"
        raise UsageError(f"--resume {folder}: no experiment was begun there: {reason}") from None
    return replace(old, out=folder, **now), replace(options, **values)


def _read_baseline(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if result["schema_version"] != 1 or not isinstance(result["rows"], dict):
            raise ValueError("of another version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a result of `specsot bench`"
        raise UsageError(f"--baseline {file}: {reason}") from None
    return dict(result)


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], file: Path) -> None:
    old, new = (
        {
            "prompts": result["setup"]["prompts"],
            "dtype": {graph["dtype"] for graph in result["setup"]["graphs"].values()},
            "models": {graph["model_hash"] for graph in result["setup"]["graphs"].values()},
        }
        for result in (before, now)
    )
    if unlike := [name for name in old if old[name] != new[name]]:
        raise UsageError(f"--baseline {file}: was measured with other {', '.join(unlike)}")
    if not before["rows"].keys() & now["rows"].keys():
        raise UsageError(f"--baseline {file}: has no row of these")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The figures that became worse and those that became better, of rows of both results. Times
    depend on the load of the machine, so timed figures are compared only as ratios to the reference
    row: those with disjoint intervals that differ by at least LEAST."""
    changed: dict[int, list[str]] = {-1: [], 0: [], 1: []}
    for label in (label for label in now["rows"] if label in before["rows"]):
        old = before["rows"][label]["figures"]
        for name, values in now["rows"][label]["figures"].items():
            figure = FIGURES[name]
            if name in old and (figure.kind == "paired" or not figure.timed):
                texts = " -> ".join(_words(numbers, figure.form) for numbers in (old[name], values))
                sign = figure.better * _sign(figure, old[name], values)
                changed[sign].append(f"{label}: {name} {texts}")
    return changed[-1], changed[1]


def _words(numbers: list[float | None], form: str) -> str:
    value, *edges = (format(number, form) for number in numbers if number is not None)
    return f"{value} ({' to '.join(edges)})" if edges else value


def _sign(figure: Figure, past: Sequence[Any], values: Sequence[Any]) -> int:
    """1 for more, -1 for less, 0 for a difference within noise."""
    old, old_low, old_high = past
    new, low, high = values
    least = LEAST if figure.timed else EXACT
    if None in (old, new) or abs(new - old) <= least * abs(old):
        return 0
    single = None in (old_low, old_high, low, high)  # a single round has no interval
    if figure.timed and (single or (low <= old_high and old_low <= high)):
        return 0
    return 1 if new > old else -1


# -- bench --tune ------------------------------------------------------------------------------

PROFILE = "profile.yaml"
FIGURE = "speedup_decode"
MARGIN = 1.02  # what is so much faster only is not worth a larger tree, or another setting
SEVERAL = 4  # numbers of branches besides 1 for which a graph with an outline is tuned
BRANCHED = "num_draft_tokens"  # the setting that may differ by the number of branches

_TREES = {"num_draft_tokens": (2, 4, 8, 16, 32), "draft_depth": (2, 3, 5, 7)}
AXES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "eagle3": _TREES,
    "eagle2": _TREES,
    "dflash": {
        "grow": ("chain", "ddtree"),
        "block_size": (2, 3, 4, 6, 8),
        "num_draft_tokens": (4, 8, 16, 32),
    },
    "vanilla": {"gamma": (1, 2, 3, 4, 6, 8, 12)},
    "ngram": {"num_draft_tokens": (1, 2, 4, 8), "draft_depth": (3, 6, 10)},
}
AT_FIRST = {"eagle3": {"draft_depth": 5, "top_k": 4}, "eagle2": {"draft_depth": 5, "top_k": 4}}


@exit_code
def tune_command(bench_options: BenchOptions, options: RunOptions) -> int:
    """Every setting of the drafter is an experiment, with the best of the ones before it: its
    values are sides that answer the same prompts in turn; the fastest stays."""
    if len(bench_options.refs) != 1 or bench_options.vary or bench_options.against:
        raise UsageError("--tune takes one graph, and neither --vary nor --against")
    (job,) = prepare_experiment(bench_options, options).jobs
    kind = job.program.graph.drafter.kind
    if kind not in AXES:
        raise UsageError(f"--tune: nothing to tune of a drafter of kind {kind!r}")
    branched = job.program.graph.skeleton is not None
    drafter: dict[str, Any] = dict(AT_FIRST.get(kind, {}))
    gains: list[str] = []
    for name, values in AXES[kind].items():
        if name == BRANCHED and drafter.get("grow") == "chain":
            continue
        best: dict[int | None, Any] = {}
        for parts in (1, SEVERAL) if branched and name == BRANCHED else (SEVERAL,):
            vary = [f"{PARTS}={parts}"] if branched else []
            others = {key: value for key, value in drafter.items() if key != name}
            sides = [_drafter_sets({name: value, **others}) for value in values]
            found = _speeds(replace(bench_options, vary=vary, out=None), options, sides)
            if not found:
                raise UsageError(f"--tune: no prompt was answered with drafter.{name}")
            speeds = dict(zip(values, found, strict=False))
            best[parts] = next(v for v in values if speeds.get(v, 0) * MARGIN >= max(found))
            at = f", {parts} branches" if branched else ""
            shown = ", ".join(f"{value} {speed:.2f}" for value, speed in speeds.items())
            gains.append(f"{name}{at}: {best[parts]} (against plain decoding: {shown})")
            complain(gains[-1])
        drafter[name] = best if len(set(best.values())) > 1 else best[SEVERAL]
    models = {} if options.drafter_model is None else {"model": options.drafter_model}
    profile: dict[str, Any] = {"model": job.options.model, "drafters": {kind: models | drafter}}
    if options.dtype is not None:
        profile["dtype"] = options.dtype
    profiles = {"profiles": {options.profile or "tuned": profile}}
    text = "".join(f"# {line}\n" for line in gains) + yaml.safe_dump(profiles, sort_keys=False)
    faults: list[str] = []
    if bench_options.out is not None:
        files = RunFolder.at(bench_options.out)
        files.write_text(PROFILE, text)
        faults = files.faults
    for fault in faults:
        complain(fault)
    shown = json_text({"drafter": drafter, "gains": gains}) if options.as_json else text
    delivered = deliver(shown, str(bench_options.out or ""))
    return Code.OK if delivered and not faults else Code.FAILED


def _drafter_sets(settings: Mapping[str, Any]) -> str:
    texts = []
    for name, value in settings.items():
        text = text_of(value)
        if isinstance(value, dict):  # the keys of a map stay numbers
            text = "{" + ", ".join(f"{parts}: {item}" for parts, item in value.items()) + "}"
        texts.append(f"drafter.{name}={text}")
    return ",".join(texts)


def _speeds(bench_options: BenchOptions, options: RunOptions, sides: Sequence[str]) -> list[float]:
    """The speeds of the graph with these settings against plain decoding; none without rounds."""
    graph = bench_options.refs[0]
    refs = [f"{graph}@{settings}" for settings in ("drafter.kind=none", *sides)]
    prepared = prepare_experiment(replace(bench_options, refs=refs), options)
    comparison, result = measure(prepared, None)
    if comparison.code:
        raise UsageError("--tune: a side failed: " + "; ".join(comparison.problems[:3]))
    rows = [*result["rows"].values()]
    return [row["figures"].get(FIGURE, [0.0])[0] for row in rows[1:]]

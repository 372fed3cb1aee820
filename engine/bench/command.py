"""`specsot compare`, `sweep` and `bench`: experiments of graphs, of the settings of one graph, and
repeated ones. torch is imported once the command line is checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import yaml

from ..errors import Code, UsageError
from ..limits import disturbance
from ..prepare.options import BenchOptions, RunOptions
from ..record.run_folder import RunFolder
from ..shell import complain, deliver, json_text
from . import experiment as experiments

MOST_GRAPHS = 26
MOST_POINTS = 256
MOST_SHOWN = 20  # problems and changes of an experiment
LEAST = 0.05  # of a figure from clocks: less is not called a change, however sure it is
EXACT = 0.01  # of one that only what is computed decides


def compare_command(
    sides: Sequence[str], options: RunOptions, out: Path | None = None, vary: Sequence[str] = ()
) -> int:
    """Measure sides, or one at all points of a grid, once per prompt. sides: GRAPH[@SET,...]."""
    if not (vary or 2 <= len(sides) <= MOST_GRAPHS):
        raise UsageError(f"compare takes from 2 to {MOST_GRAPHS} graphs, not {len(sides)}")
    values: Any = {"vary": grid_of(vary)} if vary else {}
    values |= {"repeats": 1, "figures": experiments.COMPARED}
    experiment = experiments.experiment_of_sides("sweep" if vary else "compare", sides, **values)
    prepared = experiments.prepare_experiment(experiment, options)
    return _report(prepared, options, BenchOptions(out=out))


def grid_of(vary: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values of every path, for a sweep; raises UsageError."""
    axes: dict[str, tuple[str, ...]] = {}
    for text in vary:
        path, values = experiments.axis_of(text)
        if path in axes:
            raise UsageError(f"--vary {text}: {path} varies already")
        axes[path] = values
    count = prod(map(len, axes.values()))
    if not 2 <= count <= MOST_POINTS:
        raise UsageError(f"--vary: a sweep has from 2 to {MOST_POINTS} points, not {count}")
    return axes


def bench_command(bench_options: BenchOptions, options: RunOptions) -> int:
    """Measure an experiment, or go on with an interrupted one in the same folder."""
    baseline = None
    if (file := bench_options.baseline) is not None:
        try:
            baseline = json.loads(file.read_text(encoding="utf-8"))
            if baseline["schema_version"] != 1 or not isinstance(baseline["rows"], dict):
                raise ValueError("of another version")
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "strerror", None) or "not a result of `specsot bench`"
            raise UsageError(f"--baseline {file}: {reason}") from None
    if bench_options.plot and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'specsot[plot]'")
    if bench_options.plot and bench_options.out is None:
        raise UsageError("--plot: name a folder for the pictures with --out DIR")
    experiment, source = experiments.experiment_of(bench_options)
    prepared = experiments.prepare_experiment(experiment, options, source)
    return _report(prepared, options, bench_options, baseline)


def _report(
    prepared: experiments.Prepared,
    options: RunOptions,
    bench_options: BenchOptions,
    baseline: Mapping[str, Any] | None = None,
) -> int:
    experiment = prepared.experiment
    files = None if bench_options.out is None else RunFolder.at(bench_options.out)
    for note in prepared.notes:
        complain(f"note: {note}")
    # Local, so that a wrong option is an error before torch is imported.
    from . import render
    from .comparison import measure

    result = measure(prepared, files)
    rows = [*result["rows"].values()]
    worse: list[str] = []
    notes = ["No prompt was answered by every side."]
    if rows:
        ratios = "the first side at the same point, within rounds: median and interval"
        if experiment.pairing == "first":
            ratios = "A, within rounds: their median, and 95 % of bootstrap draws"
        if experiments.BY_PROMPT in experiment.figures:
            ratios += "; by prompt: the lowest and the highest"
        notes = [*render.equality_lines(result), f"Ratios are to {ratios}."]
    if rows and baseline is not None:
        _check_same(baseline, result)
        worse, better = changes(baseline, result)
        lines = [f"worse than the baseline: {change}" for change in worse[:MOST_SHOWN]]
        lines += [f"better than the baseline: {change}" for change in better[:MOST_SHOWN]]
        notes += ["", *(lines or ["nothing is worse than the baseline"])]
    code = Code(result["exit_code"]) or (Code.REGRESSION if worse else Code.OK)
    result["exit_code"] = int(code)
    measured = render.measured_words(result) if rows else []
    if files is not None:
        files.write_json("result.json", result)
    if files is not None and rows:
        facts = [*measured, f"command: `{result['setup']['command']}`"]
        files.write_text("table.csv", render.csv_of(rows))
        files.write_text("table.md", render.page(experiment, result, notes, facts))
        if bench_options.plot:
            render.draw_all(experiment, rows, files.path)
    text = json_text(result)
    if not options.as_json:
        text = render.console(experiment, result, [*notes, *measured])
    faults = [] if files is None else files.faults
    delivered = deliver(text, str(files.path) if files and not faults else "")
    for line in result["problems"][:MOST_SHOWN]:
        complain(line)
    if (warning := disturbance(result["noise"]["cpu_share"] or 1.0)) is not None:
        complain(f"warning: {warning}")
    if failures := result["differences"]:
        branches = "1 branch differs" if failures == 1 else f"{failures} branches differ"
        complain(f"{branches} where equality is promised")
    every = len(prepared.prompts.items) * experiment.repeats
    if result["rounds"] < every:
        hint = "" if files is None else "; the same command continues there"
        complain(f"{result['status']} after {result['rounds']} of {every} rounds{hint}")
    for fault in faults:
        complain(fault)
    return code or (Code.OK if delivered and not faults else Code.FAILED)


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    setups = [result["setup"] for result in (before, now)]
    measured = {"prompts": [setup["prompts"] for setup in setups]}
    for name, key in {"dtype": "dtype", "models": "model_hash"}.items():
        measured[name] = [{graph[key] for graph in setup["graphs"].values()} for setup in setups]
    if unlike := [name for name, (old, new) in measured.items() if old != new]:
        raise UsageError(f"--baseline: it was measured with other {', '.join(unlike)}")
    if not before["rows"].keys() & now["rows"].keys():
        raise UsageError("--baseline: it has no row of these")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Figures that became worse, and better, of rows of both. Timed ones depend on the machine, so
    only ratios are compared: those with disjoint intervals that differ by at least LEAST."""
    changed: dict[int, list[str]] = {-1: [], 0: [], 1: []}
    for label in (label for label in now["rows"] if label in before["rows"]):
        old = before["rows"][label]["figures"]
        for name, values in now["rows"][label]["figures"].items():
            figure = experiments.FIGURES[name]
            if name in old and (figure.paired or not figure.timed):
                texts = f"{figure.words(old[name])} -> {figure.words(values)}"
                sign = figure.better * _sign(figure, old[name], values)
                changed[sign].append(f"{label}: {name} {texts}")
    return changed[-1], changed[1]


def _sign(figure: experiments.Figure, past: Sequence[Any], values: Sequence[Any]) -> int:
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
    "medusa": {"num_draft_tokens": (2, 4, 8, 16), "draft_depth": (1, 2, 3, 5)},
    "suffix": {"num_draft_tokens": (1, 2, 4, 8, 16), "draft_depth": (4, 8, 16)},
    "recycle": {"num_draft_tokens": (1, 2, 4, 8, 16, 32), "draft_depth": (3, 6)},
}
AT_FIRST = {"eagle3": {"draft_depth": 5, "top_k": 4}, "eagle2": {"draft_depth": 5, "top_k": 4}}


def tune_command(bench_options: BenchOptions, options: RunOptions) -> int:
    """One setting after another: its values answer the same prompts in turn; the fastest stays."""
    given = (bench_options.vary, bench_options.against, bench_options.set_of)
    if len(bench_options.refs) != 1 or any(given):
        raise UsageError("--tune takes one graph, and none of --vary, --against, --set-of")
    experiment, source = experiments.experiment_of(bench_options)
    (job,) = experiments.prepare_experiment(experiment, options, source).jobs
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
            vary = [f"{experiments.PARTS}={parts}"] if branched else []
            others = [f"drafter.{key}={value}" for key, value in drafter.items() if key != name]
            sides = [",".join([f"drafter.{name}={value}", *others]) for value in values]
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
    model = {} if options.drafter_model is None else {"model": options.drafter_model}
    profile: dict[str, Any] = {"model": job.options.model, "drafters": {kind: model | drafter}}
    if options.dtype is not None:
        profile["dtype"] = options.dtype
    profiles = {"profiles": {options.profile or "tuned": profile}}
    text = "".join(f"# {line}\n" for line in gains) + yaml.safe_dump(profiles, sort_keys=False)
    faults: list[str] = []
    if bench_options.out is not None:
        files = RunFolder.at(bench_options.out)
        files.write_text("profile.yaml", text)
        faults = files.faults
    for fault in faults:
        complain(fault)
    shown = json_text({"drafter": drafter, "gains": gains}) if options.as_json else text
    delivered = deliver(shown, str(bench_options.out or ""))
    return Code.OK if delivered and not faults else Code.FAILED


def _speeds(bench_options: BenchOptions, options: RunOptions, sides: Sequence[str]) -> list[float]:
    """The speeds of the graph with these settings against plain decoding; none without rounds."""
    from .comparison import measure

    refs = [f"{bench_options.refs[0]}@{settings}" for settings in ("drafter.kind=none", *sides)]
    experiment, source = experiments.experiment_of(replace(bench_options, refs=refs))
    result = measure(experiments.prepare_experiment(experiment, options, source))
    if result["exit_code"]:
        raise UsageError("--tune: a side failed: " + "; ".join(result["problems"][:3]))
    rows = [*result["rows"].values()][1:]
    return [row["figures"].get("speedup_decode", [0.0])[0] for row in rows]

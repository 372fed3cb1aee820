"""Results as tables for a terminal, CSV, Markdown pages, and pictures."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from ...states.yaml.source import number_of
from ..shell import aligned, markdown_table, printable, shortened
from .experiment import FIGURES, PARTS, QUALITY, Experiment, Plot, at_commas
from .sides import TIE, letters

WIDTH = 30  # of a name or a value in a table for a terminal
MOST = 20  # differences that are printed; the JSON document has all
WORDS = {
    "different": "DIFFERENT",
    "tie": "by a numeric tie",
    "follows": "after these",
    "unfinished": "not finished",
}
Rows = Sequence[Mapping[str, Any]]  # of a result, in the order of their letters


def csv_of(rows: Rows) -> str:
    """Every figure of every row; intervals in columns of their own."""
    table = []
    for letter, row in zip(letters(), rows, strict=False):
        line: dict[str, Any] = {"row": letter, "side": row["side"], **row["varied"]}
        line |= {"reference": row["reference"], "equal": row["equal"]}
        for name in FIGURES:
            line[name], low, high = row["figures"].get(name, (None, None, None))
            if low is not None:
                line |= {f"{name}_low": low, f"{name}_high": high}
        table.append(line)
    text = io.StringIO()
    names = dict.fromkeys(name for line in table for name in line)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def cells_of(
    experiment: Experiment, rows: Rows, between: str = " "
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the figures that are shown; between: figures and their intervals."""
    names = [name for name in experiment.figures if any(name in row["figures"] for row in rows)]
    cells = []
    for letter, row in zip(letters(), rows, strict=False):
        point = [row["varied"].get(path, "") for path in experiment.vary]
        line = [letter, label(experiment, row), *point, row["equal"]]
        for name in names:
            figure = row["figures"].get(name)
            line.append(FIGURES[name].words(figure, between) if figure else "-")
        cells.append(line)
    return ["", "side", *experiment.vary, "equal", *names], cells


def label(experiment: Experiment, row: Mapping[str, Any]) -> str:
    """The name of a row's side in tables and pictures."""
    side: str = row["side"]
    return experiment.labels.get(side, side)


def tables(experiment: Experiment, rows: Rows) -> list[tuple[list[str], list[list[str]]]]:
    """Headings and cells of a table of all rows; of sides that are compared at the points of one
    setting, of a table for each figure, with a column for each point."""
    heads, cells = cells_of(experiment, rows)
    fixed = 2 + len(experiment.vary)
    heads[fixed:] = [name.replace("_", " ") for name in heads[fixed:]]
    found = [(heads, cells)]
    if experiment.pairing == "point" and len(experiment.vary) == 1:
        (path,) = experiment.vary
        points = list(dict.fromkeys(row[2] for row in cells))
        sides = list(dict.fromkeys(row[1] for row in cells))
        by_place = {(row[1], row[2]): row for row in cells}
        found = []
        for at in range(fixed, len(heads)):
            title = [heads[at], *(f"{path} {point}" for point in points)]
            places = [[by_place.get((side, point)) for point in points] for side in sides]
            lines = [
                # Every reference is the first side at the same point.
                [side, *("" if row is None else row[at].partition(" =")[0] for row in place)]
                for side, place in zip(sides, places, strict=True)
            ]
            found.append((title, lines))
    return found


Table = list[tuple[str, ...]]  # headings first
# Figures that share a cell, as in the papers.
CELLS = (("speedup_decode", "tau_step"), ("ms_to_last_token", "speedup_ttlt"))


def tables_of(experiment: Experiment, result: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    """Titles and tables: ratios, tau and times by category of the questions; of a question set also
    what answers show without a judge, and what papers report."""
    rows = [*result["rows"].values()]
    named = [label(experiment, row) for row in rows]
    categories = list(rows[0]["categories"]) if rows else []
    overall = [{name: each[0] for name, each in row["figures"].items()} for row in rows]
    shown = [(name,) for name in experiment.figures if name.startswith(("speedup", "tau"))]
    for names in (CELLS if experiment.set_of else shown) if categories else ():
        columns = {one: [row["categories"].get(one, {}) for row in rows] for one in categories}
        cells = {one or "none": _cells(column, names) for one, column in columns.items()}
        if len(categories) > 1:
            cells["overall"] = _cells(overall, names)
        yield f"{' / '.join(names).replace('_', ' ')} by category", _by_side(named, cells)
    if experiment.set_of and rows:
        measured = [name for name in QUALITY if any(name in one for one in overall)]
        cells = {name.replace("_", " "): _cells(overall, [name]) for name in measured}
        yield "answers, without a judge", _by_side(named, cells)
    if published := result["published"]:
        heads = ("method", "model", "temperature", "speedup", "tau", "hardware", "source")
        lines = [tuple(_published(row[head]) for head in heads) for row in published]
        yield "published by papers, not measured here", [heads, *lines]


def _published(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _cells(column: Iterable[Mapping[str, float]], names: Iterable[str]) -> list[str]:
    forms = {name: FIGURES[name].form for name in names}
    return [
        "/".join(format(one[name], form) if name in one else "-" for name, form in forms.items())
        for one in column
    ]


def _by_side(names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Table:
    pairs = zip(letters(), names, strict=False)
    sides = [shortened(f"{letter} {name}", WIDTH) for letter, name in pairs]
    return [("", *columns), *zip(sides, *columns.values(), strict=True)]


def page(
    experiment: Experiment, result: Mapping[str, Any], notes: Iterable[str], facts: Iterable[str]
) -> str:
    lines = [f"# {experiment.name}", "", experiment.doc, ""]
    for table in tables(experiment, [*result["rows"].values()]):
        lines += [*markdown_table(*table), ""]
    for name, (heads, *cells) in tables_of(experiment, result):
        lines += [f"{name}:", "", *markdown_table(heads, cells), ""]
    lines += ["```", *notes, "```", "", *(f"- {fact}" for fact in facts)]
    return "".join(f"{line}\n" for line in lines)


def console(experiment: Experiment, result: Mapping[str, Any], notes: Iterable[str]) -> str:
    """A table for a terminal, intervals below their figures, and notes."""
    heads, table = cells_of(experiment, [*result["rows"].values()], between="\n")
    lines = [[head.replace(".", ".\n").replace("_", "\n") for head in heads]]
    for letter, side, *cells in table:
        points = cells[: len(experiment.vary)]
        names = ["\n".join(wrap(printable(name, ""), WIDTH)) for name in (side, *points)]
        lines.append([letter, *names, *cells[len(points) :]])
    split = [zip_longest(*(cell.split("\n") for cell in line), fillvalue="") for line in lines]
    title = f"{experiment.name}: {experiment.doc}"
    texts = ["", title, "", *aligned(chain.from_iterable(split)), ""]
    for name, more in tables_of(experiment, result):
        shown = (tuple(printable(cell, "") for cell in line) for line in more)
        texts += [f"{name}:", "", *aligned(shown), ""]
    return "".join(f"{line}\n" for line in [*texts, *(printable(note, "") for note in notes)])


def equality_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """For each pair how many branches are equal, or why it is not compared; then differences."""
    graphs = result["setup"]["graphs"]
    for pair in result["equality"]:
        names = f"{pair['graph']} and {pair['reference']}"
        if not pair["compared"]:
            yield f"{names}: not compared; {pair['reason']}"
            continue
        words = [f"{pair['equal']} of {pair['branches']} branches equal"]
        words += [f"{pair[name]} {word}" for name, word in WORDS.items() if pair[name]]
        note = "" if pair["promised"] else f" (not promised in {graphs[pair['graph']]['dtype']})"
        yield f"{names}: {', '.join(words)} ({pair['equal_tokens']:,} tokens){note}"
    pairs = result["equality"]
    every = [(pair, difference) for pair in pairs for difference in pair.get("differences", ())]
    for pair, difference in every[:MOST]:
        yield from ("", *_difference(pair, difference))
    if len(every) > MOST:
        yield from ("", f"{len(every) - MOST} more; --json has all")


def _difference(pair: Mapping[str, Any], difference: Mapping[str, Any]) -> Iterator[str]:
    where = "{graph} and {reference}, ".format_map(pair)
    where += "prompt {prompt}, branch {branch}".format_map(difference)
    if "position" not in difference:
        yield f"{where}: another prompt, though nothing before it differs"
        return
    kind = "numeric tie" if difference["result"] == "tie" else "DIFFERENT"
    yield f"{where}: {kind} at token {difference['position'] + 1}"
    yield f"  behind     ...{_quoted(difference['before'])}"
    ends = {"stop": "nothing: it stopped", "length": "nothing: its budget was used up"}
    for side in ("reference", "graph"):
        token = difference[side]
        text = ends.get(token["end"]) or f"{_quoted(token['text'])} (id {token['id']})"
        yield f"  {pair[side]} writes   {text}"
    margin = difference["margin"]
    if margin is None:
        yield "  no margin: one answer has no token difference"
    else:
        how = "below" if margin < TIE else "not below"
        yield f"  margin     {margin:.3g} by the target alone, {how} {TIE:g}"


def _quoted(text: str) -> str:
    return '"' + printable(text.replace("\n", "\\n"), "")[-70:] + '"'


def measured_words(result: Mapping[str, Any]) -> list[str]:
    """On what, how often, and how quiet it was."""
    setup = result["setup"]
    noise = result["noise"]
    rounds = result["rounds"]
    dtypes, threads = (
        ", ".join(sorted({str(graph[name]) for graph in setup["graphs"].values()}))
        for name in ("dtype", "threads")
    )
    prompts = setup["prompts"]["count"]
    times = rounds // prompts
    often = f"{times} repeats: {rounds} rounds" if times > 1 else "once each"
    status = "" if result["status"] == "ok" else f"; status {result['status']}"
    spread = "" if noise["spread"] is None else f"; repeats differ by {noise['spread']:.0%}"
    quiet = "other load on the machine" if noise["disturbed"] else "no other load"
    busy = f"a busy loop got {noise['cpu_share']:.0%} of a CPU"
    return [
        f"{number_of(prompts, 'prompt')}, {often}{spread}{status}",
        f"dtype {dtypes}, threads {threads}",
        "{processor}, {cpus} CPUs, ".format_map(setup["machine"])
        + "torch {torch}, transformers {transformers}".format_map(setup["versions"]),
        f"{quiet}: {busy} (at worst {noise['cpu_share_lowest']:.0%})",
    ]


SIZE = (6.4, 3.8)  # inches
MANY = 6  # lines with a legend next to the picture
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
MARKS = "osD^vP*X"
STYLE_OF_PICTURES: Any = {  # with the salt the same picture is the same file
    "svg.hashsalt": "specsot",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
}
UNITS = {"ms": " (milliseconds)", "kv": " (MB)", "speedup": " (times)"}


def draw_all(experiment: Experiment, rows: Rows, folder: Path) -> list[Path]:
    """Every plot that has figures, or one of the first shown figure; raises OSError."""
    import matplotlib
    from matplotlib.figure import Figure

    axis = next(iter(experiment.vary), None)
    names = short_names([row["side"] for row in rows]) | dict(experiment.labels)
    files = []
    with matplotlib.rc_context(STYLE_OF_PICTURES):
        for plot in experiment.plots or (Plot(y=experiment.figures[0], x=axis),):
            shown = [row for row in rows if plot.y in row["figures"]]
            if not shown:
                continue
            picture = Figure(figsize=SIZE, layout="constrained")
            axes = picture.add_subplot()
            if plot.x is None:
                picture.set_figheight(max(SIZE[1], 1 + 0.26 * len(shown)))  # each bar is visible
                _bars(axes, plot.y, shown, names=names)
            else:
                _lines(axes, plot.y, plot.x, shown, names=names)
            unit = UNITS.get(plot.y.partition("_")[0], "")
            axes.set_title(f"{experiment.name}: {plot.y.replace('_', ' ')}{unit}")
            name = "-".join(filter(None, (experiment.name, plot.y, plot.x)))
            for kind, metadata in {"svg": {"Date": None}, "png": None}.items():
                files.append(folder / f"{name}.{kind}")
                picture.savefig(files[-1], dpi=110, metadata=metadata)
    return files


def _bars(axes: Any, name: str, rows: Rows, *, names: Mapping[str, str]) -> None:
    places = range(len(rows))
    figures = [row["figures"][name] for row in rows]
    values = [value for value, _, _ in figures]
    style = {"ecolor": "#222222", "capsize": 3}
    bars = axes.barh(places, values, 0.6, color=COLOURS[0], xerr=_errors(figures), **style)
    points = [[f"{path}={value}" for path, value in row["varied"].items()] for row in rows]
    labels = [[names[row["side"]], *point] for row, point in zip(rows, points, strict=True)]
    axes.set_yticks(places, [*map(" ".join, labels)])
    axes.invert_yaxis()
    axes.bar_label(bars, [format(value, FIGURES[name].form) for value in values], padding=5)
    axes.margins(x=0.12)


def _lines(axes: Any, name: str, path: str, rows: Rows, *, names: Mapping[str, str]) -> None:
    """A line for each side and point of what else varies; a dashed one for what does not vary."""
    order = list(dict.fromkeys(row["varied"][path] for row in rows if path in row["varied"]))
    try:
        numbers = {value: float(value) for value in order}
    except ValueError:
        numbers = {value: float(place) for place, value in enumerate(order)}
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        rest = [f"{key}={value}" for key, value in row["varied"].items() if key != path]
        series.setdefault(" ".join((names[row["side"]], *rest)), []).append(row)
    for number, (label, points) in enumerate(series.items()):
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "label": label}
        figures = [row["figures"][name] for row in points]
        values = [value for value, _, _ in figures]
        if path not in points[0]["varied"]:
            axes.axhline(values[0], linestyle="--", linewidth=1.2, **style)
            continue
        style |= {"marker": MARKS[number % len(MARKS)], "capsize": 3}
        places = [numbers[row["varied"][path]] for row in points]
        axes.errorbar(places, values, yerr=_errors(figures), **style)
    axes.set_xticks([numbers[value] for value in order], order)
    axes.set_xlabel("branches" if path == PARTS else path)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    place = {"fontsize": 7, "loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axes.legend(frameon=False, **(place if len(series) > MANY else {}))


def short_names(sides: Sequence[str]) -> dict[str, str]:
    """Sides without the settings that all sides of their graph have, and without paths."""
    settings: dict[str, dict[str, list[str]]] = {}  # by graph, by side
    for side in sides:
        graph, _, text = side.partition("@")
        settings.setdefault(graph, {})[side] = list(filter(None, at_commas(text)))
    names = {}
    for graph, own in settings.items():
        common = set.intersection(*map(set, own.values())) if len(own) > 1 else set()
        for side, texts in own.items():
            pairs = [text.partition("=") for text in texts if text not in common]
            words = [f"{path.rpartition('.')[2]}={value}" for path, _, value in pairs]
            names[side] = f"{graph}@{','.join(words)}" if words else graph
    return names


def _errors(figures: Sequence[Sequence[float | None]]) -> Any:
    """[2, figures]: how far intervals reach to both sides; None if one has no interval."""
    if any(None in figure for figure in figures):
        return None
    numbers = np.array(figures, float)
    return ((numbers[:, 1:] - numbers[:, :1]) * (-1, 1)).clip(0).T

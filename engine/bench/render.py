"""Results as tables for a terminal, CSV, Markdown pages, and pictures."""

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import numpy as np
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..events import printable
from ..record.metrics import state_figures
from ..shell import usable
from .comparison import Comparison
from .experiment import FIGURES, GAINS, MB, PARTS, Experiment, Plot, at_commas
from .sides import CUT, END, TIE, BranchAnswer, BranchComparison, Side, counts, letters

COLUMNS = {  # columns of the Markdown table, and how their numbers are written
    "graph": "",
    "equal": "",
    "tau_step": ".2f",
    "rounds": "",
    "tokens": "",
    "milliseconds_per_token": ".2f",
    "speedup_per_token": ".2f",
    "fewer_rounds": ".2f",
    "more_tokens_per_round": ".2f",
    "kv_peak_bytes": ",",
    "kv_moved_bytes": ",",
    "padding_waste": ".3f",
}
STYLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}
STYLE |= {"pad_edge": False, "padding": (0, 1, 0, 0)}
WIDTH = 100
QUESTION = 20  # characters of a question next to its figures
STATES = 9  # states side by side; a graph with more gets another table
MOST = 20  # differences that are printed; --json has all
HEADINGS = ("equal", "tau", "forwards", "tokens", "ms", "KV peak", "KV moved", "padding")
GAIN_HEADINGS = ("time per token", "rounds", "tokens per round")
WORDS = {
    BranchAnswer.DIFFERENT: "DIFFERENT",
    BranchAnswer.TIE: "by a numeric tie",
    BranchAnswer.FOLLOWS: "behind these",
    BranchAnswer.UNFINISHED: "not finished",
}
Rows = Sequence[Mapping[str, Any]]  # of a result, in the order of their letters
Column = tuple[str, dict[str, Any]]  # its name and settings
Cells = Callable[[Comparison, Side], Iterable[str]]


def rendered(parts: Callable[[box.Box], Iterable[RenderableType]], stream: TextIO) -> str:
    """What a stream shows: as wide as its terminal, or WIDTH columns; ASCII where it must be."""
    there = Console(file=stream)
    out = io.StringIO()
    width = there.width if there.is_terminal else WIDTH
    styled = usable(there, dict(os.environ))
    console = Console(file=out, width=width, force_terminal=styled, highlight=False)
    lines = box.SIMPLE_HEAD if "utf" in (stream.encoding or "utf-8").lower() else box.ASCII
    for part in parts(lines):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def csv_text(rows: Rows) -> str:
    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _markdown(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = (
        " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line)
        for line in (heads, ["---"] * len(heads), *rows)
    )
    return "".join(f"| {line} |\n" for line in lines)


def _table(title: str, lines: box.Box, *columns: Column) -> Table:
    table = Table(title=f"\n{title}", box=lines, **STYLE)
    for name, style in columns:
        table.add_column(name, **style)
    return table


def page(title: str, table: str, notes: Iterable[str], facts: Iterable[str]) -> str:
    notes_text = "".join(f"{line}\n" for line in notes)
    return f"# {title}\n\n{table}\n```\n{notes_text}```\n\n" + "".join(f"- {f}\n" for f in facts)


# -- comparisons -------------------------------------------------------------------------------


def comparison_markdown(rows: Rows) -> str:
    if not rows:
        return "No prompt was answered by every graph.\n"
    names = list(rows[0])
    settings = names[names.index("graph") + 1 : names.index("prompts")]
    forms = {"side": "", "graph": "", **dict.fromkeys(settings, ""), **COLUMNS}
    values = [[(row.get(name), form) for name, form in forms.items()] for row in rows]
    cells = [["" if one is None else format(one, form) for one, form in row] for row in values]
    return _markdown([name.replace("_", " ") for name in forms], cells)


def comparison_parts(
    comparison: Comparison, lines: box.Box, each: bool = True
) -> Iterator[RenderableType]:
    """All tables; each: a line for each prompt too, and states apart."""
    yield _graphs(comparison, lines)
    if comparison.prompts:
        yield from _figures(comparison, lines, each)
    yield Text("\nEquality", style="bold")
    yield from (Text(f"  {line}") for line in equality_lines(comparison))
    every = comparison.differences
    for branch in every[:MOST]:
        yield from map(Text, ("", *_difference(branch)))
    if len(every) > MOST:
        yield Text(f"\n{len(every) - MOST} more; --json has all")


def _graphs(comparison: Comparison, lines: box.Box) -> Table:
    rows = [("", "graph", "settings", "file", "layout", "drafter", "model", "budget")]
    for side in comparison.sides:
        graph = side.job.program.graph
        options = side.job.options
        named = (side.letter, side.title, "\n".join(side.sets), options.graph)
        kinds = (graph.layout.kind, graph.drafter.kind, options.model, str(side.session.budget))
        rows.append((*named, *kinds))
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    table = _table("Graphs", lines, *((name, {"overflow": "fold"}) for name, *_ in columns))
    for cells in list(zip(*columns, strict=True))[1:]:
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _by_prompt(
    title: str,
    lines: box.Box,
    columns: Iterable[Column],
    sections: Sequence[Sequence[tuple[str, Comparison, Cells]]],
) -> Table:
    heads: list[Column] = [("prompt", {"max_width": QUESTION})]  # the one that gives way
    heads += [("", {"no_wrap": True}), *columns]
    table = _table(title, lines, *heads)
    for section in sections:
        for name, part, cells in section:
            line = printable(name.replace("\n", " "), "")
            short = line if len(line) <= QUESTION else f"{line[: QUESTION - 3]}..."
            text = Text(short, no_wrap=True, overflow="crop")
            for side in part.sides:
                table.add_row(text, side.letter, *cells(part, side))
                text = Text()
        table.add_section()
    return table


def _figures(comparison: Comparison, lines: box.Box, each: bool) -> Iterator[RenderableType]:
    pools = "KV: MB in the target's and the drafter's pool"
    title = f"{'Per prompt and in total' if each else 'In total'} (equal: branches; {pools})"
    prompts = [(one.prompt, comparison.of(one)) for one in comparison.prompts if each]
    number: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns = [(name, {**number, "overflow": "fold"}) for name in HEADINGS]
    singles = [(f"{prompt.key}. {prompt.text}", part, _numbers) for prompt, part in prompts]
    every = [(f"total of {len(comparison.prompts)}", comparison, _numbers)]
    yield _by_prompt(title, lines, columns, [singles, every])
    first = comparison.sides[0].letter
    title = f"Against {first}: times better, median of prompts (lowest to highest)"
    names: list[Column] = [("", {"no_wrap": True})]
    names += [("graph", {"overflow": "fold"}), *((name, number) for name in GAIN_HEADINGS)]
    table = _table(title, lines, *names)
    for side in comparison.sides:
        gains = comparison.gains(side)
        cells = [_gain(gains.get(name, [])) for name in GAINS]
        table.add_row(side.letter, Text(printable(side.name)), *cells)
    yield table
    if not each:
        return
    graphs = [side.job.program.graph for side in comparison.sides]
    busy = (name for graph in graphs for name, state in graph.states.items() if state.ops)
    all_states = list(dict.fromkeys(busy))
    for start in range(0, len(all_states), STATES):
        states = all_states[start : start + STATES]
        style = {"justify": "right", "overflow": "fold"}
        cells_of = partial(_milliseconds, states)
        sections = [
            [(prompt.key, part, cells_of) for prompt, part in prompts],
            [("total", comparison, cells_of)],
            [("per visit", comparison, partial(cells_of, per="_per_visit", digits=2))],
        ]
        headings = [(state.replace("_", "\n"), style) for state in states]
        yield _by_prompt("Milliseconds per state", lines, headings, sections)
    for side in comparison.sides:
        for name, pool in comparison.total(side).pools.items():
            causes = (
                f"{cause} {size:,} bytes in {pool.moves[cause]} moves"
                for cause, size in pool.moved_bytes.items()
            )
            if pool.moved_bytes.total():
                yield Text(f"KV moved by {side.letter} in the {name}'s pool: {', '.join(causes)}")


def _gain(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}{spread}"


def _numbers(comparison: Comparison, side: Side) -> Iterator[str]:
    cost = comparison.total(side)
    meter = cost.meter
    pools = cost.pools.values()
    yield comparison.equal_branches(side)
    yield f"{meter.tau_step:.2f}"
    yield str(meter.forwards)
    yield str(meter.tokens)
    yield f"{1000 * meter.seconds:.0f}"
    for sizes in ([p.peak_bytes for p in pools], [p.moved_bytes.total() for p in pools]):
        # At most four characters for what is below 10000.
        megabytes = [size / MB for size in sizes]
        yield "+".join(f"{n:.{2 if n < 9.995 else 1 if n < 99.95 else 0}f}" for n in megabytes)
    yield f"{100 * meter.padding_waste:.1f} %"


def _milliseconds(
    states: Sequence[str], part: Comparison, side: Side, per: str = "", digits: int = 1
) -> list[str]:
    own = state_figures(part.total(side).meter)
    return [f"{own[s][f'milliseconds{per}']:.{digits}f}" if s in own else "" for s in states]


def equality_lines(comparison: Comparison) -> Iterator[str]:
    """For each pair of graphs how many branches are equal, or why they are not compared."""
    for pair in comparison.pairs:
        names = f"{pair.other.letter} and {pair.reference.letter}"
        if pair.why_not:
            yield printable(f"{names}: not compared; {pair.why_not}", "")
            continue
        number = counts(comparison.branches(pair))
        words = [f"{number['equal']} of {number['branches']} branches equal"]
        words += [f"{number[result]} {name}" for result, name in WORDS.items() if number[result]]
        note = "" if pair.promised else f" (not promised in {pair.other.job.options.dtype})"
        yield f"{names}: {', '.join(words)} ({number['equal_tokens']:,} tokens){note}"


def _difference(branch: BranchComparison) -> Iterator[str]:
    reference = branch.pair.reference
    difference = branch.difference
    letters = f"{branch.pair.other.letter} and {reference.letter}"
    prompt = branch.prompt.prompt.key
    where = printable(f"{letters}, prompt {prompt}, branch {branch.branch}", "")
    if difference is None:
        yield f"{where}: another prompt, though nothing before it differs"
        return
    kind = "numeric tie" if branch.result is BranchAnswer.TIE else "DIFFERENT"
    yield f"{where}: {kind} at token {difference.position + 1}"
    yield f"  behind     ...{_quoted(difference.before)}"
    ends = {END: "nothing: it stopped", CUT: "nothing: its budget was used up"}
    decode = reference.session.prompts.decode
    for side, token in ((reference, difference.reference), (branch.pair.other, difference.other)):
        text = ends[token] if token in ends else f"{_quoted(decode([token]))} (id {token})"
        yield f"  {side.letter} writes   {text}"
    if difference.margin is None:
        yield "  no margin: one answer has no token difference"
    else:
        how = "below" if difference.margin < TIE else "not below"
        yield f"  margin     {difference.margin:.3g} by the target alone, {how} {TIE:g}"


def _quoted(text: str) -> str:
    return '"' + printable(text.replace("\n", "\\n"), "")[-70:] + '"'


# -- experiments -------------------------------------------------------------------------------


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
    return csv_text(table)


def experiment_table(
    experiment: Experiment, rows: Rows, between: str = " "
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the figures that are shown; between: figures and their intervals."""
    names = [name for name in experiment.figures if any(name in row["figures"] for row in rows)]
    cells = []
    for letter, row in zip(letters(), rows, strict=False):
        point = [row["varied"].get(path, "") for path in experiment.vary]
        line = [letter, row["side"], *point, row["equal"]]
        for name in names:
            numbers = [n for n in row["figures"].get(name, ()) if n is not None]
            value, *edges = [format(number, FIGURES[name].form) for number in numbers] or ["-"]
            spread = f"{between}({' to '.join(edges)})" if set(edges) - {value} else ""
            line.append(f"{value}{spread}")
        cells.append(line)
    return ["", "side", *experiment.vary, "equal", *names], cells


def experiment_markdown(experiment: Experiment, rows: Rows) -> str:
    if not rows:
        return "No prompt was answered by every side.\n"
    heads, cells = experiment_table(experiment, rows)
    fixed = 2 + len(experiment.vary)
    return _markdown([*heads[:fixed], *(name.replace("_", " ") for name in heads[fixed:])], cells)


def experiment_parts(
    experiment: Experiment, rows: Rows, notes: Sequence[str], lines: box.Box
) -> Iterator[RenderableType]:
    heads, cells = experiment_table(experiment, rows, between="\n")
    columns: list[Column] = []
    for number, head in enumerate(heads):
        if head in ("", "equal"):
            columns.append((head, {"no_wrap": True}))
        elif number < 2 + len(experiment.vary):
            columns.append((head.replace(".", ".\n"), {"overflow": "fold"}))
        else:
            columns.append((head.replace("_", "\n"), {"justify": "right", "overflow": "fold"}))
    table = _table(f"{experiment.name}: {experiment.doc}", lines, *columns)
    for line in cells:
        table.add_row(*(Text(printable(text)) for text in line))
    yield table
    yield from (Text(printable(note, "")) for note in notes)


def measured_words(result: Mapping[str, Any]) -> list[str]:
    """On what, how often, and how quiet it was."""
    setup = result["setup"]
    noise = result["noise"]
    rounds = result["rounds"]
    machine = setup["machine"]
    versions = setup["versions"]
    dtypes, threads = (
        ", ".join(sorted({str(graph[name]) for graph in setup["graphs"].values()}))
        for name in ("dtype", "threads")
    )
    prompts = setup["prompts"]["count"]
    repeats = f"{rounds // prompts} repeats" if rounds >= 2 * prompts else "once each"
    spread = "" if noise["spread"] is None else f"; repeats lie {noise['spread']:.0%} apart"
    quiet = "others used the machine" if noise["disturbed"] else "nobody else was seen"
    libraries = f"torch {versions['torch']}, transformers {versions['transformers']}"
    busy = f"a busy loop got {noise['cpu_share']:.0%} of a CPU"
    return [
        f"{prompts} prompts, {repeats}: {rounds} rounds; status {result['status']}",
        f"dtype {dtypes}, threads {threads}",
        f"{machine['processor']}, {machine['cpus']} CPUs, {libraries}",
        f"{quiet}: {busy} (at worst {noise['cpu_share_lowest']:.0%}){spread}",
    ]


# -- pictures ----------------------------------------------------------------------------------


SIZE = (6.4, 3.8)  # inches
BAR = 0.26  # of height, at least
MANY = 6  # lines with a legend next to the picture
DPI = 110
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
    files = []
    with matplotlib.rc_context(STYLE_OF_PICTURES):
        for plot in experiment.plots or (Plot(y=experiment.figures[0], x=axis),):
            shown = [row for row in rows if plot.y in row["figures"]]
            if not shown:
                continue
            width, height = SIZE
            if plot.x is None:
                height = max(height, 1 + BAR * len(shown))
            picture = Figure(figsize=(width, height), layout="constrained")
            axes = picture.add_subplot()
            if plot.x is None:
                _bars(axes, plot.y, shown)
            else:
                _lines(axes, plot.y, plot.x, shown)
            unit = UNITS.get(plot.y.partition("_")[0], "")
            axes.set_title(f"{experiment.name}: {plot.y.replace('_', ' ')}{unit}")
            name = "-".join(filter(None, (experiment.name, plot.y, plot.x)))
            for kind, metadata in {"svg": {"Date": None}, "png": None}.items():
                files.append(folder / f"{name}.{kind}")
                picture.savefig(files[-1], dpi=DPI, metadata=metadata)
    return files


def _bars(axes: Any, name: str, rows: Rows) -> None:
    places = range(len(rows))
    figures = [row["figures"][name] for row in rows]
    values = [value for value, _, _ in figures]
    style = {"ecolor": "#222222", "capsize": 3}
    bars = axes.barh(places, values, 0.6, color=COLOURS[0], xerr=_errors(figures), **style)
    names = short_names([row["side"] for row in rows])
    points = (" ".join(f"{p}={v}" for p, v in row["varied"].items()) for row in rows)
    labels = (f"{names[row['side']]} {point}" for row, point in zip(rows, points, strict=True))
    axes.set_yticks(places, [label.rstrip() for label in labels])
    axes.invert_yaxis()
    axes.bar_label(bars, [format(value, FIGURES[name].form) for value in values], padding=5)
    axes.margins(x=0.12)


def _lines(axes: Any, name: str, path: str, rows: Rows) -> None:
    """A line for each side and point of what else varies; a dashed one for what does not vary."""
    order = list(dict.fromkeys(row["varied"][path] for row in rows if path in row["varied"]))
    try:
        numbers = {value: float(value) for value in order}
    except ValueError:
        numbers = {value: float(place) for place, value in enumerate(order)}
    names = short_names([row["side"] for row in rows])
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

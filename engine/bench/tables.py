"""Comparisons and experiments as text: tables for a terminal, CSV, and Markdown pages."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import StringIO
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..record.metrics import state_figures
from ..terminal import usable
from ..text_stream import printable
from .comparison import COSTS, Comparison, Gain, equal_branches, gains
from .equality import CUT, END, TIE, BranchAnswer, BranchComparison, counts
from .experiment import Experiment
from .figures import FIGURES, Estimate
from .rows import Row
from .sides import Side

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


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each graph under a line of names."""
    text = StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The columns that people read."""
    if not rows:
        return "No prompt was answered by every graph.\n"
    names = list(rows[0])
    settings = names[names.index("graph") + 1 : names.index("prompts")]
    forms = {"side": "", "graph": "", **dict.fromkeys(settings, ""), **COLUMNS}
    cells = [[_cell(row.get(name), form) for name, form in forms.items()] for row in rows]
    lines = [[name.replace("_", " ") for name in forms], ["---"] * len(forms), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any, form: str) -> str:
    text = "" if value is None else format(value, form) if form else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def comparison_page(
    title: str, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], notes: Iterable[str]
) -> str:
    """The table with what was measured, on what."""
    facts_text = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    lines = "".join(f"{line}\n" for line in notes)
    return f"# {title}\n\n{markdown(rows)}\n```\n{lines}```\n\n{facts_text}"


STYLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}
STYLE |= {"pad_edge": False, "padding": (0, 1, 0, 0)}
WIDTH = 100
QUESTION = 20  # characters of a question beside its figures
STATES = 9  # states side by side; a graph with more gets another table
MOST = 20  # differences that are printed; --json has all
MB = 1e6
HEADINGS = ("equal", "tau", "forwards", "tokens", "ms", "KV peak", "KV moved", "padding")
GAINS = {
    "speedup_per_token": "time per token",
    "fewer_rounds": "rounds",
    "more_tokens_per_round": "tokens per round",
}
WORDS = {
    BranchAnswer.DIFFERENT: "DIFFERENT",
    BranchAnswer.TIE: "by a numeric tie",
    BranchAnswer.FOLLOWS: "behind these",
    BranchAnswer.UNFINISHED: "not finished",
}


def render_comparison(
    comparison: Comparison, stream: TextIO, environ: dict[str, str], each: bool = True
) -> str:
    """All tables as text for this stream: as wide as its terminal, or WIDTH columns.

    each: a line for each prompt too, and states apart.
    """
    there = Console(file=stream)
    out = io.StringIO()
    width = there.width if there.is_terminal else WIDTH
    console = Console(file=out, width=width, force_terminal=usable(there, environ), highlight=False)
    lines = box.SIMPLE_HEAD if "utf" in (stream.encoding or "utf-8").lower() else box.ASCII
    console.print(Group(*_parts(comparison, lines, each)))
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _parts(comparison: Comparison, lines: box.Box, each: bool) -> Iterator[RenderableType]:
    yield _graphs(comparison, lines)
    if comparison.prompts:
        yield _figures(comparison, lines, each)
        yield _gains(comparison, lines)
        graphs = [side.job.program.graph for side in comparison.sides]
        busy = (name for graph in graphs for name, state in graph.states.items() if state.ops)
        states = list(dict.fromkeys(busy)) if each else []
        for start in range(0, len(states), STATES):
            yield _milliseconds(comparison, states[start : start + STATES], lines)
        yield from map(Text, _moves(comparison) if each else ())
    yield Text("\nEquality", style="bold")
    yield from (Text(f"  {line}") for line in equality_lines(comparison))
    every = comparison.differences
    for branch in every[:MOST]:
        yield from map(Text, ("", *_difference(branch)))
    if len(every) > MOST:
        yield Text(f"\n{len(every) - MOST} more; --json has all")


def _graphs(comparison: Comparison, lines: box.Box) -> Table:
    """The graph of each letter, with its own settings if any graph has some."""
    rows = [("", "graph", "settings", "file", "layout", "drafter", "model", "budget")]
    for side in comparison.sides:
        graph = side.job.program.graph
        options = side.job.options
        named = (side.letter, side.title, "\n".join(side.sets), options.graph)
        kinds = (graph.layout.kind, graph.drafter.kind, options.model, str(side.session.budget))
        rows.append((*named, *kinds))
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    table = Table(title="\nGraphs", box=lines, **STYLE)
    for name, *_ in columns:
        table.add_column(name, overflow="fold")
    for cells in list(zip(*columns, strict=True))[1:]:
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _of_prompts(title: str, lines: box.Box, headings: Sequence[str], fold: bool) -> Table:
    """A table whose lines belong to prompts and graphs."""
    table = Table(title=f"\n{title}", box=lines, **STYLE)
    table.add_column("prompt", max_width=QUESTION)  # the one that gives way
    table.add_column("", no_wrap=True)
    for name in headings:
        table.add_column(name, justify="right", no_wrap=not fold, overflow="fold")
    return table


Cells = Callable[[Comparison, Side], Iterable[str]]


def _add(table: Table, name: Text, comparison: Comparison, cells: Cells) -> None:
    """A line for each graph, of one prompt or of all; the first has the name."""
    for side in comparison.sides:
        table.add_row(name, side.letter, *cells(comparison, side))
        name = Text()


def _figures(comparison: Comparison, lines: box.Box, each: bool) -> Table:
    pools = "KV: MB in the target's and the drafter's pool"
    title = f"{'Per prompt and in total' if each else 'In total'} (equal: branches; {pools})"
    table = _of_prompts(title, lines, HEADINGS, fold=False)
    for prompt in comparison.prompts if each else ():
        name = _cut(f"{prompt.prompt.key}. {prompt.prompt.text}")
        _add(table, name, comparison.of(prompt), _numbers)
    table.add_section()
    _add(table, Text(f"total of {len(comparison.prompts)}"), comparison, _numbers)
    return table


def _gains(comparison: Comparison, lines: box.Box) -> Table:
    """Each graph against the first, within prompts."""
    first = comparison.sides[0].letter
    title = f"Against {first}: times better, median of prompts (lowest to highest)"
    table = Table(title=f"\n{title}", box=lines, **STYLE)
    table.add_column("", no_wrap=True)
    table.add_column("graph", overflow="fold")
    for name in COSTS:
        table.add_column(GAINS[name], justify="right", no_wrap=True)
    for side in comparison.sides:
        side_gains = gains(comparison, side)
        table.add_row(
            side.letter,
            Text(printable(side.name)),
            *(_gain(side_gains.get(name)) for name in COSTS),
        )
    return table


def _gain(gain: Gain | None) -> str:
    if gain is None:
        return "-"
    spread = f" ({gain.lowest:.2f} to {gain.highest:.2f})" if gain.prompts > 1 else ""
    return f"{gain.median:.2f}{spread}"


def _cut(text: str) -> Text:
    """A text of the user as one line."""
    line = printable(text.replace("\n", " "), "")
    short = line if len(line) <= QUESTION else f"{line[: QUESTION - 3]}..."
    return Text(short, no_wrap=True, overflow="crop")


def _numbers(comparison: Comparison, side: Side) -> Iterator[str]:
    cost = comparison.total(side)
    meter = cost.meter
    pools = cost.pools.values()
    yield equal_branches(comparison, side)
    yield f"{meter.tau_step:.2f}"
    yield str(meter.forwards)
    yield str(meter.tokens)
    yield f"{1000 * meter.seconds:.0f}"
    yield "+".join(_megabytes(pool.peak_bytes) for pool in pools)
    yield "+".join(_megabytes(pool.moved_bytes.total()) for pool in pools)
    yield f"{100 * meter.padding_waste:.1f} %"


def _megabytes(size: int) -> str:
    """At most four characters for what is below 10000."""
    value = size / MB
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _milliseconds(comparison: Comparison, states: Sequence[str], lines: box.Box) -> Table:
    def cells(part: Comparison, side: Side, per: str = "", digits: int = 1) -> list[str]:
        own = state_figures(part.total(side).meter)
        figure = f"milliseconds{per}"
        return [f"{own[state][figure]:.{digits}f}" if state in own else "" for state in states]

    headings = [state.replace("_", "\n") for state in states]
    table = _of_prompts("Milliseconds per state", lines, headings, fold=True)
    for prompt in comparison.prompts:
        _add(table, _cut(prompt.prompt.key), comparison.of(prompt), cells)
    table.add_section()
    _add(table, Text("total"), comparison, cells)
    table.add_section()
    _add(table, Text("per visit"), comparison, partial(cells, per="_per_visit", digits=2))
    return table


def _moves(comparison: Comparison) -> Iterator[str]:
    """Where bytes were moved: by what."""
    for side in comparison.sides:
        for name, pool in comparison.total(side).pools.items():
            causes = (
                f"{cause} {size:,} bytes in {pool.moves[cause]} moves"
                for cause, size in pool.moved_bytes.items()
            )
            if pool.moved_bytes.total():
                yield f"KV moved by {side.letter} in the {name}'s pool: {', '.join(causes)}"


def equality_lines(comparison: Comparison) -> Iterator[str]:
    """For each pair of graphs how many branches are equal, or why they were not compared."""
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
    other = branch.pair.other
    difference = branch.difference
    prompt = branch.prompt.prompt.key
    where = printable(
        f"{other.letter} and {reference.letter}, prompt {prompt}, branch {branch.branch}", ""
    )
    if difference is None:
        yield f"{where}: another prompt, though nothing before it differs"
        return
    kind = "numeric tie" if branch.result is BranchAnswer.TIE else "DIFFERENT"
    yield f"{where}: {kind} at token {difference.position + 1}"
    yield f"  behind     ...{_quoted(difference.before)}"
    yield f"  {reference.letter} writes   {_token(reference, difference.reference)}"
    yield f"  {other.letter} writes   {_token(reference, difference.other)}"
    if difference.margin is None:
        yield "  no margin: one answer has no token difference"
    else:
        how = "below" if difference.margin < TIE else "not below"
        yield f"  margin     {difference.margin:.3g} by the target alone, {how} {TIE:g}"


def _quoted(text: str) -> str:
    return '"' + printable(text.replace("\n", "\\n"), "")[-70:] + '"'


def _token(side: Side, token: int) -> str:
    if token in (END, CUT):
        return "nothing: it stopped" if token == END else "nothing: its budget was used up"
    return f"{_quoted(side.session.prompts.decode([token]))} (id {token})"


def csv_of(rows: Sequence[Row]) -> str:
    """Every figure of every row; intervals in columns of their own."""
    table = []
    for row in rows:
        line: dict[str, Any] = {"row": row.letter, "side": row.side, **row.varied}
        line |= {"reference": row.reference, "equal": row.equal}
        for name in FIGURES:
            estimate = row.figures.get(name, None)
            line[name] = None if estimate is None else estimate.value
            if estimate is not None and estimate.low is not None:
                line |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        table.append(line)
    return csv_text(table)


def cell(name: str, estimate: Estimate | None, between: str = " ") -> str:
    """A figure with its interval."""
    if estimate is None:
        return "-"
    form = FIGURES[name].form
    value = format(estimate.value, form)
    if estimate.low is None or estimate.high is None:
        return value
    edges = [format(edge, form) for edge in (estimate.low, estimate.high)]
    return value if set(edges) == {value} else f"{value}{between}({edges[0]} to {edges[1]})"


def columns_of(experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    """Figures that its tables show and any row has."""
    return [name for name in experiment.figures if any(name in row.figures for row in rows)]


def cells_of(row: Row, paths: Sequence[str], names: Sequence[str], between: str = " ") -> list[str]:
    """A line of a table; between: the separator of figures and their intervals."""
    point = [row.varied.get(path, "") for path in paths]
    figures = [cell(name, row.figures.get(name), between) for name in names]
    return [row.letter, row.side, *point, row.equal, *figures]


def markdown_table(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Of the figures that the experiment names."""
    if not rows:
        return "No prompt was answered by every side.\n"
    paths = list(experiment.vary)
    names = columns_of(experiment, rows)
    heads = ["", "side", *paths, "equal", *(name.replace("_", " ") for name in names)]
    lines = [heads, ["---"] * len(heads), *(cells_of(row, paths, names) for row in rows)]
    escaped = ([text.replace("|", "\\|") for text in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def experiment_page(result: Mapping[str, Any], table: str, notes: Sequence[str]) -> str:
    """The Markdown file of a result."""
    experiment = result["experiment"]
    setup = result["setup"]
    facts = [f"- {line}\n" for line in (*measured_words(result), f"command: `{setup['command']}`")]
    notes_text = "".join(f"{note}\n" for note in notes)
    head = f"# {experiment['name']}\n\n{experiment['doc']}\n\n"
    return f"{head}{table}\n```\n{notes_text}```\n\n{''.join(facts)}"


def measured_words(result: Mapping[str, Any]) -> list[str]:
    """On what, how often, and how quiet it was."""
    setup = result["setup"]
    noise = result["noise"]
    rounds = result["rounds"]
    machine = setup["machine"]
    versions = setup["versions"]
    graphs = [*setup["graphs"].values()]
    kinds = {name: sorted({str(graph[name]) for graph in graphs}) for name in ("dtype", "threads")}
    prompts = setup["prompts"]["count"]
    repeats = f"{rounds // prompts} repeats" if rounds >= 2 * prompts else "once each"
    spread = "" if noise["spread"] is None else f"; repeats lie {noise['spread']:.0%} apart"
    quiet = "others used the machine" if noise["disturbed"] else "nobody else was seen"
    return [
        f"{prompts} prompts, {repeats}: {rounds} rounds; status {result['status']}",
        f"dtype {', '.join(kinds['dtype'])}, threads {', '.join(kinds['threads'])}",
        f"{machine['processor']}, {machine['cpus']} CPUs, torch {versions['torch']}, transformers"
        f" {versions['transformers']}",
        f"{quiet}: a busy loop got {noise['cpu_share']:.0%} of a CPU (at worst"
        f" {noise['cpu_share_lowest']:.0%}){spread}",
    ]


def render_experiment(
    experiment: Experiment,
    rows: Sequence[Row],
    notes: Sequence[str],
    stream: TextIO,
    environ: dict[str, str],
) -> str:
    """As wide as the stream's terminal, or WIDTH columns."""
    there = Console(file=stream)
    out = io.StringIO()
    width = there.width if there.is_terminal else WIDTH
    console = Console(file=out, width=width, force_terminal=usable(there, environ), highlight=False)
    unicode = "utf" in (stream.encoding or "utf-8").lower()
    console.print(_experiment_table(experiment, rows, box.SIMPLE_HEAD if unicode else box.ASCII))
    for note in notes:
        console.print(Text(printable(note, "")))
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _experiment_table(experiment: Experiment, rows: Sequence[Row], lines: box.Box) -> Table:
    paths = list(experiment.vary)
    names = columns_of(experiment, rows)
    table = Table(title=f"\n{experiment.name}: {experiment.doc}", box=lines, **STYLE)
    table.add_column("", no_wrap=True)
    table.add_column("side", overflow="fold")
    for path in paths:
        table.add_column(path.replace(".", ".\n"), overflow="fold")
    table.add_column("equal", no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="right", overflow="fold")
    for row in rows:
        cells = cells_of(row, paths, names, between="\n")
        table.add_row(*(Text(printable(text)) for text in cells))
    return table

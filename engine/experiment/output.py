"""An experiment's result as CSV and Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..bench.summary import csv_text
from .figures import FIGURES
from .intervals import Estimate
from .rows import Row
from .spec import Experiment


def csv_of(rows: Sequence[Row]) -> str:
    """Every figure of every row; intervals in columns of their own."""
    table = []
    for row in rows:
        line: dict[str, Any] = {"row": row.letter, "side": row.side, **row.varied}
        line |= {"reference": row.reference, "equal": row.equal}
        for name in FIGURES:
            one = row.figures.get(name, None)
            line[name] = None if one is None else one.value
            if one is not None and one.low is not None:
                line |= {f"{name}_low": one.low, f"{name}_high": one.high}
        table.append(line)
    return csv_text(table)


def cell(name: str, one: Estimate | None, between: str = " ") -> str:
    """A figure with its interval."""
    if one is None:
        return "-"
    form = FIGURES[name].form
    value = format(one.value, form)
    if one.low is None or one.high is None:
        return value
    edges = [format(edge, form) for edge in (one.low, one.high)]
    return value if set(edges) == {value} else f"{value}{between}({edges[0]} to {edges[1]})"


def columns_of(experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    """Figures that its tables show and any row has."""
    return [name for name in experiment.figures if any(name in row.figures for row in rows)]


def cells_of(row: Row, paths: Sequence[str], names: Sequence[str], between: str = " ") -> list[str]:
    """A line of a table; between: what stands between figures and their intervals."""
    own = [row.varied.get(path, "") for path in paths]
    figures = [cell(name, row.figures.get(name), between) for name in names]
    return [row.letter, row.side, *own, row.equal, *figures]


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


def page(result: Mapping[str, Any], table: str, notes: Sequence[str]) -> str:
    """The Markdown file of a result."""
    experiment = result["experiment"]
    setup = result["setup"]
    facts = [f"- {line}\n" for line in (*measured_words(result), f"command: `{setup['command']}`")]
    told = "".join(f"{note}\n" for note in notes)
    head = f"# {experiment['name']}\n\n{experiment['doc']}\n\n"
    return f"{head}{table}\n```\n{told}```\n\n{''.join(facts)}"


def measured_words(result: Mapping[str, Any]) -> list[str]:
    """On what, how often, and how quiet it was."""
    setup = result["setup"]
    noise = result["noise"]
    rounds = result["rounds"]
    machine = setup["machine"]
    versions = setup["versions"]
    graphs = [*setup["graphs"].values()]
    kinds = {name: sorted({str(one[name]) for one in graphs}) for name in ("dtype", "threads")}
    asked = setup["prompts"]["count"]
    repeats = f"{rounds // asked} repeats" if rounds >= 2 * asked else "once each"
    spread = "" if noise["spread"] is None else f"; repeats lie {noise['spread']:.0%} apart"
    quiet = "others used the machine" if noise["disturbed"] else "nobody else was seen"
    return [
        f"{asked} prompts, {repeats}: {rounds} rounds; status {result['status']}",
        f"dtype {', '.join(kinds['dtype'])}, threads {', '.join(kinds['threads'])}",
        f"{machine['processor']}, {machine['cpus']} CPUs, torch {versions['torch']}, transformers"
        f" {versions['transformers']}",
        f"{quiet}: a busy loop got {noise['cpu_share']:.0%} of a CPU (at worst"
        f" {noise['cpu_share_lowest']:.0%}){spread}",
    ]

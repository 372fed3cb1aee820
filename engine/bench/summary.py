"""A comparison as one table with a row for each graph: CSV, Markdown, plain data."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

from .equal import counts
from .gains import gains
from .report import Comparison
from .sides import Side

SHOWN = {  # columns of the Markdown table, and how their numbers are written
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


def rows_of(comparison: Comparison) -> list[dict[str, Any]]:
    """A row of figures for each graph, if any prompt was answered; the same keys in all."""
    if not comparison.prompts:
        return []
    paths = dict.fromkeys(path for side in comparison.sides for path in own_settings(side))
    return [_row(comparison, side, tuple(paths)) for side in comparison.sides]


def document(comparison: Comparison) -> dict[str, Any]:
    """Everything that came out, as plain data."""
    return {**comparison.document(), "table": rows_of(comparison)}


def own_settings(side: Side) -> dict[str, str]:
    """By path, what was set for this graph and not for all."""
    pairs = (one.partition("=") for one in side.sets)
    return {path: value for path, _, value in pairs}


def _row(comparison: Comparison, side: Side, paths: Sequence[str]) -> dict[str, Any]:
    cost = comparison.total(side)
    own = own_settings(side)
    meter = cost.meter
    pools = cost.pools.values()
    per_token = 1000 * meter.seconds / meter.tokens if meter.tokens else None
    row: dict[str, Any] = {"side": side.letter, "graph": side.title}
    row |= {path: own.get(path, "") for path in paths}
    row |= {"prompts": len(comparison.prompts), "equal": equal_branches(comparison, side)}
    row |= {"tau_step": meter.tau_step, "target_forwards": meter.forwards, "rounds": meter.rounds}
    row |= {"tokens": meter.tokens, "seconds": meter.seconds, "milliseconds_per_token": per_token}
    for name, gain in gains(comparison, side).items():
        row |= {name: gain.median, f"{name}_lowest": gain.lowest, f"{name}_highest": gain.highest}
    row["kv_peak_bytes"] = sum(pool.peak_bytes for pool in pools)
    row["kv_moved_bytes"] = sum(pool.moved_bytes.total() for pool in pools)
    return {**row, "padding_waste": meter.padding_waste}


def equal_branches(comparison: Comparison, side: Side) -> str:
    """How many branches are those of which reference; a reference itself has none."""
    for pair in comparison.pairs:
        if pair.other is side and not pair.why_not:
            number = counts(comparison.branches(pair))
            bad = "!" if number["different"] else ""
            return f"{bad}{number['equal']}/{number['branches']} ={pair.reference.letter}"
    return "-"


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
    own = names[names.index("graph") + 1 : names.index("prompts")]
    forms = {"side": "", "graph": "", **dict.fromkeys(own, ""), **SHOWN}
    cells = [[_cell(row.get(name), form) for name, form in forms.items()] for row in rows]
    lines = [[name.replace("_", " ") for name in forms], ["---"] * len(forms), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any, form: str) -> str:
    text = "" if value is None else format(value, form) if form else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def page(
    title: str, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], notes: Iterable[str]
) -> str:
    """The table with what was measured, on what."""
    told = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    lines = "".join(f"{line}\n" for line in notes)
    return f"# {title}\n\n{markdown(rows)}\n```\n{lines}```\n\n{told}"

"""`specsot runs show` on a terminal: a saved run as a page. Imports no torch, which is slow."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..record.run_folder import METRICS, OUTPUTS, SavedRun, valid
from ..shell import aligned, printable

UNITS = {  # of the figures of metrics.json that are shown; %: of a share
    "tokens": "tokens",
    "seconds.total": "s",
    "seconds.to_first_token": "s",
    "seconds.to_outline": "s",
    "tokens_per_second": "tokens/s",
    "tokens_per_target_forward": "tokens",
    "tau_step": "tokens",
    "acceptance_rate": "%",
    "kv.target.peak_slots": "slots",
    "kv.target.peak_bytes": "bytes",
    "overhead_share": "%",
}


def run_page(run: SavedRun) -> Group:
    """What a folder has of: facts, figures, states, prompts with outlines and answers; and its
    files. Raises UsageError."""
    with valid(run):
        return Group(*_parts(run))


def _parts(run: SavedRun) -> Iterator[RenderableType]:
    row = run.row
    graph = run.manifest["graph"]["resolved"]
    kinds = f"{graph['layout']['kind']} · {graph['drafter']['kind']}"
    facts = {"run": row["name"], "status": row["status"], "graph": f"{row['graph']} ({kinds})"}
    facts |= {"model": Path(row["model"]).name, "digest": row["digest"]}
    lines = aligned((name, printable(value or "", "")) for name, value in facts.items())
    yield Text("\n".join(lines) + "\n")
    if (run.path / METRICS).exists():
        yield _table(("figure", "value", "unit"), _figures(run.metrics))
        states = run.metrics["states"].items()
        rows = ((n, s["visits"], f"{s['milliseconds_per_visit']:.2f}") for n, s in states)
        yield _table(("state", "visits", "ms per visit"), rows)
    for line in run.outputs.values() if (run.path / OUTPUTS).exists() else ():
        parts = line["parts"] if line["outline"] else ()
        titles = ((p["title"], len(p["token_ids"]), p["finish_reason"]) for p in parts)
        yield Text(f"? {printable(line['question'])}\n", style="bold green")
        if parts:
            yield _table(("outline", "tokens", "end"), titles)
        yield Markdown(printable(line["text"]), hyperlinks=False)
        yield Text()
    files = sorted(file for file in run.path.iterdir() if file.is_file())
    yield _table(("file", "bytes"), ((file.name, file.stat().st_size) for file in files))


def _figures(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name, unit in UNITS.items():
        value: Any = metrics
        for key in name.split("."):
            value = (value or {}).get(key)
        if value is not None:
            yield name, 100.0 * value if unit == "%" else value, unit


def _table(heads: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Padding:
    table = Table(*heads, box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = "right"  # numbers
    for name, number, *more in rows:
        digits = ".0f" if number >= 1000 else ".4g"
        table.add_row(Text(printable(name, "")), f"{number:,{digits}}", *more)
    return Padding(table, (0, 0, 1, 0))

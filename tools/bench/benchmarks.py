"""Write docs/benchmarks.md, and its pictures, from kept results of `specsot bench`.

    specsot bench drafters --out runs/bench/drafters
    python -m tools.bench.benchmarks runs/bench/*/result.json

Each result that is named is copied into docs/benchmarks/ first, under its experiment's name, its
target's and its dtype; without any the page is written anew from what is there."""

import argparse
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specsot.engine.bench.experiment import Experiment
from specsot.engine.bench.render import draw_all, markdown, measured_words, tables_of
from specsot.engine.bench.sides import letters
from specsot.engine.shell import markdown_table

DOCS = Path(__file__).parents[2] / "docs"
KEPT, PAGE = DOCS / "benchmarks", DOCS / "benchmarks.md"
LEFT_OUT = "--out"  # of a command: where its files went
HEAD = """# Benchmarks

Every experiment that ships, and question sets, as `specsot bench` measured them
([how](cli.md#specsot-bench), [what the figures are](metrics.md)). This page is written from the
results in `docs/benchmarks/`:

<!-- not run: checkout -->
```sh
python -m tools.bench.benchmarks
```

Ratios are taken within rounds, in which every side answers the same prompt in random order. The
value is their median, with the 95 % bootstrap interval over prompts and repeats in brackets. Ratios
may differ on another machine or model, and times do. The notes below each table have the number of
repeats and the other load of the machine. With one repeat an interval shows the differences between
prompts, not those between runs.
"""

MOST_PUBLISHED = 10  # rows of a table of the papers' figures
NOTHING = "No result is kept yet.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    KEPT.mkdir(exist_ok=True)
    for file in parser.parse_args().results:
        result = json.loads(file.read_text(encoding="utf-8"))
        text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
        (KEPT / f"{_name(result)}.json").write_text(text + "\n", encoding="utf-8")
    parts = [HEAD]
    first: dict[str, str] = {}  # by experiment, the section that says what it reproduces
    results = [json.loads(file.read_text(encoding="utf-8")) for file in KEPT.glob("*.json")]
    for result in sorted(results, key=_name):
        described = first.setdefault(result["experiment"]["name"], _name(result))
        parts.append("\n".join(_section(result, described)))
    PAGE.write_text("\n".join(parts if len(parts) > 1 else [HEAD, NOTHING]), encoding="utf-8")


def _name(result: dict[str, Any]) -> str:
    """The experiment's, the target's unless that is the embedded one, and other dtypes."""
    graphs = result["setup"]["graphs"].values()
    models = {Path(one["model"]).name for one in graphs} - {"embedded"}
    dtypes = {one["dtype"] for one in graphs} - {"float32"}
    return "-".join([result["experiment"]["name"], *sorted(models), *sorted(dtypes)])


def _section(result: dict[str, Any], described: str) -> Iterator[str]:
    """described: the section with what the experiment reproduces."""
    asked = result["experiment"] | {"name": _name(result)}  # its pictures are named so
    experiment, rows = Experiment.model_validate(asked), [*result["rows"].values()]
    yield f"## {experiment.name}\n\n{experiment.doc}\n"
    if described != experiment.name:
        yield f"The papers' figures are in the section [{described}](#{described})."
    else:
        yield f"Reproduces: {experiment.reproduces}\n" if experiment.reproduces else ""
        yield from (f"- {one.source}: {one.says}" for one in experiment.reported)
    yield f"\nMeasured with `{_command(result)}`:\n"
    yield markdown(experiment, rows)
    for title, (heads, *cells) in tables_of(experiment, result) if experiment.set_of else ():
        shown = cells[:MOST_PUBLISHED] if title.startswith("published") else cells
        yield "\n".join((f"{title[0].upper()}{title[1:]}:\n", *markdown_table(heads, shown), ""))
    yield from _against(experiment, rows)
    yield from (f"- {line}" for line in measured_words(result))
    yield ""
    drawn = rows and not experiment.set_of
    for plot in draw_all(experiment, rows, KEPT) if drawn else ():
        if plot.suffix == ".svg":
            yield f"![{plot.stem}](benchmarks/{plot.name})\n"
        else:
            plot.unlink()  # pages show the SVG


def _against(experiment: Experiment, rows: list[dict[str, Any]]) -> Iterator[str]:
    """What is slower than what it is compared with, and surely so."""
    for name in experiment.figures:
        if name.startswith("speedup"):
            slow = [
                f"{letter} ({row['figures'][name][0]:.2f})"
                for letter, row in zip(letters(), rows, strict=False)
                if name in row["figures"] and (row["figures"][name][2] or 1) < 1
            ]
            if slow:
                yield f"- `{name}`, surely below 1: {', '.join(slow)}"


def _command(result: dict[str, Any]) -> str:
    words = shlex.split(result["setup"]["command"])
    kept = [
        word
        for at, word in enumerate(words)
        if word not in (LEFT_OUT, "--plot") and (at == 0 or words[at - 1] != LEFT_OUT)
    ]
    return shlex.join(kept)


if __name__ == "__main__":
    main()

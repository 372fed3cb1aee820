"""Write docs/benchmarks.md, and its pictures, from kept results of `specsot bench`.

    specsot bench drafters --out runs/bench/drafters
    python -m tools.bench.benchmarks runs/bench/*/result.json

Each result that is named is copied into docs/benchmarks/ first, under its experiment's name, its
target's and its dtype; without any the page is written anew from what is there. What an experiment
shows is read from its file in graphs/experiments/, if it ships."""

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from specsot.engine.bench.experiment import Experiment, find_experiment, read_experiment
from specsot.engine.bench.render import draw_all, measured_words, short_names, tables, tables_of
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

In a round every side answers the same prompt, in random order. A speed-up is the median ratio of
all rounds to the first side, with the 95 % bootstrap interval over prompts and repeats in brackets:
below 1 the side is slower. With one repeat an interval shows the differences between prompts, not
between runs. Other machines and models have other times, and may have other
ratios. bfloat16 with full weights does not guarantee equal tokens.

Unless a line below a table reports something else:

"""
EQUAL = "every compared branch has the tokens of its reference"
SHOWN = {"doc", "reproduces", "reported", "labels", "figures", "plots"}  # of a shipped experiment
MOST_PUBLISHED = 8  # rows of a table of the papers' figures
NOTHING = "No result is kept yet.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    KEPT.mkdir(exist_ok=True)
    for file in parser.parse_args().results:
        result = json.loads(file.read_text(encoding="utf-8"))
        text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
        (KEPT / f"{_name(result)}.json").write_text(text + "\n", encoding="utf-8")
    for picture in KEPT.glob("*.svg"):
        picture.unlink()
    PAGE.write_text(page_of(KEPT), encoding="utf-8")


def page_of(folder: Path) -> str:
    """The page of the results in the folder, where its pictures are drawn."""
    texts = (file.read_text(encoding="utf-8") for file in folder.glob("*.json"))
    results = sorted(map(json.loads, texts), key=_name)
    counts = Counter(line for result in results for line in _conditions(result))
    common = [line for line, count in counts.items() if count > len(results) / 2]
    parts = [HEAD + "".join(f"- {line}\n" for line in common)]
    first: dict[str, str] = {}  # by experiment, the section that says what it reproduces
    for result in results:
        described = first.setdefault(result["experiment"]["name"], _name(result))
        parts.append("\n".join(_section(result, described, common, folder)))
    return "\n".join(parts if results else [HEAD, NOTHING])


def _name(result: dict[str, Any]) -> str:
    """The experiment's, the target's unless that is the embedded one, and other dtypes."""
    graphs = result["setup"]["graphs"].values()
    models = {Path(one["model"]).name for one in graphs} - {"embedded"}
    dtypes = {one["dtype"] for one in graphs} - {"float32"}
    return "-".join([result["experiment"]["name"], *sorted(models), *sorted(dtypes)])


def _conditions(result: dict[str, Any]) -> list[str]:
    """How it was measured; the first line is EQUAL, or how many branches are."""
    pairs = [pair for pair in result["equality"] if pair["compared"]]
    equal, every = (sum(pair[name] for pair in pairs) for name in ("equal", "branches"))
    tokens = f"{equal} of {every} compared branches have the tokens of their reference"
    return [EQUAL if equal == every else tokens, *measured_words(result)]


def _section(
    result: dict[str, Any], described: str, common: Sequence[str], folder: Path
) -> Iterator[str]:
    """described: the section with what the experiment reproduces."""
    asked, name = result["experiment"], _name(result)
    shipped = None if "set_of" in asked else find_experiment(asked["name"])
    if shipped is not None:
        asked |= read_experiment(shipped)[0].model_dump(include=SHOWN)
    rows = [*result["rows"].values()]
    labels = short_names([row["side"] for row in rows]) | asked.get("labels", {})
    # Its pictures are named so.
    experiment = Experiment.model_validate(asked | {"name": name, "labels": labels})
    yield f"## {name}\n"
    same = f"The experiment [{described}](#{described}) with another model or dtype."
    yield f"{experiment.doc if described == name else same}\n"
    if described == name and experiment.reproduces:
        yield f"Reproduces: {experiment.reproduces}\n"
        yield "".join(f"- {one.source}: {one.says}\n" for one in experiment.reported)
    conditions = _conditions(result)
    yield f"Measured with `{_command(result)}`:\n"
    left_out: list[str] = []
    if not result["differences"]:  # the conditions have the number of equal branches
        left_out = ["equal"] if experiment.set_of else ["equal", ""]  # more tables have the letters
    for heads, cells in tables(experiment, rows):
        if heads[0] != "equal" or result["differences"]:
            yield _table(heads, cells, left_out, by_point=bool(heads[0]))
    one_category = len(rows[0]["categories"]) == 1
    for title, (top, *body) in tables_of(experiment, result) if experiment.set_of else ():
        if not (one_category and title.endswith("by category")):  # the table above has it
            yield f"{title[0].upper()}{title[1:]}:\n"
            yield _table(top, body[:MOST_PUBLISHED])
    if notes := [line for line in conditions if line not in common]:
        yield "".join(f"- {line}\n" for line in notes)
    if not experiment.set_of:
        pictures = [file for file in draw_all(experiment, rows, folder) if file.suffix == ".svg"]
        yield " ".join(f"![{file.stem}](benchmarks/{file.name})" for file in pictures) + "\n"
        for picture in pictures:
            picture.with_suffix(".png").unlink()


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    left_out: Container[str] = (),
    *,
    by_point: bool = False,
) -> str:
    """In Markdown: one row where all are equal; otherwise, unless columns are points, without the
    columns that are empty or equal in every row, whose values follow below."""
    cells = ([cell.strip("[]") for cell in row] for row in rows)
    columns = dict(zip(map(_words, heads), zip(*cells, strict=True), strict=True))
    columns = {head: column for head, column in columns.items() if head not in left_out}
    first, *others = columns
    same = {head: columns[head][0] for head in others if len({*columns[head]}) == 1 < len(rows)}
    if len(same) == len(others):
        columns = {first: ("every side",), **{head: (value,) for head, value in same.items()}}
    if by_point or len(same) == len(others):
        same = {}
    kept = {head: column for head, column in columns.items() if head not in same}
    lines = markdown_table([*kept], zip(*kept.values(), strict=True))
    facts = ", ".join(f"{head} {value}" for head, value in same.items() if value not in ("", "-"))
    return "\n".join([*lines, *(["", f"In every row: {facts}."] if facts else []), ""])


def _words(head: str) -> str:
    """A setting's path as its last name, a figure's name in words."""
    return head.rpartition(".")[2].replace("_", " ")


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

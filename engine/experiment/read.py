"""Finding and reading experiments, and what they come to: one entry for each row of the table."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ...states.graph.schema import check_mapping, validated
from ...states.yaml.source import GraphError, Problem, ProblemCode, Source, hint
from ..bench.command import read_side
from ..errors import UsageError
from ..prepare.files import FOLDER, SHIPPED, graph_names, is_graph, read_source
from .figures import FIGURES
from .peer_names import PEERS
from .spec import PARTS, Experiment

EXPERIMENTS = "experiments"
PROMPTS = {"ten": "ten.txt", "hard": "hard.txt", "documents": "documents.jsonl"}
MOST_ROWS = 256

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: a graph or a peer at one point.

    varied: by path the value as `--set` takes it. at: where the file says so, by setting; the side
    itself under the empty name.
    """

    side: str
    varied: Mapping[str, str]
    at: Mapping[str, Place]

    @property
    def graph(self) -> str:
        return read_side(self.side)[0]

    @property
    def peer(self) -> str:
        """Its name; empty for a graph."""
        return self.graph if self.graph in PEERS else ""

    @property
    def sets(self) -> tuple[str, ...]:
        """Of this row alone."""
        own = (f"{path}={value}" for path, value in self.varied.items() if path != PARTS)
        return (*read_side(self.side)[1], *own)


def experiment_names() -> list[str]:
    """Of the shipped experiments."""
    return sorted(path.stem for path in (SHIPPED / EXPERIMENTS).glob("*.yaml"))


def find_experiment(ref: str) -> Path | None:
    """The file of this name if it holds an experiment, or a shipped one."""
    own = Path(ref)
    name = ref.removeprefix(f"{FOLDER}/{EXPERIMENTS}/").removesuffix(".yaml")
    if own.is_file() and own.suffix in (".yaml", ".yml"):
        return own if _has_sides(own) else None
    return SHIPPED / EXPERIMENTS / f"{name}.yaml" if name in experiment_names() else None


def _has_sides(file: Path) -> bool:
    """Whether it was meant as one: no graph has a key `sides`."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return any(line.startswith("sides:") for line in lines)


def read_experiment(file: Path) -> tuple[Experiment, Source]:
    """A checked file.

    Raises:
        GraphError: every problem with its place.
    """
    shipped = file.is_relative_to(SHIPPED)
    source = read_source(str(file), str(file.relative_to(SHIPPED.parent)) if shipped else "")
    check_mapping(source, "experiment")
    experiment = validated(Experiment, source)
    if problems := [*_unknown(experiment, source)]:
        raise GraphError(problems)
    return experiment, source


def _unknown(experiment: Experiment, source: Source) -> Iterator[Problem]:
    """Names that mean nothing."""
    for key in ("sides", "against"):
        for at, side in enumerate(getattr(experiment, key)):
            if not known_side(side):
                name = read_side(side)[0]
                words = f"no graph {name!r}, nor a peer{hint(name, [*graph_names(), *PEERS])}"
                yield source.problem((key, at), words, ProblemCode.NO_SIDE)
    wanted: list[tuple[Place, str]] = [
        (("figures", at), name) for at, name in enumerate(experiment.figures)
    ]
    wanted += [(("plots", at, "y"), plot.y) for at, plot in enumerate(experiment.plots)]
    for place, name in wanted:
        if name not in FIGURES:
            words = f"no figure {name!r}{hint(name, FIGURES)}; there are: {', '.join(FIGURES)}"
            yield source.problem(place, words, ProblemCode.NO_FIGURE)
    for at, plot in enumerate(experiment.plots):
        if plot.x is not None and plot.x not in experiment.vary:
            words = f"{plot.x!r} does not vary{hint(plot.x, experiment.vary)}"
            yield source.problem(("plots", at, "x"), words, ProblemCode.NO_AXIS)
    for at, value in enumerate(experiment.vary.get(PARTS, ())):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64:
            words = "a number of parts is an integer from 1 to 64"
            yield source.problem(("vary", PARTS, at), words, ProblemCode.WRONG_VALUE)
    if len(entries_of(experiment)) > MOST_ROWS:
        words = f"{len(entries_of(experiment))} rows; at most {MOST_ROWS}"
        yield source.problem(("vary",), words, ProblemCode.NO_AXIS, key=True)


def known_side(side: str) -> bool:
    """Whether it is a graph or a peer."""
    name = read_side(side)[0]
    return name in PEERS or is_graph(name)


def entries_of(experiment: Experiment) -> list[Entry]:
    """All rows: those that ratios are taken to first, then side by side, point by point."""
    axes = [
        [(path, text_of(value), ("vary", path, at)) for at, value in enumerate(values)]
        for path, values in experiment.vary.items()
    ]
    rows = [Entry(side, {}, {"": ("against", n)}) for n, side in enumerate(experiment.against)]
    for number, side in enumerate(experiment.sides):
        fixed = read_side(side)[0] in PEERS
        for point in product(*([] if fixed else axes)):
            varied = {path: value for path, value, _ in point}
            at: dict[str, Place] = {path: place for path, _, place in point}
            rows.append(Entry(side, varied, {"": ("sides", number), **at}))
    return rows


def references_of(experiment: Experiment, entries: Sequence[Entry]) -> list[int]:
    """For each row the number of the one that its ratios are taken to."""
    if experiment.pairing == "first":
        return [0] * len(entries)
    first: dict[tuple[tuple[str, str], ...], int] = {}
    for number, entry in enumerate(entries):
        first.setdefault(tuple(entry.varied.items()), number)
    return [first[tuple(entry.varied.items())] for entry in entries]


def text_of(value: Any) -> str:
    """As `--set` takes it; JSON is YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def prompts_file(experiment: Experiment, source: Source | None) -> Path:
    """Raises UsageError if there is no such file."""
    if experiment.prompts in PROMPTS:
        return SHIPPED / "prompts" / PROMPTS[experiment.prompts]
    beside = Path(source.file).parent if source is not None else Path()
    for file in (beside / experiment.prompts, Path(experiment.prompts)):
        if file.is_file():
            return file
    where = f"{source.at(('prompts',))}: " if source is not None else ""
    raise UsageError(f"{where}no prompts {experiment.prompts!r}: ten, hard, documents, or a file")

"""Pictures of a result, as SVG and PNG; needs the extra `plot` (matplotlib)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .experiment import PARTS, Experiment, Plot, at_commas
from .figures import FIGURES
from .rows import Row

SIZE = (6.4, 3.8)  # inches
BAR = 0.26  # of height, at least
MANY = 6  # lines of which the names stand beside the picture, not in it
DPI = 110
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
MARKS = "osD^vP*X"
SALT = {"svg.hashsalt": "specsot", "svg.fonttype": "none"}  # the same picture is the same file
UNITS = {"ms": "milliseconds", "kv": "MB", "speedup": "times"}
AXES = {PARTS: "branches"}


def load_matplotlib() -> Any:
    """Raises UsageError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'specsot[plot]'") from None
    matplotlib.use("Agg")
    return matplotlib


def plots_of(experiment: Experiment) -> Sequence[Plot]:
    """Its own, or one of the first figure that it shows."""
    axis = next(iter(experiment.vary), None)
    return experiment.plots or (Plot(y=experiment.figures[0], x=axis),)


def draw_all(experiment: Experiment, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every plot that there are figures for; raises OSError, UsageError."""
    matplotlib = load_matplotlib()
    files = []
    with matplotlib.rc_context({**SALT, "font.size": 9, "axes.spines.right": False}):
        for plot in plots_of(experiment):
            shown = [row for row in rows if plot.y in row.figures]
            if shown:
                files += _draw(experiment, plot, shown, folder)
    return files


def _draw(experiment: Experiment, plot: Plot, rows: Sequence[Row], folder: Path) -> list[Path]:
    from matplotlib.figure import Figure

    width, height = SIZE
    if plot.x is None:
        height = max(height, 1 + BAR * len(rows))
    picture = Figure(figsize=(width, height), layout="constrained")
    axes = picture.add_subplot()
    axes.spines["top"].set_visible(False)
    if plot.x is None:
        _bars(axes, plot, rows)
    else:
        _lines(axes, plot, plot.x, rows)
    measure = UNITS.get(plot.y.partition("_")[0], "")
    axes.set_title(
        f"{experiment.name}: {plot.y.replace('_', ' ')}{f' ({measure})' if measure else ''}"
    )
    name = "-".join(filter(None, (experiment.name, plot.y, plot.x)))
    files = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
    for file in files:
        picture.savefig(file, dpi=DPI, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _bars(axes: Any, plot: Plot, rows: Sequence[Row]) -> None:
    """One for each row, the first on top; the interval is a line."""
    places = range(len(rows))
    values = [row.figures[plot.y].value for row in rows]
    axes.barh(places, values, color=COLOURS[0], height=0.6)
    axes.errorbar(values, places, xerr=_errors(plot, rows), fmt="none", ecolor="#222222", capsize=3)
    names = short_names([row.side for row in rows])
    axes.set_yticks(places, [row.label.replace(row.side, names[row.side]) for row in rows])
    axes.invert_yaxis()
    form = FIGURES[plot.y].form
    for place, row in zip(places, rows, strict=True):
        estimate = row.figures[plot.y]
        right = estimate.value if estimate.high is None else max(estimate.high, estimate.value)
        axes.annotate(
            format(estimate.value, form),
            (right, place),
            (5, 0),
            va="center",
            textcoords="offset points",
        )
    axes.margins(x=0.12)


def _lines(axes: Any, plot: Plot, path: str, rows: Sequence[Row]) -> None:
    """A line for each side and point of what else varies; a dashed one for what does not vary."""
    order = list(dict.fromkeys(row.varied[path] for row in rows if path in row.varied))
    numbers = _numbers(order)
    series = _series(rows, path)
    for number, (name, line_rows) in enumerate(series.items()):
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "label": name}
        values = [row.figures[plot.y].value for row in line_rows]
        if path not in line_rows[0].varied:
            axes.axhline(values[0], linestyle="--", linewidth=1.2, **style)
            continue
        places = [numbers[row.varied[path]] for row in line_rows]
        mark = MARKS[number % len(MARKS)]
        axes.errorbar(
            places, values, yerr=_errors(plot, line_rows), marker=mark, capsize=3, **style
        )
    axes.set_xticks([numbers[value] for value in order], order)
    axes.set_xlabel(AXES.get(path, path))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    if len(series) > MANY:
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        axes.legend(frameon=False)


def short_names(sides: Sequence[str]) -> dict[str, str]:
    """Sides without the settings that all those of their graph have, and settings by the last word
    of their paths."""
    parts = {side: side.partition("@") for side in sides}
    common = dict[str, set[str]]()
    for graph, _, text in parts.values():
        settings_of = set(at_commas(text))
        common[graph] = common[graph] & settings_of if graph in common else settings_of
    single = {graph for graph in common if sum(g == graph for g, _, _ in parts.values()) == 1}
    names = {}
    for side, (graph, at, text) in parts.items():
        varying = [
            setting
            for setting in at_commas(text)
            if graph in single or setting not in common[graph]
        ]
        settings = [setting.partition("=") for setting in varying if setting]
        words = [f"{path.rpartition('.')[2]}={value}" for path, _, value in settings]
        names[side] = graph + at + ",".join(words) if words else graph
    return names


def _series(rows: Sequence[Row], path: str) -> Mapping[str, list[Row]]:
    series: dict[str, list[Row]] = {}
    names = short_names([row.side for row in rows])
    for row in rows:
        rest = [f"{key}={value}" for key, value in row.varied.items() if key != path]
        series.setdefault(" ".join((names[row.side], *rest)), []).append(row)
    return series


def _numbers(order: Sequence[str]) -> dict[str, float]:
    """The positions of values: the numbers themselves, or their order."""
    try:
        return {value: float(value) for value in order}
    except ValueError:
        return {value: float(place) for place, value in enumerate(order)}


def _errors(plot: Plot, rows: Sequence[Row]) -> list[list[float]] | None:
    """How far intervals reach to both sides."""
    estimates = [row.figures[plot.y] for row in rows]
    if any(estimate.low is None or estimate.high is None for estimate in estimates):
        return None
    low = [max(estimate.value - (estimate.low or 0), 0) for estimate in estimates]
    return [low, [max((estimate.high or 0) - estimate.value, 0) for estimate in estimates]]

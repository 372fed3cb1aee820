"""`specsot sweep`: one graph with every combination of some settings, compared with each other."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from ..errors import UsageError
from ..prepare.options import RunOptions
from ..shell import exit_code
from .command import at_commas, measured, read_side
from .gains import best_line

MOST_POINTS = 256


@exit_code
def sweep_command(
    graph: str, vary: Sequence[str], options: RunOptions, out: Path | None = None
) -> int:
    """Compare all points of a grid and return the exit code, as `compare_command` does.

    Args:
        vary: PATH=VALUE,VALUE... for each path; the last one changes fastest.
    """
    return measured("sweep", points(graph, vary), options, out, best_line)


def points(graph: str, vary: Sequence[str]) -> list[str]:
    """The grid as sides of a comparison; its first point has the first value of every path.

    Raises:
        UsageError: a path without values, one that is given twice, or too many points.
    """
    axes: dict[str, list[str]] = {}
    for text in vary:
        path, equals, values = text.partition("=")
        if not equals or not path or not values:
            raise UsageError(f"--vary {text}: write path=value,value e.g. drafter.nodes=4,8,16")
        if path in axes:
            raise UsageError(f"--vary {text}: {path} varies already")
        axes[path] = list(dict.fromkeys(at_commas(values)))
    count = 1
    for one in axes.values():
        count *= len(one)
    if not 2 <= count <= MOST_POINTS:
        raise UsageError(f"--vary: a sweep has from 2 to {MOST_POINTS} points, not {count}")
    name, own = read_side(graph)
    grid = product(*([f"{path}={value}" for value in values] for path, values in axes.items()))
    return [f"{name}@{','.join((*own, *point))}" for point in grid]

"""`specsot replay`: a kept run on the terminal again, from its folder, without a model."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import UsageError
from ..record.kept_runs import find_run
from ..record.replay import Replay
from ..record.run_folder import LATEST
from ..shell import complain, put, user_errors
from ..terminal import usable
from ..view.keys import Keys
from ..view.player import FASTEST, SLOWEST, Player, play, replay_lines, still
from ..view.tui import frame as frame_of
from .options import RUNS_DIR, Runs, Which

MOST = 400  # columns or lines of a picture


def replay(
    run: Which = LATEST,
    speed: Annotated[
        float, typer.Option(help="1 as fast as the run was, 0.1 ten times slower.")
    ] = 1.0,
    step: Annotated[
        int | None, typer.Option(help="Print the picture after this transition (-1 the last).")
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="COLUMNSxLINES", help="Of the picture that is printed.")
    ] = "100x30",
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write that picture as SVG, print nothing.")
    ] = None,
    runs_dir: Runs = RUNS_DIR,
) -> None:
    """Watch a kept run again, forwards and back; without a terminal, its rounds as lines.

    Examples: `specsot replay`, `specsot replay latest --speed 0.1`,
    `specsot replay latest --step 20 --size 120x40 --svg picture.svg`.
    """
    with user_errors():
        if not SLOWEST <= speed <= FASTEST:
            raise UsageError(f"--speed takes {SLOWEST:g} to {FASTEST:g}")
        found = Replay(find_run(run, runs_dir))
        for one in found.lacks:
            complain(f"note: {found.run.path.name}: {one} are not in this run folder")
        if step is not None or svg is not None:
            _one(found, -1 if step is None else step, _size(size), svg)
            return
        console = Console()
        if not usable(console, dict(os.environ)):
            put("".join(f"{line}\n" for line in replay_lines(found)))
            return
        player = Player(found, speed)
        with Keys(sys.stdin) as keys:
            play(player, console, keys)
        size_now = console.size
        snap = found.snapshot(player.frame)
        console.print(
            frame_of(found.scene, snap, size_now.width, size_now.height - 1),
            height=size_now.height - 1,
        )


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,3})x(\d{1,3})", text)
    width, height = map(int, found.groups()) if found else (0, 0)
    if not (20 <= width <= MOST and 8 <= height <= MOST):
        raise UsageError(f"--size {text}: columns x lines, as in 100x30, at most {MOST} of each")
    return width, height


def _one(found: Replay, step: int, size: tuple[int, int], svg: Path | None) -> None:
    """The picture after one transition, numbered from 1 as in the trace; -1 is the last."""
    number = len(found) if step == -1 else step
    if not 1 <= number <= len(found):
        raise UsageError(f"--step {step}: the run has transitions 1 to {len(found)}")
    console = still(found, number - 1, *size)
    if svg is None:
        lines = console.export_text().splitlines()
        put("".join(f"{line.rstrip()}\n" for line in lines))
    else:
        title = f"specsot replay {found.scene.graph} --step {number}"
        svg.write_text(console.export_svg(title=title), encoding="utf-8")

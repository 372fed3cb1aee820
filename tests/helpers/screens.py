"""Pictures of the live view without a terminal."""

import io

from rich.console import Console

from specsot.engine.record.run_view import Scene, Snapshot
from specsot.engine.view.tui import frame


def screenshot(scene: Scene, snap: Snapshot, width: int, height: int) -> Console:
    """A console that has recorded one frame, for `export_text`."""
    console = Console(
        record=True, width=width, height=height, force_terminal=True, file=io.StringIO()
    )
    console.print(frame(scene, snap, width, height), height=height)
    return console

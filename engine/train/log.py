"""Progress on a terminal or as plain lines, and the log of losses."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def keep_lines(path: Path, count: int) -> None:
    """Drop what a log says behind its first ``count`` lines: steps that will be taken again."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) > count:
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"".join(lines[:count]))
        os.replace(partial, path)


class TrainingLog:
    """Writes one JSON line per report and shows the progress (0..1).

    Attributes:
        standing: shown behind the latest values until it is replaced.
    """

    def __init__(self, path: Path, title: str, every: float = 10.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.title = title
        self.every = every
        self.last = 0.0
        self.standing = ""
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"))
            self.task = self.bar.add_task(title, total=1.0, note="")

    def __enter__(self) -> TrainingLog:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()

    def report(self, done: float, **values: float) -> None:
        """Log values at this share of the work; the screen is updated now and then."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"done": round(done, 5), **values}) + "\n")
        note = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        note = f"{note} {self.standing}".rstrip()
        if self.bar:
            self.bar.update(self.task, completed=min(done, 1.0), note=note)
        elif time.monotonic() - self.last > self.every:
            self.last = time.monotonic()
            print(f"{self.title} {done:.1%} {note}", flush=True)

"""The folder that a run leaves: every file is written whole or not at all, the trace as it goes."""

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TextIO

from ..errors import UsageError

LATEST = "latest"
TRACE = "trace.jsonl"
OUTPUTS = "outputs.jsonl"
COMPACT = json.JSONEncoder(separators=(",", ":"))  # `dumps` would make a new one for each line


class RunFolder:
    """`<runs>/<utc>-<graph>-<id>/` with manifest, run.yaml, trace, outputs, metrics and summary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._trace: TextIO | None = None

    @classmethod
    def create(cls, runs: Path, graph: str) -> Self:
        """A new folder; `latest` beside it points there.

        Raises:
            UsageError: the place cannot be written to.
        """
        try:
            path = _new_folder(runs, graph)
            _point(runs / LATEST, path.name)
        except OSError as error:
            reason = error.strerror or error
            message = f"{runs}: no run folder can be made there: {reason} (see --runs-dir)"
            raise UsageError(message) from None
        return cls(path)

    @classmethod
    def at(cls, path: Path) -> Self:
        """The folder that a user named, made if it is not there.

        Raises:
            UsageError: it cannot be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{path}: no folder can be made there: {reason}") from None
        return cls(path)

    def write_text(self, name: str, text: str) -> None:
        """Atomically: a reader sees the old file or the new one."""
        final = self.path / name
        part = final.with_name(f".{name}.part")
        with part.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(final)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")

    def write_lines(self, name: str, values: Iterable[Mapping[str, Any]]) -> None:
        """JSON Lines."""
        self.write_text(name, "".join(_line(value) for value in values))

    def trace(self, record: Mapping[str, Any]) -> None:
        """Append one record to trace.jsonl."""
        if self._trace is None:
            # Not line-buffered: a system call per event would cost more than the event.
            self._trace = (self.path / TRACE).open("w", encoding="utf-8", newline="\n")
        self._trace.write(_line(record))

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()
            self._trace = None


class SparedFolder(RunFolder):
    """A folder that the work can do without: the disk may be full, the place read-only.

    Attributes:
        path: where the folder is, or would have been.
        there: whether it could be made at all.
        faults: what could not be written and why, in order.
    """

    def __init__(self, path: Path, fault: str = "") -> None:
        super().__init__(path)
        self.faults = [fault] if fault else []
        self.there = not fault
        self._lost = False  # the trace, from some record on

    @classmethod
    def create(cls, runs: Path, graph: str) -> Self:
        """A new folder as of `RunFolder`, or the fault that there is none."""
        try:
            return super().create(runs, graph)
        except UsageError as error:
            return cls(runs, str(error))

    @property
    def words(self) -> str:
        """Where the run is kept."""
        return f"run folder {self.path}" if self.there else "no run folder"

    def write_text(self, name: str, text: str) -> None:
        if self.there:
            with self._noted(name):
                super().write_text(name, text)

    def trace(self, record: Mapping[str, Any]) -> None:
        if self.there and not self._lost:
            self._lost = True
            with self._noted(TRACE):
                super().trace(record)
                self._lost = False

    def close(self) -> None:
        file = self._trace
        self._trace = None
        if file is not None:
            with suppress(OSError) if self._lost else self._noted(TRACE):
                file.close()

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.faults.append(f"{self.path / name}: {error.strerror or error}")


def _line(value: Mapping[str, Any]) -> str:
    return COMPACT.encode(value) + "\n"


def _new_folder(runs: Path, graph: str) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    while True:
        path = runs / f"{stamp}-{graph}-{secrets.token_hex(3)}"
        with suppress(FileExistsError):  # of a run of the same second
            path.mkdir()
            return path


def _point(link: Path, name: str) -> None:
    """Let the symbolic link point at `name`; where links cannot be made there is none."""
    part = link.with_name(f".{LATEST}-{name}")
    try:
        part.symlink_to(name, target_is_directory=True)
        part.replace(link)
    except OSError:
        part.unlink(missing_ok=True)

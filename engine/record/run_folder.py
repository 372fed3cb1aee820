"""Run folders: written while a run goes, listed, found, compared and removed afterwards.

Every file is written whole or not at all; trace.jsonl and outputs.jsonl grow line by line, and
outputs.jsonl is written whole at the end. The last line of a killed run can be cut."""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from ..errors import UsageError

LATEST = "latest"
MANIFEST = "manifest.json"
TRACE = "trace.jsonl"
OUTPUTS = "outputs.jsonl"
METRICS = "metrics.json"
MOST = 64 << 20  # bytes of a file that is read
MOST_LINES = 1 << 30  # of a file of lines
COMPACT = json.JSONEncoder(separators=(",", ":"))  # `dumps` would make an encoder for each line
STAMP = "%Y%m%dT%H%M%SZ"
STAMP_LENGTH = 16
NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z-.+-[0-9a-f]{6}")  # as `RunFolder.create` makes them


def write_whole(file: Path, text: str) -> None:
    """Atomically: a reader sees the old file or the new one; raises OSError."""
    part = file.with_name(f".{file.name}.part")
    with part.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


class RunFolder:
    """`<runs>/<utc>-<graph>-<id>/`: manifest, run.yaml, trace, outputs, metrics, summary. exists:
    whether it could be created. faults: files that could not be written, and why."""

    def __init__(self, path: Path, fault: str = "") -> None:
        self.path = path
        self.faults = [fault] if fault else []
        self.exists = not fault
        self._streams: dict[str, TextIO] = {}  # of the files that grow
        self._failed: set[str] = set()

    @classmethod
    def create(cls, runs: Path, graph: str) -> "RunFolder":
        """A new folder, or a fault; the link `latest` in `runs` points to it."""
        stamp = datetime.now(UTC).strftime(STAMP)
        try:
            runs.mkdir(parents=True, exist_ok=True)
            while True:
                path = runs / f"{stamp}-{graph}-{secrets.token_hex(3)}"
                with suppress(FileExistsError):  # of a run of the same second
                    path.mkdir()
                    break
            link = runs / f".{LATEST}-{path.name}"
            try:
                link.symlink_to(path.name, target_is_directory=True)
                link.replace(runs / LATEST)
            except OSError:  # not every file system has symbolic links
                link.unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror or error
            return cls(runs, f"{runs}: no run folder can be made there: {reason} (see --runs-dir)")
        return cls(path)

    @classmethod
    def at(cls, path: Path) -> "RunFolder":
        """The folder of a name that the user chose; raises UsageError if it cannot be created."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{path}: no folder can be made there: {reason}") from None
        return cls(path)

    def write_text(self, name: str, text: str) -> None:
        if self.exists:
            with self._collect_faults(name):
                write_whole(self.path / name, text)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")

    def write_lines(self, name: str, values: Iterable[Mapping[str, Any]]) -> None:
        self.write_text(name, "".join(COMPACT.encode(value) + "\n" for value in values))

    def lock(self) -> None:
        """Create outputs.jsonl, or continue it after its last whole line. This process holds its
        lock until it ends; raises UsageError if another process holds it."""
        file = self.path / OUTPUTS
        if file.exists() and not file.is_file():
            raise UsageError(f"{file}: not a regular file")
        if self.exists:
            with self._collect_faults(OUTPUTS):
                stream = self._streams[OUTPUTS] = file.open("a", encoding="utf-8", newline="\n")
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UsageError(f"{self.path}: this run is still going on") from None
                except OSError:  # the file system has no locks
                    pass
                os.truncate(file, file.read_bytes().rfind(b"\n") + 1)

    def append(self, name: str, value: Mapping[str, Any]) -> None:
        """Append a record to trace.jsonl or a finished answer to outputs.jsonl; none after a fault.
        Answers are flushed, so they survive the process; to flush trace records would cost more."""
        if not self.exists or name in self._failed:
            return
        self._failed.add(name)
        with self._collect_faults(name):
            if name not in self._streams:
                self._streams[name] = (self.path / name).open("w", encoding="utf-8", newline="\n")
            self._streams[name].write(COMPACT.encode(value) + "\n")
            if name == OUTPUTS:
                self._streams[name].flush()
            self._failed.remove(name)

    def close(self) -> None:
        for name, stream in self._streams.items():
            with suppress(OSError) if name in self._failed else self._collect_faults(name):
                stream.close()
        self._streams.clear()

    @contextmanager
    def _collect_faults(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            fault = f"{self.path / name}: {error.strerror or error}"
            self.faults += [] if fault in self.faults else [fault]


@contextmanager
def valid(*runs: "SavedRun") -> Iterator[None]:
    """Reading values of runs: raises UsageError for a value of another shape than runs have."""
    try:
        yield
    except UsageError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        paths = " or ".join(str(run.path) for run in runs)
        raise UsageError(f"{paths}: not a valid run folder: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    deep = isinstance(error, RecursionError)
    return "it is nested too deeply" if deep else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class SavedRun:
    """A run folder; its files are read on first use, errors are UsageErrors."""

    path: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return self._object(MANIFEST)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return self._object(METRICS)

    @cached_property
    def outputs(self) -> dict[str, dict[str, Any]]:
        """By request. A run that was resumed can have a second, complete line for one."""
        lines = self.lines(OUTPUTS)
        try:
            return {line["id"]: line for line in map(json.loads, lines)}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = _reason(error)
            raise UsageError(f"{self.path / OUTPUTS}: not the outputs of a run: {reason}") from None

    @property
    def row(self) -> dict[str, Any]:
        """In a list; None for values that an incomplete run lacks."""
        manifest = self.manifest
        metrics = self.metrics if (self.path / METRICS).exists() else {}
        with valid(self):
            row = {
                "name": self.path.name,
                "started": manifest.get("started"),
                "status": manifest.get("status"),
                "graph": manifest.get("graph", {}).get("name"),
                "model": manifest.get("models", {}).get("target", {}).get("name"),
                "requests": manifest.get("requests"),
                "prompt": manifest.get("prompt"),
                "tokens": metrics.get("tokens"),
                "seconds": metrics.get("seconds", {}).get("total"),
                "tau_step": metrics.get("tau_step"),
                "digest": manifest.get("digest"),
            }
            for key, value in row.items():
                kind = int | float if key in FIGURES else str
                if not isinstance(value, kind | None):
                    raise TypeError(f"{key} is a {type(value).__name__}")
        return row

    def text(self, name: str) -> str:
        """A file's text; only a regular file can be read without waiting for a writer."""
        file = self.path / name
        most = MOST_LINES if name.endswith(".jsonl") else MOST
        try:
            if not stat.S_ISREG(file.stat().st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if file.stat().st_size > most:
                raise OSError(errno.EFBIG, f"more than {most >> 20} MiB")
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{file}: cannot be read: {reason}") from None

    def lines(self, name: str) -> list[str]:
        """Without the last line of a killed run, if it is cut."""
        lines = self.text(name).split("\n")
        if not lines[-1] or self.manifest.get("status") == "running":
            lines.pop()
        return lines

    def _object(self, name: str) -> dict[str, Any]:
        text = self.text(name)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.path / name}: {_reason(error)}") from None
        if not isinstance(value, dict):
            raise UsageError(f"{self.path / name}: not of a run")
        return value


def saved_runs(runs: Path) -> list[SavedRun]:
    """The run folders of a folder, the oldest first; other entries are ignored."""
    saved = [
        SavedRun(path)
        for path in (runs.iterdir() if runs.is_dir() else ())
        if NAME.fullmatch(path.name) and not path.is_symlink() and (path / MANIFEST).exists()
    ]
    seconds = Counter(run.path.name[:STAMP_LENGTH] for run in saved)

    def start_time(run: SavedRun) -> tuple[str, str, str]:
        started = ""
        if seconds[run.path.name[:STAMP_LENGTH]] > 1:  # a manifest has microseconds
            with suppress(UsageError):
                started = str(run.manifest.get("started", ""))
        return run.path.name[:STAMP_LENGTH], started, run.path.name

    return sorted(saved, key=start_time)


def find_run(ref: str, runs: Path) -> SavedRun:
    """The run of a reference: a folder, `latest`, a graph (its newest run), or the start or the
    end of a name; raises UsageError unless `runs` has one."""
    for path in (Path(ref), runs / ref):
        if (path / MANIFEST).exists():
            return SavedRun(path.resolve() if path.name == LATEST else path)
    saved = saved_runs(runs)
    matches = [run for run in saved if f"-{ref}-" in run.path.name][-1:]
    matches = matches or [run for run in saved if run.path.name.startswith(ref)]
    matches = matches or [run for run in saved if run.path.name.endswith(ref)]
    if len(matches) != 1:
        reason = f"{len(matches)} runs match" if matches else f"no such run in {runs}"
        raise UsageError(f"{ref}: {reason}; `specsot runs list` shows them")
    return matches[0]


def removable_runs(runs: Path, keep: int | None, days: float | None) -> list[SavedRun]:
    """The runs beyond the newest `keep` that started more than `days` ago, and are not running.
    Broken ones are not among them, nor counted."""
    saved = [*readable_runs(runs)[0]]
    excess = saved if keep is None else saved[: max(len(saved) - keep, 0)]
    if days is not None:
        limit = (datetime.now(UTC) - timedelta(days=days)).strftime(STAMP)
        excess = [run for run in excess if run.path.name < limit]
    return [run for run in excess if run.manifest.get("status") != "running"]


def readable_runs(runs: Path) -> tuple[dict[SavedRun, dict[str, Any]], dict[str, str]]:
    """The rows of the runs of a folder, the oldest first; by name, why broken ones have none."""
    rows: dict[SavedRun, dict[str, Any]] = {}
    broken: dict[str, str] = {}
    for run in saved_runs(runs):
        try:
            rows[run] = run.row
        except UsageError as error:
            broken[run.path.name] = str(error)
    return rows, broken


def remove(run: SavedRun) -> int:
    """Returns its size in bytes."""
    size = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
    shutil.rmtree(run.path)
    return size


COMPARED = [
    *("tokens", "rounds", "target_forwards", "tau_step", "acceptance_rate"),
    *("tokens_per_second", "overhead_share", "padding_waste"),
]
MANIFEST_SETTINGS = ("seed", "dtype", "weights", "device", "threads", "max_new_tokens", "stop_ids")
FIGURES = ("requests", "tokens", "seconds", "tau_step")  # numbers of a row
CONTEXT_LENGTH = 32  # characters of a text before a difference and after it


def difference(run: SavedRun, other: SavedRun) -> dict[str, Any]:
    """Settings and figures with both values, and the first different token, if any."""
    rows = (run.row, other.row)
    with valid(run, other):
        first = next(_token_differences(run.outputs, other.outputs), None)
        mine, theirs = (dict(_settings(side.manifest)) for side in (run, other))
        pairs = {name: (mine.get(name), theirs.get(name)) for name in sorted({**mine, **theirs})}
        settings = {name: (a, b) for name, (a, b) in pairs.items() if a != b}
        figures = {name: (run.metrics.get(name), other.metrics.get(name)) for name in COMPARED}
    figures["seconds"] = (rows[0]["seconds"], rows[1]["seconds"])
    return {"equal": first is None, "settings": settings, "first": first, "figures": figures}


def _settings(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in manifest.get("graph", {}).get("resolved", {}).items():
        if key == "name":
            yield "graph.name", value
        elif key in ("states", "transitions", "doc"):
            yield f"graph.{key}", json.dumps(value, sort_keys=True)
        elif isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value
    for kind, model in manifest.get("models", {}).items():
        yield kind, model and model.get("hash")
    for name in MANIFEST_SETTINGS:
        yield name, manifest.get(name)
    for name, number in manifest.get("versions", {}).items():
        yield f"versions.{name}", number


def _token_differences(
    outputs: Mapping[str, Any], others: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    for key in {**outputs, **others}:
        if key not in outputs or key not in others:
            side = 1 if key in outputs else 2
            yield {"request": key, "where": "the request itself", "only_in": side}
            continue
        decoded, other = (_decoded(lines[key]) for lines in (outputs, others))
        for where in {**decoded, **other}:
            (a, text_a), (b, text_b) = (side.get(where, ([], "")) for side in (decoded, other))
            if a == b:
                continue
            at = _common_length(a, b)
            common = _common_length(text_a, text_b)
            yield {
                "request": key,
                "where": where,
                "token": at + 1,
                "ids": [ids[at] if at < len(ids) else None for ids in (a, b)],
                "before": text_a[max(common - CONTEXT_LENGTH, 0) : common],
                "texts": [text[common : common + CONTEXT_LENGTH] for text in (text_a, text_b)],
            }


def _common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    return next((n for n, (a, b) in enumerate(zip_longest(first, second)) if a != b), len(first))


def _decoded(line: Mapping[str, Any]) -> dict[str, tuple[list[int], str]]:
    parts = {f"part {part['index'] + 1}": part for part in line.get("parts", [])}
    if line.get("combined") is not None:
        parts["combined"] = line["combined"]
    texts = {where: (part["token_ids"], part["text"]) for where, part in parts.items()}
    return {"outline": (line.get("outline_token_ids", []), ""), **texts}

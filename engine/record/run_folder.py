"""Run folders: written while a run goes, listed, found, compared and removed afterwards."""

import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
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


class BestEffortRunFolder(RunFolder):
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


NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z-.+-[0-9a-f]{6}")  # as `RunFolder.create` makes them
FIGURES = [
    *("tokens", "rounds", "target_forwards", "tau_step", "acceptance_rate"),
    *("tokens_per_second", "overhead_share", "padding_waste"),
]
SHOWN = 32  # characters of a text before a difference and behind it


@dataclass(frozen=True)
class SavedRun:
    """A run folder, read when it is asked."""

    path: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return self._object("manifest.json")

    @property
    def second(self) -> str:
        """When it began, as its name says."""
        return self.path.name.partition("-")[0]

    @property
    def started(self) -> str:
        """The same to the microsecond; nothing if its manifest cannot be read."""
        try:
            return str(self.manifest.get("started", ""))
        except UsageError:
            return ""

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return self._object("metrics.json")

    @cached_property
    def outputs(self) -> dict[str, dict[str, Any]]:
        """Lines of outputs.jsonl by the requests' ids."""
        lines = self.text("outputs.jsonl").splitlines()
        try:
            return {line["id"]: line for line in map(json.loads, lines)}
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path / 'outputs.jsonl'}: no outputs of a run: {error}"
            ) from None

    @property
    def row(self) -> dict[str, Any]:
        """What a list says of it; None where it did not come so far."""
        manifest = self.manifest
        try:
            metrics = self.metrics
        except UsageError:
            metrics = {}
        return {
            "name": self.path.name,
            "started": manifest.get("started"),
            "status": manifest.get("status"),
            "graph": manifest.get("graph", {}).get("name"),
            "model": manifest.get("models", {}).get("target", {}).get("name"),
            "requests": manifest.get("requests"),
            "tokens": metrics.get("tokens"),
            "seconds": metrics.get("seconds", {}).get("total"),
            "tau_step": metrics.get("tau_step"),
            "digest": manifest.get("digest"),
        }

    def text(self, name: str) -> str:
        """A file of it; raises UsageError."""
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{self.path / name}: cannot be read: {reason}") from None

    def _object(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.text(name))
        except ValueError as error:
            raise UsageError(f"{self.path / name}: {error}") from None
        if not isinstance(value, dict):
            raise UsageError(f"{self.path / name}: not of a run")
        return value


def saved_runs(runs: Path) -> list[SavedRun]:
    """The run folders of a folder, the oldest first; others are left alone."""
    if not runs.is_dir():
        return []
    folders = (one for one in runs.iterdir() if NAME.fullmatch(one.name) and not one.is_symlink())
    found = [SavedRun(one) for one in folders if (one / "manifest.json").is_file()]
    seconds = Counter(one.second for one in found)

    def began(run: SavedRun) -> tuple[str, str, str]:
        alone = seconds[run.second] == 1  # else its manifest says when
        return run.second, "" if alone else run.started, run.path.name

    return sorted(found, key=began)


def find_run(ref: str, runs: Path) -> SavedRun:
    """A folder, `latest`, a graph for its newest run, or the beginning or the end of a name.

    Raises:
        UsageError: there is no such run under `runs`, or more than one.
    """
    for path in (Path(ref), runs / ref):
        if (path / "manifest.json").is_file():
            return SavedRun(path.resolve() if path.name == LATEST else path)
    kept = saved_runs(runs)
    names = [one for one in kept if f"-{ref}-" in one.path.name][-1:]
    names = names or [one for one in kept if one.path.name.startswith(ref)]
    names = names or [one for one in kept if one.path.name.endswith(ref)]
    if len(names) != 1:
        found = f"{len(names)} runs are called so" if names else f"no such run in {runs}"
        raise UsageError(f"{ref}: {found}; `specsot runs list` shows them")
    return names[0]


def removable_runs(runs: Path, keep: int | None, days: float | None) -> list[SavedRun]:
    """Runs beyond the newest `keep`, and those that began more than so many days ago.

    One that is still running is left.
    """
    kept = saved_runs(runs)
    limit = None
    if days is not None:
        limit = (datetime.now(UTC) - timedelta(days=days)).strftime("%Y%m%dT%H%M%SZ")
    spare = kept if keep is None else kept[: max(len(kept) - keep, 0)]
    old = [one for one in spare if limit is None or one.path.name < limit]
    return [one for one in old if one.manifest.get("status") != "running"]


def remove(run: SavedRun) -> int:
    """Delete its folder; returns the bytes that it had."""
    size = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
    shutil.rmtree(run.path)
    return size


@dataclass(frozen=True, slots=True)
class RunDifference:
    """How two runs differ.

    settings: what of graph, models and options is not the same, with both values. first: where
        tokens first differ, None if nowhere. figures: both values of each.
    """

    equal: bool
    settings: dict[str, tuple[Any, Any]]
    first: dict[str, Any] | None
    figures: dict[str, tuple[Any, Any]]


def difference(one: SavedRun, two: SavedRun) -> RunDifference:
    """Tokens request by request and part by part, settings, and figures."""
    here = dict(_settings(one.manifest))
    there = dict(_settings(two.manifest))
    unlike = {
        k: (here.get(k), there.get(k)) for k in {**here, **there} if here.get(k) != there.get(k)
    }
    first = next(_token_differences(one.outputs, two.outputs), None)
    figures = {name: (one.metrics.get(name), two.metrics.get(name)) for name in FIGURES}
    a, b = (run.metrics.get("seconds", {}).get("total") for run in (one, two))
    figures["seconds"] = a, b
    return RunDifference(first is None, dict(sorted(unlike.items())), first, figures)


def _settings(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What can change a run, by dotted names; states and transitions as a whole."""
    graph = manifest.get("graph", {}).get("resolved", {})
    for key, value in graph.items():
        if key in ("states", "transitions", "doc", "name"):
            yield f"graph.{key}", json.dumps(value, sort_keys=True) if key != "name" else value
        elif isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value
    for kind, model in manifest.get("models", {}).items():
        yield f"{kind}", model and model.get("hash")
    for name in ("seed", "dtype", "weights", "device", "threads", "max_new_tokens", "stop_ids"):
        yield name, manifest.get(name)
    yield from (
        (f"versions.{name}", number) for name, number in manifest.get("versions", {}).items()
    )


def _token_differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in {**one, **two}:
        if key not in one or key not in two:
            yield {"request": key, "where": "the request itself", "only_in": 1 if key in one else 2}
            continue
        here = dict(_written(one[key]))
        there = dict(_written(two[key]))
        for where in {**here, **there}:
            (a, text_a), (b, text_b) = (side.get(where, ([], "")) for side in (here, there))
            if a == b:
                continue
            at = _common(a, b)
            common = _common(text_a, text_b)
            yield {
                "request": key,
                "where": where,
                "token": at + 1,
                "ids": [ids[at] if at < len(ids) else None for ids in (a, b)],
                "before": text_a[max(common - SHOWN, 0) : common],
                "texts": [text[common : common + SHOWN] for text in (text_a, text_b)],
            }


def _common(one: Sequence[Any], two: Sequence[Any]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))


def _written(line: Mapping[str, Any]) -> Iterator[tuple[str, tuple[list[int], str]]]:
    """Token ids and text of everything that was decoded for a request."""
    yield "outline", (line.get("outline_token_ids", []), "")
    for part in line.get("parts", []):
        yield f"part {part['index'] + 1}", (part["token_ids"], part["text"])
    if line.get("combined") is not None:
        yield "combined", (line["combined"]["token_ids"], line["combined"]["text"])

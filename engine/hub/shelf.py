"""The folder where fetched and converted models are kept, each made once and whole."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from ..errors import UsageError

VARIABLE = "SPECSOT_CACHE"
DEFAULT = "~/.cache/specsot/models"
NOTE = "specsot.json"  # where a model comes from
WORK = ".work"  # inside a half made model: files that do not belong to it


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process has the folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model of the shelf; source: where it comes from, in words."""

    name: str
    path: Path
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Shelf:
    """A folder with a folder for each model. `org/name` lies in `org--name`; what begins with a dot
    is half made, and no model."""

    folder: Path

    @classmethod
    def of(cls, folder: Path | None = None) -> "Shelf":
        """That folder, or the one of the environment, or the default."""
        return cls(Path(folder or os.environ.get(VARIABLE) or DEFAULT).expanduser())

    def path(self, name: str) -> Path:
        """Where a model of this name lies, or would."""
        return self.folder / name.replace("/", "--")

    def has(self, name: str) -> bool:
        path = self.path(name)
        return not path.name.startswith(".") and "\0" not in name and (path / NOTE).is_file()

    def kept(self) -> Iterator[KeptModel]:
        """All models, by name."""
        for path in sorted(self.folder.glob("[!.]*")) if self.folder.is_dir() else ():
            if (path / NOTE).is_file():
                name = path.name.replace("--", "/")
                source = "?"
                with suppress(OSError, ValueError, KeyError, TypeError):
                    source = str(json.loads((path / NOTE).read_text(encoding="utf-8"))["source"])
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                yield KeptModel(name, path, size, source)

    def make(self, name: str, source: str, build: Callable[[Path], dict[str, Any] | None]) -> Path:
        """The model's folder; unless it is there, ``build`` fills one, which then gets its name.

        A build that ended early finds what it left in its folder; its WORK is for files that do not
        belong to the model. Processes that make models wait for one another.

        Args:
            build: returns more facts for the note.
        """
        final = self.path(name)
        half = self.folder / f".{self.path(name).name}.{source}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder):
                if not self.has(name):
                    (half / WORK).mkdir(parents=True, exist_ok=True)
                    facts = {"source": source, **(build(half) or {})}
                    (half / NOTE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
                    shutil.rmtree(half / WORK)
                    for file in filter(Path.is_file, half.rglob("*")):
                        file.chmod(0o644)
                    os.replace(half, final)
                shutil.rmtree(half, ignore_errors=True)
        except OSError as error:
            reason = f"no models can be kept there: {error.strerror or error}"
            raise UsageError(f"{self.folder}: {reason}; {VARIABLE} names another folder") from None
        finally:
            if half.is_dir() and not any(file.is_file() for file in half.rglob("*")):
                shutil.rmtree(half, ignore_errors=True)  # nothing in it that helps another time
        return final

    def remove(self, name: str) -> int:
        """Take a model away, and what is half made of it; returns the bytes of the model."""
        path = self.path(name)
        halves = list(self.folder.glob(f".{path.name}.*"))
        size = sum(kept.bytes for kept in self.kept() if kept.path == path)
        for one in halves:
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        if self.has(name):
            away = path.with_name(f".{path.name}.removed")
            os.replace(path, away)
            shutil.rmtree(away)
        elif not halves:
            raise UsageError(f"{name}: no such model in {self.folder}; see specsot models list")
        return size

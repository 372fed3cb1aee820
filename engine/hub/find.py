"""From what a user calls a model to its folder."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from ...models.files import ModelError
from ...models.load.checkpoint import PICKLES, WANTED, resolve
from ...models.load.convert import convert_layout, convert_pickles
from ...states.yaml.source import hint
from ..errors import UsageError
from ..terminal import working
from .known import KNOWN, shipped
from .shelf import WORK, Shelf, sha256_of

GGUF = ".gguf"


def find_model(ref: str, dtype: str = "float32") -> Path:
    """A folder, a .gguf file (converted once), a known, kept or shipped name, or a Hub id.

    Args:
        dtype: in which a .gguf file is kept: bfloat16, or else float32.

    Raises:
        ModelError, UsageError: there is no such model, or it cannot be had.
    """
    path = Path(ref).expanduser()
    shelf = Shelf.of()
    if path.suffix.lower() == GGUF or path.is_file():
        return gguf_folder(path, dtype)
    if path.is_dir():
        return path
    if shelf.has(ref):
        return shelf.path(ref)
    if (own := shipped().get(ref)) is not None:
        return own
    if ref in KNOWN:
        raise ModelError(ref, f"is not in {shelf.folder} yet: specsot models get {ref}")
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
    """The folder that is made of a GGUF file, by its content; raises ModelError, UsageError."""
    if not file.is_file():
        raise ModelError(file, "is no file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(file, "is no GGUF file; a model is a folder or a .gguf file")
    kept = "bfloat16" if dtype == "bfloat16" else "float32"
    name = f"gguf-{_digest(file, file.stat().st_mtime_ns)[:16]}-{kept}"
    shelf = Shelf.of()
    if shelf.has(name):
        return shelf.path(name)
    # Here and not above: what reads such files is not needed by those who have none.
    from ...models.load.gguf import convert_gguf

    with working(f"converting {file.name} ...") as tell:

        def build(folder: Path) -> dict[str, str]:
            convert_gguf(file, folder, getattr(torch, kept), tell)
            return {"file": file.name, "dtype": kept}

        return shelf.make(name, "gguf", build)


def convert(
    ref: str,
    out: Path | None,
    dtype: str,
    tell: Callable[[str], None],
    layout: tuple[str, str] | None = None,
) -> Path:
    """A GGUF file, or pickled weights in a folder or on the Hub, as a folder of safetensors.

    Args:
        out: the folder, which must not be there; without one it is kept on the shelf, where
            `find_model` finds it under the same ``ref``.
        layout: of a drafter, see `convert_layout`; and the target that it is for.

    Raises:
        ModelError, UsageError: what cannot be converted, and why.
    """
    path = Path(ref).expanduser()
    target = None if layout is None else find_model(layout[1])

    def build(folder: Path) -> dict[str, str]:
        if path.is_file():
            from ...models.load.gguf import convert_gguf

            convert_gguf(path, folder, getattr(torch, dtype), tell)
            return {"file": ref}
        source = path if path.is_dir() else resolve(ref, (*WANTED, *(f"*{p}" for p in PICKLES)))
        if layout is None or not list(source.glob("*.safetensors")):
            tell(f"{ref}: reading pickled weights as plain tensors")
            plain = folder if layout is None else folder / WORK
            convert_pickles(source, plain)
            source = plain
        if layout is not None and target is not None:
            named = target.name if Path(layout[1]).is_dir() else layout[1]
            convert_layout(source, target, layout[0], folder, named)
        return {"file": ref}

    if layout is not None and path.is_file():
        raise UsageError(f"{ref}: --layout is for the folder of a drafter")
    if out is None and path.is_dir():
        raise UsageError(f"{ref}: name the folder to make, OUT")
    if out is not None:
        if out.exists():
            raise UsageError(f"{out}: is there already")
        return Shelf(out.absolute().parent).make(out.name, "converted", build)
    return gguf_folder(path, dtype) if path.is_file() else Shelf.of().make(ref, "converted", build)


@cache
def _digest(file: Path, changed: int) -> str:
    return sha256_of(file)

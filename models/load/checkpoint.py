"""A checkpoint folder's weight files: listed, checked by their headers, hashed, and copied into
modules after all names, shapes and dtypes have been compared."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..config import DecoderConfig
from ..decoder import Share
from ..files import MODEL_FILES, Fields, ModelError, inside, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = {"F64", "F32", "F16", "BF16"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAX_NAMES = 8  # in one message
PIECE = 1 << 18  # values copied at once
DERIVED = ".rotary_emb.inv_freq"  # in old Llama files; follows from config.json
KINDS = {
    "target": "a language model",
    "eagle": "an EAGLE-1 or EAGLE-2 drafter",
    "eagle3": "an EAGLE-3 drafter",
    "dflash": "a DFlash drafter",
}
MAPS = {"d2t": {"I64", "I32"}, "t2d": {"BOOL"}}  # between vocabularies; all else is floats

Window = tuple[slice, ...]
"""The part of a stored tensor: of its rows, and of its columns if it has any."""

EVERYTHING = slice(None)
NO_WINDOWS: Mapping[str, Window] = {}

Built = TypeVar("Built", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor: its file, safetensors' name of its dtype, its shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


Stored = Mapping[str, StoredTensor]


def resolve(model: str | Path, patterns: Sequence[str] = MODEL_FILES) -> Path:
    """A local folder as it is; `org/name` through the Hub's cache or a download of these files.

    Raises ModelError: neither exists, or the Hub cannot be reached.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(str(model)):
        raise ModelError(folder, "is not a folder")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model), allow_patterns=list(patterns)))
    except Exception as error:  # the Hub client raises a dozen unrelated kinds
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        reason = f"is not a folder, and the model cannot be fetched from the Hub ({cause})"
        raise ModelError(str(model), reason) from None


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, in the order of their names; nothing is opened but JSON."""
    if not folder.is_dir():
        raise ModelError(folder, "is not a folder")
    if (folder / SINGLE).is_symlink() or (folder / SINGLE).exists():
        return [inside(folder, SINGLE)]
    if (folder / INDEX).exists():
        return [inside(folder, name) for name in sorted(set(_index(folder).values()))]
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise ModelError(
            folder / pickles[0],
            "pickled weights can run code and are never opened; convert them once:"
            f" specsot models convert {folder} OUT",
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

    Raises ModelError: a file is missing, truncated or no safetensors, or contradicts the index.
    """
    stored: dict[str, StoredTensor] = {}
    files = weight_files(folder)
    for path in files:
        if not path.is_file():
            raise ModelError(path, "is missing")
        header: dict[str, StoredTensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    header[name] = StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(path, f"is not a valid safetensors file: {error}") from None
        if again := sorted(header.keys() & stored.keys()):
            here = stored[again[0]].path.name
            raise ModelError(path, f"holds `{again[0]}`, and so does {here}")
        stored |= header
    for name, file in _index(folder).items() if files[0].name != SINGLE else ():
        if name not in stored or stored[name].path.name != file:
            raise ModelError(folder / INDEX, f"puts `{name}` into {file}, which does not hold it")
    return stored


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a file, on the CPU and as stored."""
    try:
        with safe_open(path, framework="pt") as file:
            value: Tensor = file.get_tensor(name)
            return value
    except (SafetensorError, OSError) as error:
        raise ModelError(path, f"cannot be read: {error}") from None


def model_hash(folder: Path) -> str:
    """sha256 over config.json and the weight files' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for path in [inside(folder, "config.json"), *weight_files(folder)]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def kind_of(stored: Stored) -> str:
    """A key of KINDS, or an empty string.

    EAGLE-3's attention reads embeddings and features: twice the width. DFlash normalises queries
    and the target's features.
    """
    joined = stored.get("fc.weight")
    first = "layers.0.self_attn.q_proj.weight"
    if joined is None:
        return "target" if f"model.{first}" in stored else ""
    if any(name.startswith("midlayer.") for name in stored):
        return "eagle3"
    if first not in stored:
        return ""
    if stored[first].shape[1:] == (2 * joined.shape[0],):
        return "eagle3"
    norms = "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"
    return "dflash" if any(name in stored for name in norms) else "eagle"


def window(name: str, config: DecoderConfig, share: Share) -> Window:
    """The part of a tensor, by its name in a Hugging Face checkpoint, that a share holds."""
    words = name.split(".")
    heads = share.kv_heads
    dim = config.head_dim
    layer = words[-2]
    kind = words[-1]
    width = dim * (config.heads // config.kv_heads)
    keys = slice(heads.start * dim, heads.stop * dim)
    queries = slice(heads.start * width, heads.stop * width)
    inner = slice(share.columns.start, share.columns.stop)
    head = slice(share.vocabulary.start, share.vocabulary.stop)
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "lm_head": head}
    rows |= {"gate_proj": inner, "up_proj": inner}
    columns = {"o_proj": queries, "down_proj": inner}
    if layer in columns and kind == "weight":
        return EVERYTHING, columns[layer]
    return (rows.get(layer, EVERYTHING),)


def on_meta(path: Path, build: Callable[[], Built]) -> Built:
    """The module without memory, for its names and shapes."""
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # torch and transformers, given sizes and settings of a file
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(path, f"describes an impossible model ({cause})") from None


def compare(folder: Path, stored: Stored, views: Mapping[str, Tensor]) -> list[str]:
    """Raise ModelError for missing, misshapen and non-float tensors; return unexpected names."""
    missing = [name for name in views if name not in stored]
    if missing:
        raise ModelError(folder, f"{len(missing)} tensors are missing: {listed(missing)}")
    for name, view in views.items():
        entry = stored[name]
        shape = tuple(view.shape)
        if entry.dtype not in MAPS.get(name, FLOATS):
            raise ModelError(entry.path, f"`{name}` is {entry.dtype}: unsupported quantisation")
        if entry.shape != shape:
            reason = f"`{name}` has shape {list(entry.shape)}, config.json makes it {list(shape)}"
            raise ModelError(entry.path, reason)
    return [n for n in stored if n not in views and not n.endswith(DERIVED)]


def materialise(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a module built on `meta` real parameters, all NaN so that an unfilled one is seen."""
    for part in module.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            if not value.is_meta:  # borrowed from the target
                continue
            empty = torch.full(value.shape, torch.nan, dtype=dtype, device=device)
            setattr(part, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def fill(
    views: Mapping[str, Tensor],
    stored: Stored,
    scan: bool = True,
    windows: Mapping[str, Window] = NO_WINDOWS,
) -> None:
    """Copy the stored tensors into the views, a few rows at a time, so that nothing is in memory
    twice.

    scan: raise ModelError for NaN and infinity in the dtype of the views.
    windows: the parts of the tensors to copy; of tensors not named, everything.
    """
    ordered = sorted(views, key=lambda name: (stored[name].path, name))
    for path, names in groupby(ordered, lambda name: stored[name].path):
        try:
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name in names:
                    if views[name].is_meta:
                        continue
                    if bad := _copy(file.get_slice(name), views[name], scan, windows.get(name, ())):
                        raise ModelError(path, f"`{name}` holds {bad} values that are not finite")
        except (SafetensorError, OSError) as error:
            raise ModelError(path, f"cannot be read: {error}") from None


def _copy(part: Any, view: Tensor, scan: bool, window: Window = ()) -> int:
    """Fill a view from a stored tensor; returns how many values a scan finds not finite."""
    step = max(1, PIECE // max(view[:1].numel(), 1))
    bad = 0
    begin = window[0].start or 0 if window else 0
    for first in range(0, len(view) if view.numel() else 0, step):
        rows = view[first : first + step]
        rows.copy_(part[(slice(begin + first, begin + first + len(rows)), *window[1:])])
        if scan and not all(value.isfinite() for value in rows.aminmax()):  # both are NaN of one
            bad += rows.numel() - int(torch.isfinite(rows).sum())
    return bad


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    rest = len(every) - MAX_NAMES
    return ", ".join(every[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")

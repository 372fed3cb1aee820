"""Pickled weights into safetensors: the one place that opens them, and only as plain tensors."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..files import ModelError, inside, read_fields
from .checkpoint import PICKLES, SINGLE

BESIDE = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")


def convert_pickles(folder: Path, out: Path) -> None:
    """Write a folder's pickled weights as safetensors into ``out``, with the files beside them.

    Objects other than tensors are refused, as they would run code.

    Raises:
        ModelError: there are none, or a file cannot be read so.
    """
    read_fields(folder)
    names = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if not names:
        raise ModelError(folder, f"holds no weights to convert ({', '.join(PICKLES)})")
    tensors: dict[str, Tensor] = {}
    for path in (inside(folder, name) for name in names):
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged or hostile pickle makes of it
            reason = str(error).strip().split("\n", 1)[0]
            raise ModelError(
                path, f"holds more than plain tensors, or is damaged: {reason}"
            ) from None
        values = stored.values() if isinstance(stored, dict) else [None]
        if not all(isinstance(value, Tensor) for value in values):
            raise ModelError(path, "is no mapping of names to tensors")
        if again := sorted(tensors.keys() & stored.keys()):
            raise ModelError(path, f"holds `{again[0]}`, and so does another file")
        tensors |= {str(name): value.clone().contiguous() for name, value in stored.items()}
    for path in sorted({one for pattern in BESIDE for one in folder.glob(pattern)}):
        if path.is_file() and not path.name.endswith(".index.json"):
            shutil.copyfile(inside(folder, path.name), out / path.name)
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})

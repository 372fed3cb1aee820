"""Changes to a checkpoint folder: keys of its config.json, tensors of its weights."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
Spoil = Callable[[Path], object]


def edit(folder: Path, **changes: object) -> None:
    """Other values in config.json; None drops a key."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def change(folder: Path, update: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the mapping of names to tensors in place."""
    tensors = load_file(folder / WEIGHTS)
    update(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)


def put(name: str, value: Tensor | Callable[[Tensor], Tensor]) -> Spoil:
    """Replace or add one tensor, or make it from the old one."""

    def update(tensors: dict[str, Tensor]) -> None:
        tensors[name] = value if isinstance(value, Tensor) else value(tensors[name])

    return lambda folder: change(folder, update)


def drop(*names: str) -> Spoil:
    return lambda folder: change(folder, lambda tensors: [tensors.pop(name) for name in names])

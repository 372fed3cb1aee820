"""Checkpoints of a training run and the export of a finished model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ...models.drafters.dflash import DFlashDraftModel
from ...models.drafters.eagle import Eagle, Eagle3

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def save_atomically(state: dict[str, object], path: Path) -> None:
    """Write a checkpoint beside its final place, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint written by ``save_atomically``."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


@contextmanager
def replace_files(out: Path) -> Iterator[Path]:
    """A folder to write into; at the end each of its files replaces the one in ``out``, whole."""
    out.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f"{out.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed here
    folder.mkdir()
    yield folder
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(path, out / path.name)
    folder.rmdir()


def export_drafter(drafter: Eagle | Eagle3 | DFlashDraftModel, out: Path) -> None:
    """Write a drafter's folder: its weights in bf16 and its config; each file is replaced whole."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else value.dtype)
        for name, value in drafter.published().items()
    }
    with replace_files(out) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(drafter.config.to_json(), folder / "config.json")


def export_beside(model: PreTrainedModel, target: Path, out: Path) -> None:
    """Write a folder in bf16 that transformers loads, with the tokenizer of another model.

    Each file is replaced whole.
    """
    with replace_files(out) as folder:
        deepcopy(model).bfloat16().save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where older readers look
        write_json(config, folder / "config.json")
        for file in TOKENIZER_FILES:
            if (target / file).is_file():
                shutil.copyfile(target / file, folder / file)


def write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

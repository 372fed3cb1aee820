"""Checkpoints of a training run and the export of a finished model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

GENERATION = {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def save_atomically(state: dict[str, object], path: Path) -> None:
    """Write a checkpoint beside its final place, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path) -> dict[str, object]:
    """A checkpoint written by ``save_atomically``."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(state, dict)
    return state


def rounded(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights in bf16, copied."""
    return {name: p.detach().to(torch.bfloat16) for name, p in model.state_dict().items()}


def export_target(model: PreTrainedModel, tokenizer: Path, out: Path) -> None:
    """Write a folder in bf16 that transformers loads; each file is replaced whole."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        copy = type(model)(model.config)
        copy.load_state_dict(rounded(model), assign=True)
        copy.tie_weights()
        copy.config.dtype = torch.bfloat16
        copy.save_pretrained(folder)
        _write_rope_theta(folder / "config.json")
        _write(folder / "generation_config.json", GENERATION)
        for file in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / file, folder / file)
        for path in folder.iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def _write_rope_theta(path: Path) -> None:
    """Repeat the rotary base at the top level, where older readers look for it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    _write(path, config)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Pickled weights become safetensors; a pickle that would run code does not."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models.tiny import write_tiny_eagle3, write_tiny_target
from safetensors.torch import load_file

from specsot.models.files import ModelError
from specsot.models.load.convert import convert_pickles
from specsot.models.load.weights import load_eagle3, load_target


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """An EAGLE-3 head as it is published: config.json and pytorch_model.bin."""
    target = write_tiny_target(tmp_path / "target")
    folder = write_tiny_eagle3(tmp_path / "head", target)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (tmp_path / "out").mkdir()
    return folder


def test_a_head_is_the_same_afterwards(head: Path, tmp_path: Path) -> None:
    target, out = load_target(tmp_path / "target"), tmp_path / "out"
    with pytest.raises(ModelError, match=rf"specsot models convert {head} OUT"):
        load_eagle3(head, target)
    convert_pickles(head, out)
    (tmp_path / "again").mkdir()
    again = write_tiny_eagle3(tmp_path / "again", tmp_path / "target")
    pairs = zip(
        load_eagle3(out, target).parameters(),
        load_eagle3(again, target).parameters(),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    assert json.loads((out / "config.json").read_text()) == (
        json.loads((head / "config.json").read_text())
    )


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"a": Evil()}, "holds more than plain tensors"),
        ([torch.zeros(2)], "is not a mapping of names to tensors"),
        ({"a": "text"}, "is not a mapping of names to tensors"),
        (None, "holds more than plain tensors, or is damaged"),
    ],
)
def test_anything_else_is_refused(
    stored: Any, says: str, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if stored is None:
        (head / "pytorch_model.bin").write_bytes(b"hello")
    else:
        torch.save(stored, head / "pytorch_model.bin")
    with pytest.raises(ModelError, match=says):
        convert_pickles(head, tmp_path / "out")
    assert not Path("ran").exists() and not list((tmp_path / "out").iterdir())


def test_a_folder_without_any(head: Path, tmp_path: Path) -> None:
    (head / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"holds no weights to convert"):
        convert_pickles(head, tmp_path / "out")

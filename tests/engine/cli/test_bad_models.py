"""Bad checkpoints from the command line: each ends in one line and code 4, or is told and works.

A fault of each kind; what the loaders find in detail: tests/models/load/ and test_config.py."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import (
    WEIGHTS,
    Spoil,
    change,
    config,
    pickled,
    put,
    write_tiny_eagle3,
    write_tiny_target,
    write_tiny_tokenizer,
)

from specsot.engine.errors import Code
from specsot.engine.models import load_models


def larger_tokenizer(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"]["a new word"] = 9999
    (folder / "tokenizer.json").write_text(json.dumps(raw))


BAD: dict[str, tuple[str, Spoil, str]] = {
    "weights": ("model", lambda f: (f / WEIGHTS).write_text(""), "not a valid safetensors"),
    "configuration": (
        "model",
        lambda f: (f / "config.json").write_text("{\n 5}"),
        "config.json: invalid JSON at line 2, column 2",
    ),
    "own code": ("model", config(auto_map={"AutoConfig": "x.Y"}), "`auto_map` .* never executed"),
    "pickle": (
        "model",
        pickled("pytorch_model.bin"),
        "pytorch_model.bin: pickled weights can run code and are never opened; .* models convert",
    ),
    "tokenizer": ("model", larger_tokenizer, "highest id is 9999, the embedding has 4096 rows"),
    "drafter of another target": (
        "drafter_model",
        config(vocab_size=5000),
        "a vocabulary of 5000, and .* has 4096",
    ),
    "drafter with another tokenizer": (
        "drafter_model",
        lambda f: write_tiny_tokenizer(f, 4096),
        r"does not exist, in the target's tokenizer it has id \d+ \(\d+ tokens differ",
    ),
}


@pytest.fixture
def spoiled(shell: Any) -> Callable[[str, Spoil], dict[str, str]]:
    def make(option: str, spoil: Spoil) -> dict[str, str]:
        folder = Path(shutil.copytree(shell.defaults[option], "copy"))
        spoil(folder)
        return {option: str(folder)}

    return make


@pytest.mark.parametrize("name", BAD)
def test_a_bad_checkpoint_ends_in_one_line(name: str, shell: Any, spoiled: Any) -> None:
    option, spoil, says = BAD[name]
    assert shell.run(quiet=True, **spoiled(option, spoil)) == Code.MODEL
    (line,) = shell.err.strip().split("\n")
    assert line.startswith("specsot: copy") and "Traceback" not in line
    assert re.search(says, line), line
    assert not Path("executed").exists()


ODD: dict[str, tuple[str, Spoil, str]] = {
    "a tensor too many": (
        "model",
        put("extra", torch.ones(2)),
        "unexpected tensors ignored: extra",
    ),
    "no theta": ("drafter_model", config(rope_theta=None), "`rope_theta` is not given: 10000"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_assumed_is_told_and_refused_if_asked(name: str, shell: Any, spoiled: Any) -> None:
    option, spoil, says = ODD[name]
    given = spoiled(option, spoil)
    assert shell.run(**given) == Code.OK, shell.err
    assert f"note: {says}" in shell.err or says in shell.err
    digest = shell.digest
    assert shell.run(**given, strict=True, quiet=True) == Code.MODEL
    (line,) = shell.err.strip().split("\n")
    assert "--strict: " in line and says in line
    assert shell.run(strict=True) == Code.OK, "nothing is assumed of the shell's own"
    assert option == "model" or shell.digest == digest


def test_the_scan_can_be_left_out(shell: Any, spoiled: Any) -> None:
    far = torch.tensor([4095])  # a token that no prompt here has
    spoil = put("model.embed_tokens.weight", lambda t: t.index_fill(0, far, float("nan")))
    given = spoiled("model", spoil)
    assert shell.run(**given) == Code.MODEL and "32 values that are not finite" in shell.err
    assert shell.run(**given, skip_scan=True) == Code.OK, shell.err


def test_ids_without_a_token_are_never_drawn(tmp_path: Path) -> None:
    """Published embeddings have more rows than the tokenizer has tokens."""
    target = write_tiny_target(tmp_path / "target", vocab=140)
    models = load_models(write_tiny_tokenizer(target), None)
    x_RH = torch.randn(400, 32)
    logits_RV = models.target.logits(x_RH)
    assert (logits_RV[:, 130:] == -torch.inf).all() and logits_RV[:, :130].isfinite().all()
    models.target.known_tokens = 140
    assert (models.target.logits(x_RH).argmax(-1) >= 130).any(), "as it would be otherwise"


def test_both_models_are_cast_to_the_runs_dtype(tmp_path: Path) -> None:
    target = write_tiny_tokenizer(write_tiny_target(tmp_path / "target"))
    drafter = write_tiny_eagle3(tmp_path / "drafter", target)
    change(target, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    for dtype in ("bfloat16", "float16", "float32"):
        models = load_models(target, drafter, dtype=dtype)
        kinds = {p.dtype for m in (models.target, models.drafter) for p in m.parameters()}
        assert kinds == {getattr(torch, dtype)}

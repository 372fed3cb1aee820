"""Bad checkpoints from the command line: each ends in one line and code 4, or is told and works.

The rows of the list of bad checkpoints that users meet. What the loaders find in detail:
tests/models/load/; a disk that is full, and trainings of other settings: tests/engine/train/.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import write_tiny_eagle3, write_tiny_target, write_tiny_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from specsot.engine.errors import Code
from specsot.engine.models import load_models

WEIGHTS = "model.safetensors"
Q0 = "model.layers.0.self_attn.q_proj.weight"
FC = "fc.weight"
Spoil = Callable[[Path], object]


def change(update: Callable[[dict[str, Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        update(tensors)
        save_file(tensors, folder / WEIGHTS)

    return spoil


def put(name: str, value: Callable[[Tensor], Tensor]) -> Spoil:
    return change(lambda tensors: tensors.update({name: value(tensors[name]).contiguous()}))


def edit(**changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        raw = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))

    return spoil


def text(name: str, content: str) -> Spoil:
    return lambda folder: (folder / name).write_text(content)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def pickled(content: Any = None) -> Spoil:
    def spoil(folder: Path) -> None:
        stored = load_file(folder / WEIGHTS) if content is None else content
        torch.save(stored, folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()

    return spoil


def index(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / WEIGHTS), name)
        (folder / WEIGHTS).rename(folder.parent / "x.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))

    return spoil


def link(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/etc/passwd")


def larger_tokenizer(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"]["a new word"] = 9999
    (folder / "tokenizer.json").write_text(json.dumps(raw))


HINT = "pytorch_model.bin: pickled weights can run code and are never opened; .* models convert"
TARGETS: dict[str, tuple[Spoil, str]] = {
    "empty": (text(WEIGHTS, ""), "not a valid safetensors"),
    "not a number": (put(Q0, lambda t: t * torch.nan), f"`{Q0}` holds .* not finite"),
    "a tensor is missing": (change(lambda t: t.pop(Q0)), f"missing: {Q0}"),
    "another shape": (put(Q0, lambda t: t.t()), "has shape .* config.json makes it"),
    "int8": (put(Q0, lambda t: t.to(torch.int8)), "I8: unsupported quantisation"),
    "more layers": (edit(num_hidden_layers=99), "is 99, the weights hold 8 layers"),
    "larger vocabulary": (edit(vocab_size=5000), r"\[4096, 32\], config.json makes it \[5000"),
    "no heads": (edit(num_attention_heads=0), "`num_attention_heads` must be a positive"),
    "negative width": (edit(hidden_size=-32), "`hidden_size` must be a positive integer"),
    "theta 0": (edit(rope_theta=0), "`rope_theta` must be positive"),
    "unknown": (edit(model_type="mamba"), "'mamba' is not supported .* never executed"),
    "own code": (edit(auto_map={"AutoConfig": "x.Y"}), "`auto_map` .* never executed"),
    "no JSON": (text("config.json", "{\n 5}"), "config.json: invalid JSON at line 2, column 2"),
    "evil pickle": (pickled({"a": Evil()}), HINT),
    "pickle": (pickled(), HINT),
    "index upwards": (index("../x.safetensors"), "not a plain file name"),
    "link": (link, "is a link that leaves its folder"),
    "larger tokenizer": (larger_tokenizer, "highest id is 9999, the embedding has 4096 rows"),
}
DRAFTERS: dict[str, tuple[Spoil, str]] = {
    "another width": (edit(target_hidden_size=48), "of width 48, and .* has 32"),
    "another vocabulary": (edit(vocab_size=5000), "a vocabulary of 5000, and .* has 4096"),
    "another number of taps": (put(FC, lambda t: t[:, :64]), "takes 64 features, .* are 96"),
    "leads outside": (put("d2t", lambda t: t + 9999), "`d2t` leads to target id"),
    "another tokenizer": (
        lambda f: write_tiny_tokenizer(f, 4096),
        r"does not exist, in the target's tokenizer it has id \d+ \(\d+ tokens differ",
    ),
}
ALL = [("model", name) for name in TARGETS] + [("drafter_model", name) for name in DRAFTERS]


@pytest.fixture
def spoiled(shell: Any) -> Callable[[str, Spoil], dict[str, str]]:
    def make(option: str, spoil: Spoil) -> dict[str, str]:
        folder = Path(shutil.copytree(shell.defaults[option], "copy"))
        spoil(folder)
        return {option: str(folder)}

    return make


@pytest.mark.parametrize(("option", "name"), ALL)
def test_a_bad_checkpoint_ends_in_one_line(
    option: str, name: str, shell: Any, spoiled: Any
) -> None:
    spoil, says = (TARGETS | DRAFTERS)[name]
    assert shell.run(quiet=True, **spoiled(option, spoil)) == Code.MODEL
    (line,) = shell.err.strip().split("\n")
    assert line.startswith("specsot: copy") and "Traceback" not in line
    assert re.search(says, line), line
    assert not Path("ran").exists()


ODD: dict[str, tuple[str, Spoil, str]] = {
    "a tensor too many": (
        "model",
        change(lambda t: t.update({"extra": torch.ones(2)})),
        "unexpected tensors ignored: extra",
    ),
    "no theta": ("drafter_model", edit(rope_theta=None), "`rope_theta` is not given: 10000"),
    "two thetas": (
        "drafter_model",
        edit(rope_theta=5.0, rope_parameters={"rope_theta": 10000.0}),
        "`rope_theta` is 5.0 at the top and 10000.0 below: 10000.0 is used",
    ),
    "40 layers": ("drafter_model", edit(num_hidden_layers=40), "and one is read"),
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
    given = spoiled("model", put("model.embed_tokens.weight", lambda t: t.index_fill(0, FAR, NAN)))
    assert shell.run(**given) == Code.MODEL and "32 values that are not finite" in shell.err
    assert shell.run(**given, skip_scan=True) == Code.OK, shell.err


FAR, NAN = torch.tensor([4095]), float("nan")  # a token that no prompt here has


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
    change(lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))(target)
    for dtype in ("bfloat16", "float16", "float32"):
        models = load_models(target, drafter, dtype=dtype)
        kinds = {p.dtype for m in (models.target, models.drafter) for p in m.parameters()}
        assert kinds == {getattr(torch, dtype)}

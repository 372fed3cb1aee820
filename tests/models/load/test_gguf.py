"""GGUF files: the same logits as the model they were made of, and one message for what is wrong."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from helpers.pooled import Pooled
from helpers.tiny_models.tiny_gguf import tiny, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from specsot.models.files import ModelError
from specsot.models.load import gguf as module
from specsot.models.load.checkpoint import model_hash
from specsot.models.load.gguf import convert_gguf
from specsot.models.load.weights import load_target

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
IDS = [7, 260, 3, 99, 4, 258, 31, 31, 200, 12, 5]


def converted(file: Path, **more: Any) -> Path:
    out = file.with_suffix("")
    out.mkdir()
    convert_gguf(file, out, **more)
    return out


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """[Q, V] of transformers."""
    logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


@torch.no_grad()
def ours(folder: Path) -> torch.Tensor:
    run = Pooled(load_target(folder), torch.arange(len(IDS)))
    logits: torch.Tensor = run.forward(torch.tensor(IDS), 0).logits_RV
    return logits


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}, tied": (family, {"tie_word_embeddings": True}) for family in FAMILIES},
    "llama 3's angles": ("llama", {"rope": LLAMA3}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_the_model_it_was_made_of(case: str, tmp_path: Path) -> None:
    family, more = CASES[case]
    model = tiny(family, **more)
    out = converted(write_gguf(tmp_path / "m.gguf", model))
    assert (ours(out) - logits_of(model)).abs().max() < 1e-4
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == family
    assert config["tie_word_embeddings"] == more.get("tie_word_embeddings", False)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.decode(tokenizer("the")["input_ids"])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "F16", "BF16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    wide = {"head_dim": 128} if family == "qwen3" else {}  # they read no other width of it
    file = write_gguf(tmp_path / "m.gguf", tiny(family, **wide), Kind[kind])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype="float32")
    assert (ours(converted(file)) - logits_of(theirs)).abs().max() < 1e-4


def test_many_files_say_the_same_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    whole = ours(converted(write_gguf(tmp_path / "whole.gguf", model)))
    monkeypatch.setattr(module, "SHARD_BYTES", 60_000)
    out = converted(write_gguf(tmp_path / "parts.gguf", model), report=lambda text: None)
    assert len(list(out.glob("*.safetensors"))) > 3 and model_hash(out)
    assert torch.equal(ours(out), whole)


def test_bfloat16_is_float32_rounded(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny("llama"), Kind.Q8_0)
    first = load_target(converted(file), torch.bfloat16)
    second = write_gguf(tmp_path / "n.gguf", tiny("llama"), Kind.Q8_0)
    other = load_target(converted(second, dtype=torch.bfloat16), torch.bfloat16)
    pairs = zip(first.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def refused(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        converted(file)
    assert str(file) in str(caught.value)
    return caught.value.reason


def test_other_families_are_named(tmp_path: Path) -> None:
    model = tiny("qwen2")
    reason = refused(write_gguf(tmp_path / "m.gguf", model, arch="gemma"))
    assert reason == "is of the family 'gemma', not one of: llama, mistral, qwen2, qwen3"


EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "experts": (lambda w: w.add_expert_count(4), "mixture of experts"),
    "half a rotation": (lambda w: w.add_rope_dimension_count(8), "`rope.dimension_count` is 8"),
    "another scaling": (
        lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
        "rope scaling 'longrope' is not supported",
    ),
    "strange tensor": (
        lambda w: w.add_tensor("blk.0.strange.weight", np.zeros(4, np.float32)),
        "unexpected tensors: blk.0.strange.weight",
    ),
    "factors of nobody": (
        lambda w: w.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32)),
        "factors that are not Llama 3's",
    ),
    "integers": (
        lambda w: w.add_tensor("blk.0.attn_norm.bias", np.zeros(64, np.int32)),
        "`blk.0.attn_norm.bias` is I32, which cannot be read",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_nothing_is_made_of_is_named(
    edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, says = EDITS[edit]
    header = gguf.GGUFWriter.write_header_to_file

    def changed(writer: Any) -> None:
        change(writer)
        header(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", changed)
    assert says in refused(write_gguf(tmp_path / "m.gguf", tiny("llama")))


def test_damaged_files_end_in_one_message(tmp_path: Path) -> None:
    """Cut anywhere, or with a byte changed in the header: refused or read, never a fault."""
    data = write_gguf(tmp_path / "whole.gguf", tiny("llama")).read_bytes()
    draw = np.random.default_rng(3)
    for turn in range(60):
        file = tmp_path / f"{turn}.gguf"
        at = int(draw.integers(0, len(data) if turn % 2 else 3000))
        bad = data[:at] if turn % 2 else data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]
        file.write_bytes(bad)
        if turn % 2:
            assert "GGUF" in refused(file)
            continue
        try:
            load_target(converted(file))
        except ModelError as error:
            assert error.reason


def test_counts_that_no_file_means_end_at_once(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    key = b"general.architecture"
    head = struct.pack("<IIQQ", 0x46554747, 3, 0, 1) + struct.pack("<Q", len(key)) + key
    file.write_bytes(head + struct.pack("<IIQ", 9, 4, 1 << 60) + bytes(5000))
    assert "an array of" in refused(file)
    file = tmp_path / "n.gguf"
    file.write_bytes(struct.pack("<IIQQ", 0x46554747, 3, 1 << 60, 1 << 60) + bytes(5000))
    assert "not a valid GGUF" in refused(file)

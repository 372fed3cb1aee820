"""Converted checkpoints: pickles, drafters in another layout, and GGUF files say what they said."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from helpers.sequences import DFLASH_GOLDEN as DFLASH
from helpers.sequences import EAGLE_GOLDEN as EAGLE
from helpers.sequences import Pooled
from helpers.tiny import (
    WEIGHTS,
    edit,
    write_tiny_dflash,
    write_tiny_eagle,
    write_tiny_eagle3,
    write_tiny_target,
)
from helpers.tiny_gguf import tiny, write_gguf
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specsot.models.files import ModelError
from specsot.models.load import convert as module
from specsot.models.load.convert import convert_gguf, convert_layout, convert_pickles
from specsot.models.load.weights import load_dflash, load_eagle3, load_target, model_hash


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
    again = load_eagle3(write_tiny_eagle3(tmp_path / "again", tmp_path / "target"), target)
    assert same(load_eagle3(out, target).state_dict(), again.state_dict())
    assert config(out) == config(head)


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


TARGET = EAGLE / "targets" / "llama"
SAFEAILAB, SPECULATORS = (EAGLE / "drafts" / f"llama_eagle3{end}" for end in ("", "_speculators"))
PAIRS = {
    "eagle3": (TARGET, SAFEAILAB, "safeailab"),
    "dflash": (DFLASH / "target", DFLASH / "draft", "z-lab"),
}


def convert(folder: Path, target: Path, layout: str, out: Path) -> Path:
    out.mkdir()
    convert_layout(folder, target, layout, out, "target")
    return out


def config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def loaded(folder: Path, kind: str, target: Path) -> Any:
    load: Any = load_eagle3 if kind == "eagle3" else load_dflash
    return load(folder, load_target(target))


def shape(folder: Path, kind: str, target: Path) -> Any:
    own = loaded(folder, kind, target).config
    return replace(own, path=Path(), speculators=False, notes=())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", PAIRS)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    target, published, own = PAIRS[kind]
    there = convert(published, target, "speculators", tmp_path / "there")
    back = convert(there, target, own, tmp_path / "back")
    assert same(load_file(published / WEIGHTS), load_file(back / WEIGHTS))
    assert config(there)["speculators_model_type"] == kind
    assert "speculators_model_type" not in config(back)
    first, *others = (loaded(folder, kind, target) for folder in (published, there, back))
    for other in others:
        assert same(first.state_dict(), other.state_dict())
        assert shape(other.config.path.parent, kind, target) == shape(published, kind, target)


def test_the_recorded_twin_is_what_conversion_makes(tmp_path: Path) -> None:
    there = convert(SAFEAILAB, TARGET, "speculators", tmp_path / "there")
    assert same(load_file(there / WEIGHTS), load_file(SPECULATORS / WEIGHTS))
    mine, recorded = config(there), config(SPECULATORS)
    layer = mine["transformer_layer_config"].keys() - recorded["transformer_layer_config"].keys()
    assert mine.keys() <= recorded.keys()
    for key in ("architectures", "draft_vocab_size", "target_hidden_size", "norm_output"):
        assert mine[key] == recorded[key]
    assert mine["speculators_config"].keys() == recorded["speculators_config"].keys()
    ours, theirs = (one["speculators_config"]["proposal_methods"] for one in (mine, recorded))
    assert ours == theirs
    assert layer == {"tie_word_embeddings"}


def test_copies_of_the_targets_ends_are_made_and_dropped(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", layers=7)
    draft = write_tiny_dflash(tmp_path / "draft", target, window=16)
    there = convert(draft, target, "speculators", tmp_path / "there")
    ends = load_file(there / WEIGHTS).keys() - load_file(draft / WEIGHTS).keys()
    assert ends == {"embed_tokens.weight", "lm_head.weight"}
    assert config(there)["aux_hidden_state_layer_ids"] == [1, 4]
    assert config(there)["sliding_window_non_causal"] is False
    back = convert(there, target, "z-lab", tmp_path / "back")
    assert config(back) == config(draft)


def test_angles_and_taps_are_carried(tmp_path: Path) -> None:
    draft = Path(shutil.copytree(SAFEAILAB, tmp_path / "draft"))
    scaling = {"rope_type": "linear", "factor": 2.0}
    edit(draft, rope_scaling=scaling, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 5]})
    there = convert(draft, TARGET, "speculators", tmp_path / "there")
    assert config(there)["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert config(there)["transformer_layer_config"]["rope_scaling"] == scaling
    back = convert(there, TARGET, "safeailab", tmp_path / "back")
    assert shape(back, "eagle3", TARGET) == shape(draft, "eagle3", TARGET)


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    switched = Path(shutil.copytree(SPECULATORS, tmp_path / "on"))
    edit(switched, norm_before_residual=True)
    causal = Path(shutil.copytree(DFLASH / "draft", tmp_path / "causal"))
    edit(causal, is_causal=True)
    target = write_tiny_target(tmp_path / "tiny", layers=7)
    for folder, goal, layout, says in [
        (switched, TARGET, "safeailab", r"in the layout 'safeailab': norm_before_residual$"),
        (causal, DFLASH / "target", "speculators", "'speculators': full layers that are causal"),
        (SAFEAILAB, TARGET, "safeailab", "has the layout 'safeailab' already"),
        (SPECULATORS, TARGET, "speculators", "has the layout 'speculators' already"),
        (SAFEAILAB, TARGET, "z-lab", "is an EAGLE-3 drafter, which has no layout 'z-lab'"),
        (write_tiny_eagle(tmp_path / "e", target), target, "speculators", "EAGLE-2 drafter, which"),
        (TARGET, TARGET, "speculators", "is a language model, which has no layout"),
        (SAFEAILAB, target, "speculators", "drafts for another target: a vocabulary of 128"),
    ]:
        with pytest.raises(ModelError, match=says) as caught:
            convert_layout(folder, goal, layout, tmp_path, "target")
        assert not (tmp_path / WEIGHTS).exists() and str(folder) in str(caught.value)


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
def logits_of(model: Any) -> Tensor:
    """[Q, V] of transformers."""
    logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def ours(folder: Path) -> Tensor:
    run = Pooled(load_target(folder), torch.arange(len(IDS)))
    return run.forward(torch.tensor(IDS), 0).logits_RV


LINEAR = {"rope_type": "linear", "factor": 2.0}
DEEP = {"num_hidden_layers": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONGROPE = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 32,
}
GEMMA = {**DEEP, "query_pre_attn_scalar": 16, "sliding_window": 4, "hidden_size": 48}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {**GEMMA, "tie_word_embeddings": True}),
    "gemma3, linear": ("gemma3_text", {**GEMMA, "tie_word_embeddings": True, "rope": LINEAR}),
    "phi3": ("phi3", {"sliding_window": 4}),
    "phi 4 mini": ("phi3", {"rope": LONGROPE, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "smollm3": ("smollm3", {**DEEP, "tie_word_embeddings": True}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **OTHERS,
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
    model.save_pretrained(tmp_path / "published")
    published, read = (load_file(each / WEIGHTS) for each in (tmp_path / "published", out))
    assert published.keys() == read.keys()
    for name, values in published.items():  # norms that were written with 1 added are rounded
        assert torch.allclose(read[name], values, rtol=0, atol=2e-7), name
    again: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert (logits_of(again) - logits_of(model)).abs().max() < 1e-4
    assert config(out)["model_type"] == family
    assert config(out)["tie_word_embeddings"] == more.get("tie_word_embeddings", False)
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
    assert same(first.state_dict(), other.state_dict())


def refused(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        converted(file)
    assert str(file) in str(caught.value)
    return caught.value.reason


def test_other_families_are_named(tmp_path: Path) -> None:
    model = tiny("qwen2")
    reason = refused(write_gguf(tmp_path / "m.gguf", model, arch="gemma"))
    known = "gemma3, llama, olmo2, phi3, qwen2, qwen3, qwen3moe, smollm3"
    assert reason == f"is of the architecture 'gemma', not one of: {known}"


EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "experts": (lambda w: w.add_expert_count(4), "`expert_count` of the architecture llama"),
    "capped logits": (
        lambda w: w.add_final_logit_softcapping(30.0),
        "`final_logit_softcapping` of the architecture llama is not supported",
    ),
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
        lambda w: setattr(w.tensors[0]["blk.0.attn_norm.weight"], "dtype", Kind.I32),
        "`blk.0.attn_norm.weight` is I32, which cannot be read",
    ),
    "a bias of a norm": (
        lambda w: w.add_tensor("blk.0.attn_norm.bias", np.zeros(64, np.float32)),
        "unexpected tensors: blk.0.attn_norm.bias",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_unknown_parts_are_named(
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

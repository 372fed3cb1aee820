"""Medusa's heads against the published arithmetic in plain torch, and how their files are read."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers.tiny import Spoil, config, drop, write_tiny_medusa, write_tiny_target
from safetensors.torch import load_file, save_file
from torch import nn

from specsot.models.files import ModelError
from specsot.models.load.convert import convert_pickles
from specsot.models.load.inspect import inspect_model
from specsot.models.load.weights import load_medusa, load_target


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A target, and heads as published: `medusa_lm_head.pt`, converted once."""
    target = write_tiny_target(tmp_path / "target")
    made = write_tiny_medusa(tmp_path / "made", target, heads=5, blocks=2)
    (tmp_path / "published").mkdir()
    torch.save(load_file(made / "model.safetensors"), tmp_path / "published/medusa_lm_head.pt")
    told = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "a/b"}
    (tmp_path / "published/config.json").write_text(json.dumps(told))
    (tmp_path / "heads").mkdir()
    convert_pickles(tmp_path / "published", tmp_path / "heads")
    return target, tmp_path / "heads"


@torch.inference_mode()
def test_heads_compute_what_the_published_ones_do(folders: tuple[Path, Path]) -> None:
    target = load_target(folders[0])
    drafter = load_medusa(folders[1], target)
    hidden_RH = torch.randn(4, target.hidden_size, generator=torch.Generator().manual_seed(1))
    logits_RDV = drafter(hidden_RH)
    tensors = load_file(folders[1] / "model.safetensors")
    assert logits_RDV.shape == (4, 5, target.vocab_size) and drafter.tap_ids == (8,)
    for head in range(5):
        x_RH = hidden_RH
        for block in range(2):
            name = f"{head}.{block}.linear"
            inner = nn.functional.linear(x_RH, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
            x_RH = x_RH + inner * torch.sigmoid(inner)
        expected_RV = x_RH @ tensors[f"{head}.2.weight"].t()
        assert torch.allclose(logits_RDV[:, head], expected_RV, atol=1e-5)


NAMES = {
    "vLLM": {r"(\d)\.(\d)\.linear": r"blocks.\1.layers.\2", r"^(\d)\.2\.": r"lm_heads.\1."},
    "vLLM, a prefix": {
        r"^(\d)\.2\.": r"medusa_heads.lm_heads.\1.",
        r"^(\d)\.(\d)\.linear": r"medusa_heads.blocks.\1.layers.\2",
    },
    "a whole model's": {r"^": "medusa_head."},
}


@torch.inference_mode()
@pytest.mark.parametrize("layout", NAMES)
def test_other_layouts_are_the_same_heads(layout: str, folders: tuple[Path, Path]) -> None:
    target = load_target(folders[0])
    hidden_RH = torch.randn(4, target.hidden_size, generator=torch.Generator().manual_seed(1))
    expected_RDV = load_medusa(folders[1], target)(hidden_RH)
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    for pattern, name in NAMES[layout].items():
        tensors = {re.sub(pattern, name, key): value for key, value in tensors.items()}
    save_file(tensors, folders[1] / "medusa_lm_head.safetensors")
    file.unlink()
    config(num_heads=5, num_hidden_layers=2, medusa_fc_bias=True, medusa_num_heads=5)(folders[1])
    drafter = load_medusa(folders[1], target)
    assert torch.equal(drafter(hidden_RH), expected_RDV)
    assert set(drafter.published()) == set(tensors) and not drafter.notes
    seen = inspect_model(folders[1])
    assert seen.kind == "drafter" and seen.facts["heads"] == "5, 2 blocks each"
    assert seen.facts["layout"] == ("vLLM" if "vLLM" in layout else "FasterDecoding")
    assert not seen.problems


@torch.inference_mode()
def test_vllms_heads_share_a_product_and_draft_some_tokens(folders: tuple[Path, Path]) -> None:
    target = load_target(folders[0])
    draw = torch.Generator().manual_seed(2)
    size, ids_D = target.hidden_size, torch.tensor([3, 0, 77, 128])
    blocks = {
        f"blocks.{h}.layers.0.weight": torch.randn(size, size, generator=draw) for h in (0, 1)
    }
    last_DH = torch.randn(4, size, generator=draw)
    made = folders[0].parent / "vllm"
    made.mkdir()
    tensors = {**blocks, "lm_heads.0.weight": last_DH, "token_map": ids_D}
    save_file(tensors, made / "model.safetensors")
    told = {"num_heads": 2, "num_hidden_layers": 1, "original_lm_head": True}
    told |= {"truncated_vocab_size": 4, "vocab_size": target.vocab_size}
    (made / "config.json").write_text(json.dumps(told))
    drafter = load_medusa(made, target)
    hidden_RH = torch.randn(3, size, generator=draw)
    logits_RDV = drafter(hidden_RH)
    assert logits_RDV.shape == (3, 2, target.vocab_size)
    for head in (0, 1):
        inner = nn.functional.linear(hidden_RH, blocks[f"blocks.{head}.layers.0.weight"])
        expected_RD = (hidden_RH + nn.functional.silu(inner)) @ last_DH.t()
        assert torch.allclose(logits_RDV[:, head, ids_D], expected_RD, atol=1e-4)
    assert int(logits_RDV.isfinite().sum()) == 3 * 2 * 4
    assert not inspect_model(made).problems
    # With a product over all tokens the map is not needed.
    own = {f"lm_heads.{head}.weight": target.lm_head.weight.clone() for head in (0, 1)}
    save_file({**blocks, **own, "token_map": ids_D}, made / "model.safetensors")
    assert load_medusa(made, target)(hidden_RH).isfinite().all()
    save_file({**tensors, "token_map": ids_D + 9}, made / "model.safetensors")
    with pytest.raises(ModelError, match="`token_map` leads out of the vocabulary of 130"):
        load_medusa(made, target)


def test_heads_without_a_product_have_the_targets(folders: tuple[Path, Path]) -> None:
    target = load_target(folders[0])
    drop("1.2.weight")(folders[1])
    drafter = load_medusa(folders[1], target)
    assert drafter.borrowed == {"1.2.weight"} and "1.2.weight" not in drafter.published()
    assert drafter.heads[1][2].weight is target.lm_head.weight
    assert drafter.heads[0][2].weight is not target.lm_head.weight


def test_what_is_told_of_a_folder(folders: tuple[Path, Path]) -> None:
    seen = inspect_model(folders[1])
    assert (seen.kind, seen.family, seen.kinds) == ("drafter", "medusa", ("medusa",))
    assert seen.facts["layout"] == "FasterDecoding" and not seen.problems
    assert seen.facts["heads"] == "5, 2 blocks each"
    assert seen.assumed == ("`medusa_num_heads` is 2: the file holds 5 heads, and all are read",)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (drop("3.1.linear.bias"), r"1 tensor is missing: 3\.1\.linear\.bias"),
        (config(hidden_size=64), r"drafts for another target: `hidden_size` is 64"),
        (config(medusa_num_heads=True), r"`medusa_num_heads` must be a positive integer"),
        (drop("0.0.linear.weight"), r"1 tensor is missing: 0\.0\.linear\.weight"),
    ],
)
def test_what_is_refused(spoil: Spoil, says: str, folders: tuple[Path, Path]) -> None:
    spoil(folders[1])
    with pytest.raises(ModelError, match=says):
        load_medusa(folders[1], load_target(folders[0]))

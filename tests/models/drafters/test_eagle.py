"""Checkpoints of EAGLE-1 and EAGLE-2; those that are refused: load/test_bad_drafters.py."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.sequences import EAGLE_GOLDEN, causal, pool
from helpers.tiny import WEIGHTS, drop, edit, put, write_tiny_eagle, write_tiny_target
from safetensors.torch import load_file

from specsot.models.decoder import Decoder
from specsot.models.drafters.eagle import Eagle
from specsot.models.load.weights import load_eagle, load_target, model_hash
from specsot.ops.forward import HiddenDrafter

DRAFT = EAGLE_GOLDEN / "drafts" / "llama_eagle2"


@pytest.fixture(scope="module")
def target() -> Decoder:
    return load_target(EAGLE_GOLDEN / "targets" / "llama")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DRAFT, tmp_path / "draft"))


def test_every_parameter_is_filled_and_the_head_is_the_targets(target: Decoder) -> None:
    drafter: Eagle = load_eagle(DRAFT, target)
    protocol: HiddenDrafter = drafter
    assert protocol.tap_ids == (target.num_layers,), "the last hidden state, behind its norm"
    stored = load_file(DRAFT / WEIGHTS)
    assert {n: tuple(v.shape) for n, v in drafter.published().items()} == {
        n: tuple(v.shape) for n, v in stored.items()
    }
    assert all(torch.equal(value, stored[name]) for name, value in drafter.published().items())
    assert drafter.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    for name, value in drafter.named_parameters():
        assert value.isfinite().all() and not value.requires_grad, name


def test_the_ends_are_the_targets_unless_the_file_has_them(draft: Path, target: Decoder) -> None:
    drop("embed_tokens.weight")(draft)
    lent = load_eagle(draft, target)
    assert lent.embed_tokens.weight.data_ptr() == target.embed.data_ptr()
    assert not {"embed_tokens.weight", "lm_head.weight"} & lent.published().keys()
    put("lm_head.weight", 2 * target.lm_head.weight.detach())(draft)
    own = load_eagle(draft, target)
    assert torch.equal(own.lm_head.weight, 2 * target.lm_head.weight)
    assert "lm_head.weight" in own.published()


def test_a_silent_file_is_taken_as_the_reference_takes_it(draft: Path, target: Decoder) -> None:
    """KV heads as many as heads, a bias, angles of base 10000 whatever the target's base is."""
    edit(draft, num_key_value_heads=None, max_position_embeddings=None, max_sequence_length=77)
    config = load_eagle(draft, target).config
    assert (config.kv_heads, config.fc_bias, config.qkv_bias) == (4, True, False)
    assert (config.rope.theta, config.rope.trained) == (10000.0, 77)


def test_predictions_are_the_recorded_ones_in_every_precision(target: Decoder) -> None:
    at = load_file(EAGLE_GOLDEN / "e2_llama" / "first_round.safetensors")
    rows = len(at["prompt_ids"])
    slots = torch.arange(rows)[None]
    for dtype, limit in ((torch.float64, 1e-4), (torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        drafter = load_eagle(DRAFT, load_target(EAGLE_GOLDEN / "targets" / "llama", dtype), dtype)
        kv, hidden = pool(drafter, rows, dtype), drafter.fuse(at["draft.in_hidden"])
        with torch.inference_mode():
            ids = at["draft.in_ids"].long()[None]
            out = drafter(ids, hidden[None], slots, slots, causal(rows), kv)[0]
            logits = drafter.logits(out)
        assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (out.float() - at["root.out_hidden"]).abs().max() < limit
        guess = logits[-1].float().log_softmax(-1)
        assert (guess - at["root.logprobs"]).abs().max() < 10 * limit


@pytest.mark.parametrize("biased", [True, False])
def test_what_is_written_can_be_read_and_is_repeatable(biased: bool, tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "target")
    folders = [
        write_tiny_eagle(tmp_path / name, tmp_path / "target", 3, fc_bias=biased, qkv_bias=biased)
        for name in ("a", "b")
    ]
    assert len({model_hash(folder) for folder in folders}) == 1
    config = load_eagle(folders[0], load_target(tmp_path / "target")).config
    assert (config.fc_bias, config.qkv_bias) == (biased, biased)
    names = load_file(folders[0] / WEIGHTS).keys()
    assert ("fc.bias" in names) == ("layers.0.self_attn.k_proj.bias" in names) == biased
    assert "layers.0.self_attn.o_proj.bias" not in names

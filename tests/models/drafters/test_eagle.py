"""EAGLE's drafters against vectors of the reference code and of speculators, and what is read from
their files; those that are refused: load/test_bad_checkpoints.py; trees and rounds: runs/."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.sequences import EAGLE_GOLDEN, Pooled, causal, pool
from helpers.tiny import WEIGHTS, drop, edit, put, write_tiny_eagle, write_tiny_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.models.drafters.eagle import Eagle, Eagle3
from specsot.models.files import ModelError
from specsot.models.load.weights import load_eagle, load_eagle3, load_target, model_hash
from specsot.ops.attention.backends import AttentionPlan

LIMIT = 1e-4
TARGET = EAGLE_GOLDEN / "targets" / "llama"
EAGLE2, EAGLE3, SPECULATORS = (
    EAGLE_GOLDEN / "drafts" / f"llama_{name}" for name in ("eagle2", "eagle3", "eagle3_speculators")
)
FIRST = {"eagle2": "e2_llama", "eagle3": "e3_llama"}


@pytest.fixture(scope="module")
def target() -> Decoder:
    return load_target(TARGET)


def copied(draft: Path, folder: Path) -> Path:
    return Path(shutil.copytree(draft, folder / "draft"))


def first_round(case: str) -> dict[str, Tensor]:
    return load_file(EAGLE_GOLDEN / case / "first_round.safetensors")


def prefill(drafter: Eagle | Eagle3, ids_Q: Tensor, taps_QF: Tensor) -> Tensor:
    """Rows at slots and positions from 0 on -> the next features [Q, H]."""
    slots = torch.arange(len(ids_Q))[None]
    with torch.inference_mode():
        hidden, kv = drafter.fuse(taps_QF), pool(drafter, len(ids_Q), drafter.dtype)
        return drafter(ids_Q.long()[None], hidden[None], slots, slots, causal(len(ids_Q)), kv)[0]


@pytest.mark.parametrize("case", ["e3_llama", "e3_qwen3"])
def test_prefill_of_the_target(case: str) -> None:
    at, name = first_round(case), case.removeprefix("e3_")
    model = load_target(EAGLE_GOLDEN / "targets" / name)
    taps = load_eagle3(EAGLE_GOLDEN / "drafts" / f"{name}_eagle3", model).tap_ids
    out = Pooled(model, torch.arange(len(at["prompt_ids"]))).forward(
        at["prompt_ids"].long(), 0, taps
    )
    assert (out.logits_RV - at["target.prefill_logits"]).abs().max() <= LIMIT
    assert out.taps_QF is not None
    assert (out.taps_QF - at["target.prefill_aux_hidden"]).abs().max() <= LIMIT


@pytest.mark.parametrize("kind", FIRST)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, LIMIT), (torch.float32, LIMIT), (torch.bfloat16, 0.1)]
)
def test_predictions_are_the_recorded_ones_in_every_precision(
    kind: str, dtype: torch.dtype, limit: float
) -> None:
    at, load = first_round(FIRST[kind]), load_eagle if kind == "eagle2" else load_eagle3
    drafter = load(EAGLE_GOLDEN / "drafts" / f"llama_{kind}", load_target(TARGET, dtype), dtype)
    out = prefill(drafter, at["draft.in_ids"], at["draft.in_hidden"])
    with torch.inference_mode():
        logits = drafter.logits(out)
    assert out.dtype == dtype
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (out.float() - at["root.out_hidden"]).abs().max() < limit
    guess = logits[-1].float().log_softmax(-1)
    assert (guess - at["root.logprobs"]).abs().max() < 10 * limit


# -- EAGLE-1 and EAGLE-2


def test_every_parameter_is_filled_and_the_head_is_the_targets(target: Decoder) -> None:
    drafter: Eagle = load_eagle(EAGLE2, target)
    assert drafter.tap_ids == (target.num_layers,), "the last hidden state, behind its norm"
    stored, published = load_file(EAGLE2 / WEIGHTS), drafter.published()
    assert stored.keys() == published.keys()
    assert all(torch.equal(value, stored[name]) for name, value in published.items())
    assert drafter.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    for name, value in drafter.named_parameters():
        assert value.isfinite().all() and not value.requires_grad, name


def test_the_ends_are_the_targets_unless_the_file_has_them(target: Decoder, tmp_path: Path) -> None:
    draft = copied(EAGLE2, tmp_path)
    drop("embed_tokens.weight")(draft)
    lent = load_eagle(draft, target)
    assert lent.embed_tokens.weight.data_ptr() == target.embed.data_ptr()
    assert not {"embed_tokens.weight", "lm_head.weight"} & lent.published().keys()
    put("lm_head.weight", 2 * target.lm_head.weight.detach())(draft)
    own = load_eagle(draft, target)
    assert torch.equal(own.lm_head.weight, 2 * target.lm_head.weight)
    assert "lm_head.weight" in own.published()


def test_a_silent_file_is_taken_as_the_reference_takes_it(target: Decoder, tmp_path: Path) -> None:
    """KV heads as many as heads, a bias, angles of base 10000 whatever the target's base is."""
    draft = copied(EAGLE2, tmp_path)
    edit(draft, num_key_value_heads=None, max_position_embeddings=None, max_sequence_length=77)
    config = load_eagle(draft, target).config
    assert (config.kv_heads, config.fc_bias, config.qkv_bias) == (4, True, False)
    assert (config.rope.theta, config.rope.trained) == (10000.0, 77)


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


# -- EAGLE-3


def test_both_layouts_of_one_drafter_give_the_same_output(target: Decoder) -> None:
    at, eagle = first_round("e3_llama"), load_eagle3(EAGLE3, target)
    other = load_eagle3(SPECULATORS, target)
    outs = [prefill(one, at["draft.in_ids"], at["draft.in_hidden"]) for one in (eagle, other)]
    assert torch.equal(*outs) and torch.equal(eagle.d2t, other.d2t)
    assert set(other.published()) == set(load_file(SPECULATORS / WEIGHTS))


VARIANTS: dict[str, dict[str, object]] = {
    "default": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all31": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
}


def variant(folder: Path, name: str) -> Path:
    folder = copied(SPECULATORS, folder)
    extra, weights = load_file(folder / "norm_variants.safetensors"), load_file(folder / WEIGHTS)
    wanted = {"norm_before_fc": "input_norm", "fc_norm": "fc_norm.", "all31": "fc_norm."}
    if prefix := wanted.get(name):
        weights |= {k: v for k, v in extra.items() if k.startswith(prefix) and k.endswith("weight")}
    save_file(weights, folder / WEIGHTS)
    edit(folder, **VARIANTS[name])
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_switches_of_speculators(name: str, target: Decoder, tmp_path: Path) -> None:
    """Step 0 is a causal forward; step 1 feeds its output back, one position on: a row sees the
    step-0 keys of its own and earlier rows and its own new key."""
    at = load_file(SPECULATORS / "norm_variants.safetensors")
    drafter = load_eagle3(variant(tmp_path, name), target)
    kv, ids, rows = pool(drafter, 2 * len(at["in_ids"])), at["in_ids"].long(), len(at["in_ids"])
    layer_outs: list[Tensor] = []
    drafter.midlayer.register_forward_hook(lambda module, given, out: layer_outs.append(out))
    history, own = torch.ones(rows, rows).tril().bool(), torch.eye(rows).bool()
    again = AttentionPlan.dense(torch.cat((history, own), 1)[None], torch.zeros(1, 2 * rows).long())
    hidden, places = drafter.fuse(at["in_aux_hidden"]), torch.arange(2 * rows)[None]
    steps = [
        (ids, places[:, :rows], places[:, :rows], causal(rows)),
        (F.pad(ids[1:], (0, 1)), places[:, 1 : rows + 1], places[:, rows:], again),
    ]
    for step, (tokens, positions, slots, visible) in enumerate(steps):
        with torch.inference_mode():
            hidden = drafter(tokens[None], hidden[None], positions, slots, visible, kv)[0]
        expected = at[f"{name}.step{step}.layer_out"]
        assert (layer_outs[step] - expected).abs().max() <= LIMIT
        expected = at[f"{name}.step{step}.logits"]
        assert (drafter.logits(hidden) - expected).abs().max() <= LIMIT


def test_what_a_silent_or_ambiguous_file_is_taken_to_mean(target: Decoder, tmp_path: Path) -> None:
    folder = variant(tmp_path / "silent", "default")
    edit(folder, norm_before_residual=None)
    drafter = load_eagle3(folder, target)
    assert drafter.config.norm_before_residual and "norm_before_residual" in drafter.notes[0]
    other = copied(EAGLE3, tmp_path / "specforge")
    edit(other, norm_output=True)
    drafter = load_eagle3(other, target)
    assert not drafter.config.norm_output and "norm_output" in drafter.notes[0]


def test_a_config_of_forty_layers_over_the_tensors_of_one(target: Decoder, tmp_path: Path) -> None:
    """Communities copy a target's config.json and change what their loader looks at."""
    folder = copied(EAGLE3, tmp_path)
    plain = load_eagle3(folder, target)
    edit(folder, num_hidden_layers=40, architectures=["Odd"], rope_theta=10000.0)
    odd = load_eagle3(folder, target)
    (note,) = odd.notes
    assert note.startswith("`num_hidden_layers` is 40: EAGLE-3 drafters have one layer")
    assert replace(odd.config, path=plain.config.path, notes=plain.notes) == plain.config


def test_where_tap_ids_come_from(target: Decoder, tmp_path: Path) -> None:
    folder, key = copied(EAGLE3, tmp_path), "eagle_aux_hidden_state_layer_ids"
    edit(folder, eagle_config={key: [1, 3, 4]})
    assert load_eagle3(folder, target).tap_ids == (2, 4, 5)
    assert load_eagle3(folder, target).notes == ("`rope_theta` is not given: 10000 assumed",)
    edit(folder, **{key: [1, 4, 7]})
    drafter = load_eagle3(folder, target)
    assert drafter.tap_ids == (1, 4, 7) and "(2, 4, 5)" in drafter.notes[0]
    edit(folder, **{key: [0, 3, 8]})
    assert load_eagle3(folder, target).tap_ids == (0, 3, 8)
    edit(folder, **{key: [0, 3, 9]})
    with pytest.raises(ModelError, match="9"):
        load_eagle3(folder, target)


def test_the_embedding_is_the_targets_own_memory(target: Decoder, tmp_path: Path) -> None:
    lent = load_eagle3(EAGLE3, target)
    assert lent.embed_tokens.weight.data_ptr() == target.embed.data_ptr()
    assert "embed_tokens.weight" not in lent.published()
    folder = copied(EAGLE3, tmp_path)
    put("embed_tokens.weight", 2 * target.embed.detach())(folder)
    own = load_eagle3(folder, target)
    assert torch.equal(own.embed_tokens.weight, 2 * target.embed)
    assert "embed_tokens.weight" in own.published()

"""DFlash checkpoints: what is read in which spelling, and what is refused, with both numbers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.sequences import DFLASH_GOLDEN
from helpers.tiny import Spoil, change, drop, put

from specsot.models.decoder import Decoder
from specsot.models.drafters.config import Reach, dflash_config
from specsot.models.files import ModelError
from specsot.models.load.weights import load_dflash, load_target

Q0 = "layers.0.self_attn.q_proj.weight"
SLIDING = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return load_target(DFLASH_GOLDEN / "target")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DFLASH_GOLDEN / "draft", tmp_path / "draft"))


def edit(**changes: object) -> Spoil:
    """Other values in config.json; those of `dflash_config` as `inner`, None to drop a key."""

    def update(folder: Path) -> None:
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        inner = changes.get("inner", {})
        assert isinstance(inner, dict)
        outer = {k: v for k, v in changes.items() if k != "inner"}
        raw = {k: v for k, v in (raw | outer).items() if v is not None}
        merged = raw["dflash_config"] | inner
        raw["dflash_config"] = {k: v for k, v in merged.items() if v is not None}
        path.write_text(json.dumps(raw))

    return update


BAD: dict[str, tuple[Spoil, str]] = {
    "another vocabulary": (
        edit(vocab_size=130),
        "another target: a vocabulary of 130, .*target/config.json has 128",
    ),
    "another width": (edit(hidden_size=48), "hidden states of width 48, .* has 64"),
    "another depth": (edit(num_target_layers=36), "number of layers of 36, .* has 4"),
    "taps beyond the target": (
        edit(inner={"target_layer_ids": [0, 4]}),
        r"`target_layer_ids` \(0, 4\) of a target with 4 layers",
    ),
    "another number of taps": (
        edit(inner={"target_layer_ids": [0, 1, 2]}),
        r"`fc\.weight` takes 128 features, and the 3 taps \(0, 1, 2\) .* width 64 are 192",
    ),
    "mask id beyond the vocabulary": (
        edit(inner={"mask_token_id": 128}),
        "`mask_token_id` is 128, the vocabulary has 128",
    ),
    "no mask id": (edit(inner={"mask_token_id": None}), r"mask_token_id` must be one token id"),
    "no block size": (edit(block_size=None), "`block_size` is missing"),
    "a block of one": (edit(block_size=1), "`block_size` is 1; .* are 2 or more"),
    "a window shorter than a block": (
        edit(layer_types=SLIDING, sliding_window=7),
        "`sliding_window` 7 is shorter than a block of 8",
    ),
    "a window without a size": (edit(layer_types=SLIDING), "`sliding_window` is missing"),
    "layer types of another depth": (
        edit(layer_types=[*SLIDING, "full_attention"]),
        "`layer_types` must name 2 layers",
    ),
    "a later drafter": (
        edit(inner={"projector_type": "domino"}),
        "a later kind of drafter than DFlash: `projector_type` is not supported",
    ),
    "another activation": (edit(hidden_act="gelu"), "`hidden_act` 'gelu' is not supported"),
    "quantised": (edit(quantization_config={"bits": 4}), "quantised checkpoints"),
    "more layers": (
        edit(num_hidden_layers=3, layer_types=None),
        "`num_hidden_layers` is 3, the weights hold 2 layers",
    ),
    "fewer layers": (
        edit(num_hidden_layers=1, layer_types=None),
        r"unexpected tensors: layers\.1\.input_layernorm\.weight, .* and 3 more",
    ),
    "missing": (drop("hidden_norm.weight"), r"missing: hidden_norm\.weight"),
    "unexpected": (put("embed_tokens.weight", torch.ones(2)), r"tensors: embed_tokens\.weight"),
    "transposed": (
        put("layers.1.mlp.up_proj.weight", lambda t: t.t()),
        r"`layers\.1\.mlp\.up_proj\.weight` has shape \[64, 96\], .* makes it \[96, 64\]",
    ),
    "another head_dim": (
        edit(head_dim=32),
        r"q_proj\.weight` has shape \[64, 64\], .* makes it \[128, 64\]",
    ),
    "nan": (put(Q0, lambda t: t * float("nan")), rf"`{Q0}` holds 4096 values that are not finite"),
    "integers": (put(Q0, lambda t: t.to(torch.int8)), "is I8: unsupported quantisation"),
    "biases promised": (edit(attention_bias=True), "8 tensors are missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_drafter_is_refused(name: str, draft: Path, target: Decoder) -> None:
    spoil, message = BAD[name]
    spoil(draft)
    with pytest.raises(ModelError, match=message) as caught:
        load_dflash(draft, target)
    assert str(caught.value).startswith(str(draft))


def test_the_architecture_of_the_config_is_no_matter(draft: Path, target: Decoder) -> None:
    edit(architectures=["LlamaForCausalLM"])(draft)
    (note,) = load_dflash(draft, target).notes
    assert "['LlamaForCausalLM']: read as DFlashDraftModel" in note


def test_spellings_of_later_files(draft: Path, target: Decoder) -> None:
    first = load_dflash(draft, target)
    edit(
        block_size=None,
        rope_theta=None,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        inner={"block_size": 8},
    )(draft)
    second = load_dflash(draft, target)
    assert second.config == first.config
    assert second.config.block_size == 8 and second.config.rope.theta == 1e6


def as_speculators(folder: Path, target: Decoder, **changes: object) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    inner = raw.pop("dflash_config")
    layer = {k: v for k, v in raw.items() if k not in ("block_size", "num_target_layers")}
    outer = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "draft_vocab_size": 128,
        "block_size": 8,
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        "sample_from_anchor": False,
    }
    (folder / "config.json").write_text(json.dumps(outer | changes))
    copies = {
        "embed_tokens.weight": target.embed.data.bfloat16(),
        "lm_head.weight": target.lm_head.weight.data.bfloat16(),
    }
    change(folder, lambda tensors: tensors.update(copies))
    return folder


def test_the_layout_of_speculators(draft: Path, target: Decoder) -> None:
    first = load_dflash(draft, target)
    second = load_dflash(as_speculators(draft, target), target)
    assert second.config == replace(first.config, speculators=True)
    assert all(torch.equal(v, second.published()[k]) for k, v in first.published().items())


SPECULATORS: dict[str, tuple[dict[str, object], Spoil, str]] = {
    "another drafter": (
        {"speculators_model_type": "eagle3"},
        lambda _: None,
        "speculators_model_type 'eagle3' is not supported",
    ),
    "a reduced vocabulary": (
        {"draft_vocab_size": 32},
        lambda _: None,
        "drafts 32 of 128 tokens",
    ),
    "drafts from the anchor": (
        {"sample_from_anchor": True},
        lambda _: None,
        "`sample_from_anchor` is not supported",
    ),
    "another target's head": (
        {},
        put("lm_head.weight", lambda t: t + 1),
        r"`lm_head\.weight` is not the target's",
    ),
    "another target's embedding": (
        {},
        put("embed_tokens.weight", lambda t: t[:100]),
        r"`embed_tokens\.weight` has shape \[100, 64\], the target's is \[128, 64\]",
    ),
}


@pytest.mark.parametrize("name", SPECULATORS)
def test_a_bad_drafter_of_speculators_is_refused(name: str, draft: Path, target: Decoder) -> None:
    changes, spoil, message = SPECULATORS[name]
    spoil(as_speculators(draft, target, **changes))
    with pytest.raises(ModelError, match=message) as caught:
        load_dflash(draft, target)
    assert str(caught.value).startswith(str(draft))


def test_sliding_layers_of_speculators(draft: Path, target: Decoder) -> None:
    edit(layer_types=SLIDING, sliding_window=16)(draft)
    as_speculators(draft, target)
    assert dflash_config(draft, target.config).reaches == (Reach(16, causal=True), Reach())
    raw = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(raw | {"sliding_window_non_causal": True}))
    assert dflash_config(draft, target.config).reaches == (Reach(16), Reach())


CAUSAL = {"layer_types": SLIDING, "sliding_window": 16, "use_sliding_window": True}
KINDS: dict[str, tuple[dict[str, object], tuple[Reach, Reach]]] = {
    "named": (CAUSAL, (Reach(16, causal=True), Reach())),
    "named, not causal": (CAUSAL | {"is_causal": False}, (Reach(16), Reach())),
    "all causal": ({"is_causal": True}, (Reach(None, causal=True), Reach(None, causal=True))),
    "the section wins": (
        CAUSAL | {"is_causal": True, "inner": {"causal": False}},
        (Reach(16), Reach()),
    ),
    "from a layer on": (
        CAUSAL | {"layer_types": None, "max_window_layers": 1},
        (Reach(), Reach(16, causal=True)),
    ),
    "switched off": (
        CAUSAL | {"layer_types": None, "use_sliding_window": False},
        (Reach(), Reach()),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_layers_are_read_and_written(name: str, draft: Path, target: Decoder) -> None:
    changes, expected = KINDS[name]
    edit(**changes)(draft)
    config = dflash_config(draft, target.config)
    assert config.reaches == expected
    assert bool(config.notes) == any(reach.window for reach in expected)
    (draft / "config.json").write_text(json.dumps(config.to_json()))
    assert dflash_config(draft, target.config) == config


def test_without_taps_the_rule_holds(draft: Path, target: Decoder) -> None:
    edit(inner={"target_layer_ids": None})(draft)
    assert dflash_config(draft, target.config).layer_ids == (1, 1)


def test_scaled_angles_survive(draft: Path, target: Decoder) -> None:
    edit(rope_scaling={"rope_type": "linear", "factor": 2.0})(draft)
    config = dflash_config(draft, target.config)
    assert (config.rope.kind, config.rope.settings) == ("linear", {"factor": 2.0})
    (draft / "config.json").write_text(json.dumps(config.to_json()))
    assert dflash_config(draft, target.config) == config
    plain, scaled = load_dflash(DFLASH_GOLDEN / "draft", target), load_dflash(draft, target)
    assert torch.equal(scaled.frequencies * 2, plain.frequencies)

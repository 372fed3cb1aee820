"""Drafters that must be refused, with the file and the reason."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sequences import DFLASH_GOLDEN, EAGLE_GOLDEN
from helpers.tiny import (
    WEIGHTS,
    Spoil,
    as_speculators,
    change,
    config,
    drop,
    one,
    pickled,
    put,
    write_tiny_eagle3,
    write_tiny_target,
)
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.models.files import ModelError
from specsot.models.load.weights import load_dflash, load_eagle, load_eagle3, load_target

FC = "fc.weight"
Q0 = "layers.0.self_attn.q_proj.weight"
UP1 = "layers.1.mlp.up_proj.weight"
INPUT_NORM = "layers.0.input_layernorm.weight"
OUTPUT_NORM = "layers.0.post_attention_layernorm.weight"
EMBEDDING = "embed_tokens.weight"
INT8 = "is I8: unsupported quantisation"
NO_EAGLE = "not an EAGLE-1 or EAGLE-2 drafter"
SLIDING = ["sliding_attention", "full_attention"]
BITS = {"bits": 4}
FINITE = "values that are not finite"


def taps(*layers: int) -> Spoil:
    return config(inner={"target_layer_ids": layers})


def renamed(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("midlayer")]:
        tensors[name.replace("midlayer", "layers.0")] = tensors.pop(name)


EAGLE: dict[str, tuple[Spoil, str]] = {
    "another width": (config(hidden_size=48), "target features of width 48, .* has 32"),
    "another vocabulary": (config(vocab_size=130), "a vocabulary of 130, .* has 128"),
    "two layers": (put(UP1, torch.ones(1)), "EAGLE-2 drafter has 1 layer here, this one has 2"),
    "another activation": (config(hidden_act="gelu"), "`hidden_act` 'gelu' is not"),
    "quantised": (config(quantization_config=BITS), "quantised checkpoints"),
    "EAGLE-3 by its config": (config(draft_vocab_size=64), f"has `draft_vocab_size`: {NO_EAGLE}"),
    "speculators": (config(speculators_model_type="eagle"), f"speculators_model_type`: {NO_EAGLE}"),
    "EAGLE-3 by its tensors": (
        put("midlayer.hidden_norm.weight", torch.ones(32)),
        f"is an EAGLE-3 drafter, {NO_EAGLE}",
    ),
    "no fc": (drop(FC), r"1 tensors are missing: fc\.weight"),
    "no bias": (drop("fc.bias"), r"missing: fc\.bias"),
    "a bias that the config denies": (config(bias=False), r"unexpected tensors: fc\.bias"),
    "biases that the config asks for": (
        config(qkv_bias=True),
        r"3 tensors are missing: layers\.0\.self_attn\.q_proj\.bias",
    ),
    "no norm": (drop(OUTPUT_NORM), f"missing: {OUTPUT_NORM}"),
    "a norm too many": (put(INPUT_NORM, torch.ones(32)), f"unexpected tensors: {INPUT_NORM}"),
    "a final norm": (put("norm.weight", torch.ones(32)), r"unexpected tensors: norm\.weight"),
    "a narrow fc": (
        put(FC, torch.ones(32, 32)),
        r"`fc\.weight` has shape \[32, 32\], config\.json makes it \[32, 64\]",
    ),
    "an embedding of others": (
        put(EMBEDDING, torch.ones(130, 32)),
        r"`embed_tokens\.weight` has shape \[130, 32\], config\.json makes it \[128, 32\]",
    ),
    "nan": (put("fc.bias", torch.full((32,), torch.nan)), rf"`fc\.bias` holds 32 {FINITE}"),
    "int8": (put("fc.bias", torch.ones(32, dtype=torch.int8)), INT8),
    "pickle": (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "never opened"),
}
EAGLE3: dict[str, tuple[Spoil, str]] = {
    "another width": (config(target_hidden_size=48), "target features of width 48, .* has 32"),
    "another vocabulary": (config(vocab_size=128), "a vocabulary of 128, .* has 130"),
    "another number of taps": (
        put(FC, lambda t: t[:, :64]),
        r"`fc\.weight` takes 64 features, and the 3 taps \(2, 3, 4\) .* are 96",
    ),
    "taps beyond the target": (
        config(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        r"taps \(2, 4, 9\) of a target with 7 layers",
    ),
    "d2t beyond the vocabulary": (put("d2t", lambda t: t + 500), "`d2t` leads to target id 500"),
    "d2t below zero": (put("d2t", lambda t: t - 1), "`d2t` leads to target id -1"),
    "d2t with doubles": (put("d2t", lambda t: -torch.arange(len(t))), "`d2t` and `t2d` do not"),
    "t2d of another set": (put("t2d", lambda t: t.roll(1)), "`d2t` and `t2d` do not describe"),
    "no d2t": (drop("d2t", "t2d"), "2 tensors are missing: d2t, t2d"),
    "d2t of floats": (put("d2t", lambda t: t.float()), "`d2t` is F32"),
    "no hidden_norm": (drop("midlayer.hidden_norm.weight"), r"midlayer\.hidden_norm\.weight"),
    "one too many": (put("midlayer.extra", torch.ones(1)), r"unexpected tensors: midlayer\.extra"),
    "nan": (put(FC, one(float("nan"))), rf"`fc\.weight` holds 1 {FINITE}"),
    "int8": (put(FC, lambda t: t.to(torch.int8)), INT8),
    "draft vocabulary too large": (
        config(draft_vocab_size=131),
        "`draft_vocab_size` 131 exceeds the vocabulary of 130",
    ),
    "other speculators": (
        config(speculators_model_type="dflash"),
        "speculators_model_type 'dflash' is not supported",
    ),
    "names of speculators alone": (lambda f: change(f, renamed), "tensors are missing: midlayer"),
    "both switches": (config(norm_before_fc=True, fc_norm=True), "exclude each other"),
    "pickle": (pickled("pytorch_model.bin"), "never opened"),
}
DFLASH: dict[str, tuple[Spoil, str]] = {
    "another vocabulary": (
        config(vocab_size=130),
        "another target: a vocabulary of 130, .*target/config.json has 128",
    ),
    "another width": (config(hidden_size=48), "hidden states of width 48, .* has 64"),
    "another depth": (config(num_target_layers=36), "number of layers of 36, .* has 4"),
    "taps beyond the target": (taps(0, 4), r"layer_ids` \(0, 4\) of a target with 4 layers"),
    "another number of taps": (
        taps(0, 1, 2),
        r"`fc\.weight` takes 128 features, and the 3 taps \(0, 1, 2\) .* width 64 are 192",
    ),
    "mask id beyond the vocabulary": (
        config(inner={"mask_token_id": 128}),
        "`mask_token_id` is 128, the vocabulary has 128",
    ),
    "no mask id": (config(inner={"mask_token_id": None}), r"mask_token_id` must be one token id"),
    "no block size": (config(block_size=None, inner={}), "`block_size` is missing"),
    "a block of one": (config(block_size=1), "`block_size` is 1; .* are 2 or more"),
    "a window shorter than a block": (
        config(layer_types=SLIDING, sliding_window=7),
        "`sliding_window` 7 is shorter than a block of 8",
    ),
    "a window without a size": (config(layer_types=SLIDING), "`sliding_window` is missing"),
    "layer types of another depth": (
        config(layer_types=[*SLIDING, "full_attention"]),
        "`layer_types` must name 2 layers",
    ),
    "a later drafter": (
        config(inner={"projector_type": "domino"}),
        "a later kind of drafter than DFlash: `projector_type` is not supported",
    ),
    "another activation": (config(hidden_act="gelu"), "`hidden_act` 'gelu' is not supported"),
    "quantised": (config(quantization_config=BITS), "quantised checkpoints"),
    "more layers": (
        config(num_hidden_layers=3, layer_types=None),
        "`num_hidden_layers` is 3, the weights hold 2 layers",
    ),
    "fewer layers": (
        config(num_hidden_layers=1, layer_types=None),
        r"unexpected tensors: layers\.1\.input_layernorm\.weight, .* and 3 more",
    ),
    "missing": (drop("hidden_norm.weight"), r"missing: hidden_norm\.weight"),
    "unexpected": (put(EMBEDDING, torch.ones(2)), r"tensors: embed_tokens\.weight"),
    "turned": (put(UP1, lambda t: t.t()), rf"`{UP1}` has shape \[64, 96\], .* makes it \[96, 64\]"),
    "another head_dim": (
        config(head_dim=32),
        r"q_proj\.weight` has shape \[64, 64\], .* makes it \[128, 64\]",
    ),
    "nan": (put(Q0, lambda t: t * float("nan")), rf"`{Q0}` holds 4096 {FINITE}"),
    "integers": (put(Q0, lambda t: t.to(torch.int8)), INT8),
    "biases promised": (config(attention_bias=True), "8 tensors are missing"),
}


SPECULATORS: dict[str, tuple[Spoil, str]] = {
    "another drafter": (
        config(speculators_model_type="eagle3"),
        "speculators_model_type 'eagle3' is not supported",
    ),
    "a reduced vocabulary": (config(draft_vocab_size=32), "drafts 32 of 128 tokens"),
    "from the anchor": (config(sample_from_anchor=True), "`sample_from_anchor` is not supported"),
    "another target's head": (
        put("lm_head.weight", lambda t: t + 1),
        r"`lm_head\.weight` is not the target's",
    ),
    "another target's embedding": (
        put(EMBEDDING, lambda t: t[:100]),
        r"`embed_tokens\.weight` has shape \[100, 64\], the target's is \[128, 64\]",
    ),
}
TABLES = {"eagle": EAGLE, "eagle3": EAGLE3, "dflash": DFLASH, "speculators": SPECULATORS}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Decoder]]:
    root = tmp_path_factory.mktemp("good")
    tiny = write_tiny_target(root / "target", layers=7)
    eagle = EAGLE_GOLDEN / "drafts" / "llama_eagle2", EAGLE_GOLDEN / "targets" / "llama"
    dflash = DFLASH_GOLDEN / "draft", DFLASH_GOLDEN / "target"
    eagle3 = write_tiny_eagle3(root / "draft", tiny), tiny
    pairs = {"eagle": eagle, "eagle3": eagle3, "dflash": dflash, "speculators": dflash}
    return {kind: (draft, load_target(target)) for kind, (draft, target) in pairs.items()}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, rows in TABLES.items() for n in rows])
def test_a_bad_drafter_is_refused(
    kind: str, name: str, good: dict[str, tuple[Path, Decoder]], tmp_path: Path
) -> None:
    source, target = good[kind]
    draft = Path(shutil.copytree(source, tmp_path / "draft"))
    if kind == "speculators":
        as_speculators(draft, target)
    spoil, message = TABLES[kind][name]
    spoil(draft)
    loaders: dict[str, Callable[..., Any]] = {"eagle": load_eagle, "eagle3": load_eagle3}
    with pytest.raises(ModelError, match=message) as caught:
        loaders.get(kind, load_dflash)(draft, target)
    assert str(caught.value).startswith(str(draft))
    assert not (tmp_path / "executed").exists()

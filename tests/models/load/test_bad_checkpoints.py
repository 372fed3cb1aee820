"""Checkpoints that must be refused: before anything is built, with the file and the reason."""

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.mutations import KINDS, Outside, check_folders
from helpers.sequences import DFLASH_GOLDEN, EAGLE_GOLDEN
from helpers.support import SEED
from helpers.tiny import (
    WEIGHTS,
    Spoil,
    as_speculators,
    change,
    config,
    drop,
    edit,
    one,
    pickled,
    put,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.models.files import ModelError
from specsot.models.load import weights

INDEX = "model.safetensors.index.json"
Q0 = "model.layers.0.self_attn.q_proj.weight"
LOADERS: dict[str, Any] = weights.LOADERS | {"target": weights.load_vanilla}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a drafter of every kind for it."""
    root = tmp_path_factory.mktemp("good")
    target = tiny.write_tiny_target(root / "target", layers=7)
    tiny.write_tiny_eagle(root / "eagle", target)
    tiny.write_tiny_eagle3(root / "eagle3", target)
    tiny.write_tiny_dflash(root / "dflash", target)
    tiny.write_tiny_medusa(root / "medusa", target)
    return root


@pytest.fixture
def target(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good / "target", tmp_path / "target"))


@pytest.fixture
def draft(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good / "eagle3", tmp_path / "draft"))


def raw(data: bytes) -> Spoil:
    return lambda folder: (folder / WEIGHTS).write_bytes(data)


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def shard(folder: Path, **wrong: str) -> None:
    """Two shards and their index; `wrong` maps tensors to other file names."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({n: t for n, t in tensors.items() if names[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names | wrong}))


def outside(name: str) -> Spoil:
    def build(folder: Path) -> None:
        shutil.copy(folder / WEIGHTS, folder.parent / "outside.safetensors")
        shard(folder, **{Q0: name.format(folder=folder)})

    return build


def link(name: str, to: str) -> Spoil:
    def build(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return build


def no_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_text(text: str) -> Spoil:
    def build(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(text)

    return build


INTACT = r"model\.safetensors: is not a valid safetensors file"
TARGETS: dict[str, tuple[Spoil, str]] = {
    "truncated": (truncate, INTACT),
    "empty": (raw(b""), INTACT),
    "garbage": (raw(b"\x10\0\0\0\0\0\0\0 no header here!!"), INTACT),
    "header of 2^62 bytes": (raw(struct.pack("<Q", 2**62) + b"{}"), INTACT),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "holds neither model.safetensors nor"),
    "nan": (put(Q0, one(float("nan"))), rf"`{Q0}` holds 1 values that are not finite"),
    "infinity": (put(Q0, one(float("inf"))), rf"`{Q0}` holds 1 values that are not finite"),
    "beyond float32": (put(Q0, lambda t: t.double() * 1e300), "that are not finite"),
    "missing": (drop(Q0), f"1 tensor is missing: {Q0}"),
    "many missing": (
        lambda f: change(f, lambda t: [t.pop(n) for n in list(t) if "mlp" in n]),
        "21 tensors are missing: .* and 13 more",
    ),
    "lm_head missing but not tied": (drop("lm_head.weight"), r"missing: lm_head\.weight"),
    "transposed": (
        put("model.layers.2.mlp.up_proj.weight", lambda t: t.t()),
        r"`model\.layers\.2\.mlp\.up_proj\.weight` has shape \[32, 64\], .* makes it \[64, 32\]",
    ),
    "flat": (put(Q0, lambda t: t.flatten()), r"has shape \[2048\], .* makes it \[64, 32\]"),
    "int8": (put(Q0, lambda t: t.to(torch.int8)), "is I8: unsupported quantisation"),
    "float8": (put(Q0, lambda t: t.to(torch.float8_e4m3fn)), "F8_E4M3: unsupported quantisation"),
    "more layers": (config(num_hidden_layers=8), "is 8, the weights hold 7 layers"),
    "endless layers": (config(num_hidden_layers=10**7), "the weights hold 7 layers"),
    "larger vocabulary": (
        config(vocab_size=131),
        r"embed_tokens\.weight` has shape \[130, 32\], config\.json makes it \[131, 32\]",
    ),
    "impossible sizes": (
        config(hidden_size=2**24, head_dim=2**24, num_attention_heads=2**24),
        "config.json: describes an impossible model",
    ),
    "rope setting a list": (
        config(rope_scaling={"type": "yarn", "factor": 2.0, "beta_fast": [1]}),
        "config.json: describes an impossible model",
    ),
    "pickle": (pickled("pytorch_model.bin"), "pytorch_model.bin: pickled weights .* convert them"),
    "other pickle": (pickled("weights.pt"), "never opened"),
    "index upwards": (outside("../outside.safetensors"), "not a plain file name"),
    "index absolute": (outside("{folder}/../outside.safetensors"), "not a plain file name"),
    "index with backslashes": (outside(r"..\outside.safetensors"), "not a plain file name"),
    "index into a folder": (outside("sub/model.safetensors"), "not a plain file name"),
    "index to nothing": (outside(""), "not a plain file name"),
    "index to the parent": (outside(".."), "not a plain file name"),
    "weights linked out": (link(WEIGHTS, "/etc/passwd"), "leaves its folder, to /etc/passwd"),
    "config linked outside": (link("config.json", "/etc/passwd"), "leaves its folder"),
    "generation linked out": (link("generation_config.json", "/etc/passwd"), "leaves its folder"),
    "weights linked to nothing": (link(WEIGHTS, "nothing"), r"model\.safetensors: is missing"),
    "shard missing": (no_shard, r"00002-of-00002\.safetensors: is missing"),
    "contradicts": (lambda f: shard(f, x="model-00001-of-00002.safetensors"), "puts `x` into"),
    "adapter": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        "holds no config.json: it is a LoRA adapter; merge it",
    ),
    "gguf": (lambda f: (f / "config.json").rename(f / "m.gguf"), r"no config.json, but m\.gguf"),
    "quantised": (
        config(quantization_config={"quant_method": "gptq"}),
        r"quantised checkpoints are not supported \('gptq'\)",
    ),
    "numbers of another kind": (
        config(torch_dtype="float8_e4m3fn"),
        "`torch_dtype` 'float8_e4m3fn' is not supported",
    ),
    "stop beyond the vocabulary": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [2, 130]}'),
        r"generation_config\.json: `eos_token_id` is 130, the vocabulary has 130",
    ),
    "index no JSON": (index_text("{"), r"index\.json: invalid JSON at line 1"),
    "index empty": (index_text("{}"), "`weight_map` must give a file name"),
    "index of numbers": (index_text('{"weight_map": {"a": 1}}'), "`weight_map` must give"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_bad_target_is_refused(name: str, target: Path) -> None:
    spoil, message = TARGETS[name]
    spoil(target)
    with pytest.raises(ModelError, match=message) as caught:
        weights.load_target(target)
    assert str(caught.value).startswith(str(target))
    assert not (target.parent / "executed").exists()


def test_unexpected_tensors_are_told(target: Path) -> None:
    change(target, lambda t: t.update({"extra.weight": torch.ones(2)}))
    assert weights.load_target(target).notes == ("unexpected tensors ignored: extra.weight",)


def test_stored_angles_of_old_files_are_no_surprise(target: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(target, lambda t: t.update({name: torch.ones(8)}))
    assert weights.load_target(target).notes == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_what_the_file_says_of_its_numbers(target: Path, key: str) -> None:
    raw = json.loads((target / "config.json").read_text())
    del raw["torch_dtype"]
    (target / "config.json").write_text(json.dumps(raw | {key: "bfloat16", "pad_token_id": -1}))
    config = weights.load_target(target).config
    assert (config.dtype, config.pad_ids) == ("bfloat16", ())


def test_shards_give_the_same_model(target: Path, good: Path) -> None:
    shard(target)
    whole, parts = (weights.load_target(f).published() for f in (good / "target", target))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_links_inside_the_cache_of_the_hub_are_followed(good: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/1f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("config.json", WEIGHTS)):
        shutil.copy(good / "target" / name, blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert weights.load_target(snapshot).num_layers == 7
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to("../../../other")
    with pytest.raises(ModelError, match="leaves its folder"):
        weights.load_target(snapshot)


def test_every_parameter_is_filled_and_the_head_is_tied(target: Path) -> None:
    drop("lm_head.weight")(target)
    edit(target, tie_word_embeddings=True)
    model = weights.load_target(target)
    assert model.lm_head.weight is model.embed
    for name, value in model.named_parameters():
        assert value.isfinite().all() and not value.requires_grad, name


def test_a_stored_head_counts_even_where_the_config_says_tied(target: Path, good: Path) -> None:
    edit(target, tie_word_embeddings=True)
    stored, own = (weights.load_target(f).lm_head.weight for f in (good / "target", target))
    assert torch.equal(stored, own)


def test_the_hash_follows_every_byte(target: Path) -> None:
    first = weights.model_hash(target)
    assert first == weights.model_hash(target) and len(first) == 64
    edit(target, eos_token_id=9)
    second = weights.model_hash(target)
    put(Q0, lambda t: t + 1e-3)(target)
    assert len({first, second, weights.model_hash(target)}) == 3


def test_a_name_that_is_no_folder(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(name: str, **rest: object) -> str:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert weights.resolve(good / "target") == good / "target"
    with pytest.raises(ModelError, match=r"a/b: .* from the Hub \(ConnectionError: no network\)$"):
        weights.resolve("a/b")
    for name in ("nowhere", "a/b/c", "/a/b", "../a"):
        with pytest.raises(ModelError, match=r"is not a folder$"):
            weights.resolve(name)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **rest: str(good))
    assert weights.resolve("a/b") == good


@pytest.mark.parametrize("wanted", LOADERS)
def test_every_kind_is_told_from_every_other(wanted: str, good: Path) -> None:
    target = weights.load_target(good / "target")
    LOADERS[wanted](good / wanted, target)
    for kind in LOADERS.keys() - {wanted}:
        message = f"is {weights.KINDS[kind]}, not {weights.KINDS[wanted]}$"
        if (wanted, kind) == ("target", "medusa"):  # its config.json has no sizes
            message = "model_type None is not supported"
        with pytest.raises(ModelError, match=message):
            LOADERS[wanted](good / kind, target)


def test_the_tokens_that_a_head_and_its_target_share(good: Path, tmp_path: Path) -> None:
    target, draft = (shutil.copytree(good / n, tmp_path / n) for n in ("target", "eagle3"))
    for folder in (target, draft):
        tiny.write_tiny_tokenizer(folder)
    raw = json.loads((draft / "tokenizer.json").read_text())
    words = raw["model"]["vocab"]
    words["<mask>"] = words.pop("w77")
    (draft / "tokenizer.json").write_text(json.dumps(raw))
    weights.load_eagle3(draft, weights.load_target(target))
    words["w20"], words["w30"] = words["w30"], words["w20"]
    (draft / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"token 'w30' has id 20, in the target's .* id 30"):
        weights.load_eagle3(draft, weights.load_target(target))


def test_a_shared_embedding_needs_the_targets_width(draft: Path, tmp_path: Path) -> None:
    """fc may map between widths, the shared embedding cannot."""
    wide = tiny.write_tiny_target(tmp_path / "wide", layers=7, hidden=48)
    edit(draft, target_hidden_size=48)
    put("fc.weight", torch.ones(32, 144))(draft)
    with pytest.raises(ModelError, match=r"\[130, 32\]: the target's is \[130, 48\]"):
        weights.load_eagle3(draft, weights.load_target(wide))


def test_what_speculators_adds_for_the_verifier_is_ignored(draft: Path, good: Path) -> None:
    change(draft, lambda t: t.update({"verifier_lm_head.weight": torch.ones(2)}))
    assert weights.load_eagle3(draft, weights.load_target(good / "target")).notes == ()


# -- drafters

FC = "fc.weight"
Q = "layers.0.self_attn.q_proj.weight"
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
    "no fc": (drop(FC), r"1 tensor is missing: fc\.weight"),
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
    "nan": (put(Q, lambda t: t * float("nan")), rf"`{Q}` holds 4096 {FINITE}"),
    "integers": (put(Q, lambda t: t.to(torch.int8)), INT8),
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
def pairs(good: Path) -> dict[str, tuple[Path, Decoder]]:
    """A drafter of every kind with its target."""
    eagle = EAGLE_GOLDEN / "drafts" / "llama_eagle2", EAGLE_GOLDEN / "targets" / "llama"
    dflash = DFLASH_GOLDEN / "draft", DFLASH_GOLDEN / "target"
    folders = {"eagle": eagle, "eagle3": (good / "eagle3", good / "target"), "dflash": dflash}
    found = {
        kind: (draft, weights.load_target(target)) for kind, (draft, target) in folders.items()
    }
    return found | {"speculators": found["dflash"]}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, rows in TABLES.items() for n in rows])
def test_a_bad_drafter_is_refused(
    kind: str, name: str, pairs: dict[str, tuple[Path, Decoder]], tmp_path: Path
) -> None:
    source, target = pairs[kind]
    draft = Path(shutil.copytree(source, tmp_path / "draft"))
    if kind == "speculators":
        as_speculators(draft, target)
    spoil, message = TABLES[kind][name]
    spoil(draft)
    with pytest.raises(ModelError, match=message) as caught:
        LOADERS.get(kind, weights.load_dflash)(draft, target)
    assert str(caught.value).startswith(str(draft))
    assert not (tmp_path / "executed").exists()


# -- a drawn part of tests/full/test_fuzz.py ------------------------------------------------------

FOLDERS = 60
FOUND = {2410: "dflash", 5506: "dflash", 130: "dflash", 191: "vanilla"}  # what was wrong once


@pytest.mark.skipif(sys.platform != "linux", reason="what is opened is told by inotify")
def test_some_bad_folders(tmp_path: Path) -> None:
    kinds = ["target", "target", *KINDS]
    drawn = {SEED * 1000 + n: kinds[n % len(kinds)] for n in range(FOLDERS)}
    check_folders(tmp_path, drawn | FOUND)


@pytest.mark.skipif(sys.platform != "linux", reason="what is opened is told by inotify")
def test_the_watch_sees_what_is_opened(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    (tmp_path / "file").write_text("x")
    assert outside.opened() and not outside.opened()
    (tmp_path / "file").read_text()
    assert outside.opened()

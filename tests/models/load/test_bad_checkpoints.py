"""Checkpoints that must be refused: before anything is built, with the file and the reason."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.tiny import WEIGHTS, Spoil, change, config, drop, edit, one, pickled, put
from safetensors.torch import load_file, save_file

from specsot.models.files import ModelError
from specsot.models.load import weights

INDEX = "model.safetensors.index.json"
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    tiny.write_tiny_target(root / "target", layers=7)
    tiny.write_tiny_eagle3(root / "draft", root / "target")
    return root


@pytest.fixture
def target(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good / "target", tmp_path / "target"))


@pytest.fixture
def draft(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good / "draft", tmp_path / "draft"))


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
    "missing": (drop(Q0), f"1 tensors are missing: {Q0}"),
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
    whole, parts = (
        weights.load_target(good / "target").published(),
        weights.load_target(target).published(),
    )
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
    assert torch.equal(
        weights.load_target(target).lm_head.weight,
        weights.load_target(good / "target").lm_head.weight,
    )


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


def test_every_kind_is_told_from_every_other(good: Path, tmp_path: Path) -> None:
    target = weights.load_target(good / "target")
    tiny.write_tiny_eagle(tmp_path / "eagle", good / "target")
    tiny.write_tiny_dflash(tmp_path / "dflash", good / "target")
    folders = {"eagle": tmp_path / "eagle", "dflash": tmp_path / "dflash", "eagle3": good / "draft"}
    folders["target"] = good / "target"
    loaders = {
        "eagle": weights.load_eagle,
        "dflash": weights.load_dflash,
        "eagle3": weights.load_eagle3,
    }
    loaders["target"] = weights.load_vanilla
    for wanted, load in loaders.items():
        for kind, folder in folders.items():
            if kind == wanted:
                load(folder, target)
                continue
            with pytest.raises(
                ModelError, match=f"is {weights.KINDS[kind]}, not {weights.KINDS[wanted]}$"
            ):
                load(folder, target)


def test_the_tokens_that_a_head_and_its_target_share(good: Path, tmp_path: Path) -> None:
    target, draft = (shutil.copytree(good / n, tmp_path / n) for n in ("target", "draft"))
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

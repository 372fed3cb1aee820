"""Checkpoints of other forms into folders of safetensors: pickled weights, a drafter in another
layout, and GGUF files, as llama.cpp writes them, dequantised. Every tensor and every kind of
scaling in a GGUF file must be known: to ignore one would silently make another model."""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from safetensors.torch import save_file
from torch import Tensor

from ..config import ORIGINAL, PARTIAL, TRAINED, RopeConfig
from ..decoder import Decoder
from ..drafters.config import SWITCHES, Eagle3Config
from ..drafters.eagle import EMBEDDING, LM_HEAD
from ..families import ATTENTION, Family, decoder_config, families
from ..files import MODEL_FILES, Fields, ModelError, cause_of, inside, read_fields
from ..layers import inverse_frequencies
from . import weights

SPECULATORS = "speculators"
VERSION = "0.8.0"  # of speculators, whose keys these are
DRAFTS = 3  # of a round: speculators' default for EAGLE-3
AUTHORS_LAYOUT = {"eagle3": "safeailab", "dflash": "z-lab"}
LAYER = "layers.0.", "midlayer."  # speculators' name, and SafeAILab's
UNSUPPORTED = (*SWITCHES, "qkv_bias", "o_bias", "mlp_bias", "qk_norm")  # in SafeAILab's layout
SHARD_BYTES = 2 << 30  # bytes of one weight file, and so of memory
MAX_ARRAY = 1 << 22
ARCHITECTURE = "general.architecture"
# Settings that change a model -> the key of config.json that says so.
MEANINGS = {
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
BLOCK = re.compile(r"blk\.(\d{1,4})\.")
ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.")
EXPERT = re.compile(r"\.experts\.\d+(?=\.)")
LLAMA3_FREQS = "rope_freqs.weight"
LONG_FACTORS = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("short", "long")}
FAULTS = (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError, NotImplementedError)


def convert_pickles(folder: Path, out: Path) -> None:
    """Write a folder's pickled weights as safetensors into ``out``, and copy its other files.
    Objects other than tensors are refused, as loading them would run code: ModelError."""
    read_fields(folder)
    names = sorted(path.name for path in folder.iterdir() if path.suffix in weights.PICKLES)
    if not names:
        raise ModelError(folder, f"holds no weights to convert ({', '.join(weights.PICKLES)})")
    tensors: dict[str, Tensor] = {}
    for path in (inside(folder, name) for name in names):
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # of a damaged or hostile pickle
            reason = str(error).strip().split("\n", 1)[0]
            what = f"holds more than plain tensors, or is damaged: {reason}"
            raise ModelError(path, what) from None
        values = stored.values() if isinstance(stored, dict) else [None]
        if not all(isinstance(value, Tensor) for value in values):
            raise ModelError(path, "is not a mapping of names to tensors")
        if again := sorted(tensors.keys() & stored.keys()):
            raise ModelError(path, f"holds `{again[0]}`, and so does another file")
        tensors |= {str(name): value.clone().contiguous() for name, value in stored.items()}
    for path in sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern)}):
        if path.is_file() and not path.name.endswith((".index.json", ".safetensors")):
            shutil.copyfile(inside(folder, path.name), out / path.name)
    save_file(tensors, out / weights.SINGLE, metadata={"format": "pt"})


def convert_layout(folder: Path, target_path: Path, layout: str, out: Path, verifier: str) -> None:
    """Write a drafter of a target into the folder ``out``, in ``speculators``' layout, where the
    target is the `verifier`, or its authors'; ModelError if it has that already or does not fit."""
    stored = weights.entries(folder)
    kind = weights.kind_of(stored)
    if kind not in AUTHORS_LAYOUT or layout not in (SPECULATORS, AUTHORS_LAYOUT[kind]):
        what = weights.KINDS.get(kind, "unknown by its tensors")
        raise ModelError(folder, f"is {what}, which has no layout {layout!r}")
    target = weights.load_target(target_path, device="meta")
    drafter = weights.LOADERS[kind](folder, target, device="meta")
    config = drafter.config
    wrap = layout == SPECULATORS
    if config.speculators == wrap:
        raise ModelError(folder, f"has the layout {layout!r} already")
    lost = []  # settings that the other layout cannot express
    if isinstance(config, Eagle3Config):
        lost = [name for name in UNSUPPORTED if config.speculators and getattr(config, name)]
    else:
        if not config.speculators and any(r.causal and r.window is None for r in config.reaches):
            lost.append("full layers that are causal")
        if len({r.causal for r in config.reaches if r.window is not None}) > 1:
            lost.append("sliding layers of two kinds")
    if lost:
        raise ModelError(folder, f"cannot be written in the layout {layout!r}: {', '.join(lost)}")
    published = drafter.published()
    tensors = {n: weights.read_tensor(stored[n].path, n) for n in stored if n in published}
    if kind == "eagle3":
        old, new = LAYER[::-1] if wrap else LAYER
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    elif wrap:  # with copies of the target's embedding and head
        ends = weights.entries(target_path)
        table = f"model.{EMBEDDING}"
        for copy, name in ((EMBEDDING, table), (LM_HEAD, LM_HEAD if LM_HEAD in ends else table)):
            tensors[copy] = weights.read_tensor(ends[name].path, name)
    save_file(tensors, out / weights.SINGLE, metadata={"format": "pt"})
    raw = config.to_json()
    if wrap:
        drafts = DRAFTS if kind == "eagle3" else config.block_size - 1
        proposal = {"proposal_type": "greedy", "speculative_tokens": drafts}
        family = target.config.family.capitalize()
        raw = config.speculators_json() | {
            "speculators_version": VERSION,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "verifier": {"name_or_path": verifier, "architectures": [f"{family}ForCausalLM"]},
            },
        }
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


class _Reader(GGUFReader):
    """Raises ValueError for a file that ends too early, and for impossible counts."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        if count < 0 or offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("it ends too early")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            if count > MAX_ARRAY:
                raise ValueError(f"an array of {count} values")
        return super()._get_field_parts(orig_offs, raw_type)


def convert_gguf(
    file: Path,
    out: Path,
    dtype: torch.dtype = torch.float32,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Write a file's weights, config and tokenizer into the folder ``out``; lines of progress go to
    `report`. Raises ModelError: it is damaged, of another family, or cannot be read."""
    try:
        reader = _Reader(file)
        arrays = [GGUFValueType.ARRAY]
        plain = {k: f.contents() for k, f in reader.fields.items() if f.types[:1] != arrays}
    except FAULTS as error:
        raise ModelError(file, f"is not a valid GGUF file: {error}") from None
    family, config = _config(file, reader, plain)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shape = decoder_config(out)
    published = weights.on_meta(file, lambda: Decoder(shape)).published()
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == plain[ARCHITECTURE])
    table = gguf.get_tensor_name_map(arch, shape.num_layers)
    names = defaultdict[str, list[str]](list)  # experts are one tensor in the file
    for name in published:
        stem, _, kind = EXPERT.sub(".experts", name).rpartition(".")
        names[f"{table.get_name(stem)}.{kind}"].append(name)
    known = {*names, LLAMA3_FREQS, *LONG_FACTORS.values()}
    if strange := [t.name for t in reader.tensors if t.name not in known]:
        raise ModelError(file, f"unexpected tensors: {weights.listed(strange)}")
    from transformers import PreTrainedTokenizerFast

    try:
        folder = file.parent
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file.name)
        tokenizer.save_pretrained(out)
    except Exception as error:  # the file may contain anything
        raise ModelError(file, f"no usable tokenizer ({cause_of(error)})") from None
    shards: list[list[ReaderTensor]] = [[]]
    for tensor in reader.tensors:
        if tensor.name in names:
            size = sum(t.n_elements for t in [*shards[-1], tensor]) * dtype.itemsize
            if shards[-1] and size > SHARD_BYTES:
                shards.append([])
            shards[-1].append(tensor)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = f"model-{number:05}.safetensors" if len(shards) > 1 else weights.SINGLE
        report(f"dequantising {name} ({len(shard)} tensors)")
        tensors: dict[str, Tensor] = {}
        for stored in shard:
            values = _tensor(file, stored, family, config)
            if shape.centred_norms and stored.name.endswith("norm.weight"):
                values -= 1.0
            parts = values.unbind() if values.ndim == 3 else (values,)
            if len(parts) != len(names[stored.name]):
                raise ModelError(file, f"`{stored.name}` holds {len(parts)} matrices")
            pairs = zip(names[stored.name], parts, strict=True)
            tensors |= {name: part.to(dtype).contiguous() for name, part in pairs}
        save_file(tensors, out / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        index = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
        (out / weights.INDEX).write_text(index)


def _tensor(
    file: Path, stored: ReaderTensor, family: type[Family], config: dict[str, Any]
) -> Tensor:
    try:
        values = gguf.dequantize(stored.data, stored.tensor_type)
    except FAULTS as error:
        what = f"`{stored.name}` is {stored.tensor_type.name}, which cannot be read"
        raise ModelError(file, f"{what}: {error}") from None
    rotated = ROTATED.match(stored.name)
    if rotated and family.gguf_pairs:
        heads = config[f"num_{'attention' if rotated[1] == 'q' else 'key_value'}_heads"]
        if values.shape[:1] != (heads * config["head_dim"],):
            raise ModelError(file, f"`{stored.name}` does not have {heads} heads")
        pairs = values.reshape(heads, config["head_dim"] // 2, 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))


def _config(
    file: Path, reader: GGUFReader, plain: dict[str, Any]
) -> tuple[type[Family], dict[str, Any]]:
    """Family and config.json of the model in a file; plain: the fields that are not lists."""
    arch = plain.get(ARCHITECTURE)
    name = str(plain.get("general.name", ""))
    by_name = families()
    by_arch = {family.gguf: family for family in by_name.values() if family.gguf}
    if arch not in by_arch:
        known = ", ".join(sorted(by_arch))
        raise ModelError(file, f"is of the architecture {arch!r}, not one of: {known}")
    prefix = f"{arch}."
    arch_fields = {k.removeprefix(prefix): v for k, v in plain.items() if k.startswith(prefix)}
    fields = Fields(file, arch_fields)
    tokens = Fields(file, plain)
    shapes = {t.name: [int(n) for n in t.shape] for t in reader.tensors}
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise fields.wrong("holds no table `token_embd.weight`")
    windowed = arch_fields.get("attention.sliding_window")
    mistral = arch == "llama" and (windowed or "mistral" in name.lower())
    family = by_name["mistral"] if mistral else by_arch[arch]
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", max(hidden // heads, 1))
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    sizes = {"attention.value_length": fields.integer("attention.value_length", head_dim)}
    sizes |= {} if family.partial else {"rope.dimension_count": rotary_dim}
    for key, actual in sizes.items():
        if actual != head_dim:
            raise fields.wrong(f"`{key}` is {actual}, heads have {head_dim}: not supported")
    trained = fields.integer("context_length")
    layers = fields.integer("block_count")
    if layers != (actual := len({m[1] for name in shapes if (m := BLOCK.match(name))})):
        raise fields.wrong(f"`block_count` is {layers}, the tensors are those of {actual} layers")
    rope = _rope(fields, reader, trained, rotary_dim)
    rope |= {PARTIAL: rotary_dim / head_dim} if rotary_dim != head_dim else {}
    own = family.gguf_keys(fields, rope)
    for key, meaning in MEANINGS.items():
        if arch_fields.get(key) and meaning not in own:
            raise fields.wrong(f"`{key}` of the architecture {arch} is not supported")
    biased = "blk.0.attn_q.bias" in shapes
    ends = {i for kind in ("eos", "eot") for i in tokens.ids(f"tokenizer.ggml.{kind}_token_id")}
    config = {
        "architectures": [f"{family.__name__.removesuffix('Text')}ForCausalLM"],
        "model_type": family.name,
        "vocab_size": shapes["token_embd.weight"][-1],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": family.activation,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        TRAINED: trained,
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in shapes,
        **({"attention_bias": biased} if family.qkv_bias == ATTENTION else {}),
        "bos_token_id": plain.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(ends) or None,
        "pad_token_id": plain.get("tokenizer.ggml.padding_token_id"),
        **own,
    }
    return family, config


def _rope(fields: Fields, reader: GGUFReader, trained: int, rotary_dim: int) -> dict[str, Any]:
    """The kind of RoPE scaling; of Llama 3's and of `longrope` the file has factors, as tensors."""
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    tensors = {t.name: t for t in reader.tensors}
    original = fields.integer("rope.scaling.original_context_length", trained)
    if tensors.keys() & {*LONG_FACTORS.values()}:
        for key, name in LONG_FACTORS.items():
            if name not in tensors:
                raise fields.wrong(f"holds no `{name}`")
            rope[key] = torch.tensor(tensors[name].data, dtype=torch.float32).flatten().tolist()
        scale = fields.get("rope.scaling.attn_factor")
        rope |= {} if scale is None else {"attention_factor": scale}
        return rope | {"rope_type": "longrope", ORIGINAL: original}
    if LLAMA3_FREQS in tensors:
        actual = torch.tensor(tensors[LLAMA3_FREQS].data, dtype=torch.float32).flatten()
        scaling = {"factor": max([1.0, *actual.tolist()]), "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, ORIGINAL: 8192}
        plain, scaled = (
            inverse_frequencies(RopeConfig(kind, theta, settings, 1 << 17), rotary_dim)[0]
            for kind, settings in (("default", {}), ("llama3", scaling))
        )
        if actual.shape != plain.shape or not torch.allclose(actual, plain / scaled, rtol=1e-3):
            raise fields.wrong(f"`{LLAMA3_FREQS}` holds factors that are not Llama 3's")
        return rope | {"rope_type": "llama3", **scaling}
    if kind in (None, "none"):
        return rope
    if kind not in ("linear", "yarn"):
        raise fields.wrong(f"rope scaling {kind!r} is not supported")
    rope |= {"rope_type": kind, "factor": fields.number("rope.scaling.factor", 1.0)}
    return rope | ({ORIGINAL: original} if kind == "yarn" else {})

"""Checkpoints of other forms into folders of safetensors: pickled weights, a drafter in another
layout, and GGUF files, as llama.cpp writes them, dequantised. Every tensor and every kind of
scaling in a GGUF file must be known: to ignore one would silently make another model."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from safetensors.torch import save_file
from torch import Tensor

from ..config import ORIGINAL, TRAINED, RopeConfig
from ..decoder import Decoder
from ..drafters.config import SWITCHES, Eagle3Config
from ..drafters.eagle import EMBEDDING, LM_HEAD
from ..families import decoder_config
from ..files import MODEL_FILES, Fields, ModelError, cause_of, inside, read_fields
from ..layers import inverse_frequencies
from . import weights

SPECULATORS = "speculators"
VERSION = "0.8.0"  # of speculators, whose keys these are
DRAFTS = 3  # of a round: speculators' default for EAGLE-3
AUTHORS_LAYOUT = {"eagle3": "safeailab", "dflash": "z-lab"}
LAYER = "layers.0.", "midlayer."  # speculators' name, and SafeAILab's
UNSUPPORTED = (*SWITCHES, "qkv_bias", "o_bias", "mlp_bias", "qk_norm")  # in SafeAILab's layout
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SHARD_BYTES = 2 << 30  # bytes of one weight file, and so of memory
MAX_ARRAY = 1 << 22
BLOCK = re.compile(r"blk\.(\d{1,4})\.")
ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.")
LLAMA3_FREQS = "rope_freqs.weight"
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
    config = _config(file, reader, plain)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shape = decoder_config(out)
    published = weights.on_meta(file, lambda: Decoder(shape)).published()
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, shape.num_layers)  # has all parts
    names = {f"{table.get_name(n.rpartition('.')[0])}.{n.rpartition('.')[2]}": n for n in published}
    if strange := [t.name for t in reader.tensors if t.name not in {*names, LLAMA3_FREQS}]:
        raise ModelError(file, f"unexpected tensors: {weights.listed(strange)}")
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
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
        tensors = {names[t.name]: _tensor(file, t, config).to(dtype) for t in shard}
        save_file(tensors, out / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        index = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
        (out / weights.INDEX).write_text(index)


def _tensor(file: Path, stored: ReaderTensor, config: dict[str, Any]) -> Tensor:
    try:
        values = gguf.dequantize(stored.data, stored.tensor_type)
    except FAULTS as error:
        what = f"`{stored.name}` is {stored.tensor_type.name}, which cannot be read"
        raise ModelError(file, f"{what}: {error}") from None
    rotated = ROTATED.match(stored.name)
    if rotated and config["model_type"] in ("llama", "mistral"):
        # llama.cpp keeps the two numbers of a rotated pair side by side, the published files
        # half a head apart.
        heads = config[f"num_{'attention' if rotated[1] == 'q' else 'key_value'}_heads"]
        if values.shape[:1] != (heads * config["head_dim"],):
            raise ModelError(file, f"`{stored.name}` does not have {heads} heads")
        pairs = values.reshape(heads, config["head_dim"] // 2, 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))


def _config(file: Path, reader: GGUFReader, plain: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model in a file; plain: the fields that are not lists."""
    arch = plain.get("general.architecture")
    name = str(plain.get("general.name", ""))
    if arch not in FAMILIES:
        raise ModelError(file, f"is of the family {arch!r}, not one of: {', '.join(FAMILIES)}")
    prefix = f"{arch}."
    arch_fields = {k.removeprefix(prefix): v for k, v in plain.items() if k.startswith(prefix)}
    fields = Fields(file, arch_fields)
    tokens = Fields(file, plain)
    shapes = {t.name: [int(n) for n in t.shape] for t in reader.tensors}
    if arch_fields.get("expert_count"):
        raise fields.wrong("is a mixture of experts, which is not supported")
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise fields.wrong("holds no table `token_embd.weight`")
    window = arch_fields.get("attention.sliding_window") or None
    family = "mistral" if arch == "llama" and (window or "mistral" in name.lower()) else arch
    if window and family != "mistral":
        raise fields.wrong(f"a sliding window in the family {family} is not supported")
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (actual := fields.integer(key, head_dim)) != head_dim:
            raise fields.wrong(f"`{key}` is {actual}, heads have {head_dim}: not supported")
    trained = fields.integer("context_length")
    layers = fields.integer("block_count")
    if layers != (actual := len({m[1] for name in shapes if (m := BLOCK.match(name))})):
        raise fields.wrong(f"`block_count` is {layers}, the tensors are those of {actual} layers")
    biased = "blk.0.attn_q.bias" in shapes
    ends = {i for kind in ("eos", "eot") for i in tokens.ids(f"tokenizer.ggml.{kind}_token_id")}
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": shapes["token_embd.weight"][-1],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        TRAINED: trained,
        "rope_parameters": _rope(fields, reader, trained, head_dim),
        "tie_word_embeddings": "output.weight" not in shapes,
        **({"attention_bias": biased} if family in ("llama", "qwen3") else {}),
        **({"sliding_window": window} if family == "mistral" else {}),
        "bos_token_id": plain.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(ends) or None,
        "pad_token_id": plain.get("tokenizer.ggml.padding_token_id"),
    }


def _rope(fields: Fields, reader: GGUFReader, trained: int, head_dim: int) -> dict[str, Any]:
    """The kind of RoPE scaling, or Llama 3's, of which the file has only the factors, a tensor."""
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factors = next((t for t in reader.tensors if t.name == LLAMA3_FREQS), None)
    if factors is not None:
        actual = torch.tensor(factors.data, dtype=torch.float32).flatten()
        scaling = {"factor": max([1.0, *actual.tolist()]), "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, ORIGINAL: 8192}
        plain, scaled = (
            inverse_frequencies(RopeConfig(kind, theta, settings, 1 << 17), head_dim)[0]
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
    original = fields.integer("rope.scaling.original_context_length", trained)
    return rope | ({ORIGINAL: original} if kind == "yarn" else {})

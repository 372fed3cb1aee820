"""Checkpoints from one published form into another: pickled weights, and layouts of drafters."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..decoder import Decoder
from ..drafters.config import (
    DFLASH_SECTION,
    MASK_KEY,
    STATES_KEY,
    SWITCHES,
    TAPS_KEY,
    DFlashConfig,
    Eagle3Config,
)
from ..drafters.eagle import EMBEDDING, LM_HEAD
from ..files import ModelError, inside, read_fields
from .checkpoint import KINDS, PICKLES, SINGLE, Stored, entries, kind_of, read_tensor
from .weights import LOADERS, load_target

SPECULATORS = "speculators"
VERSION = "0.8.0"  # of speculators, whose keys these are
DRAFTS = 3  # of a round: speculators' default for EAGLE-3
AUTHORS_LAYOUT = {"eagle3": "safeailab", "dflash": "z-lab"}
LAYER = "layers.0.", "midlayer."  # speculators' name, and SafeAILab's
NOT_OF_LAYERS = ("architectures", "num_target_layers", "block_size", "is_causal", DFLASH_SECTION)
UNSUPPORTED = (*SWITCHES, "qkv_bias", "o_bias", "mlp_bias", "qk_norm")  # in SafeAILab's layout
OTHER_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")


def convert_pickles(folder: Path, out: Path) -> None:
    """Write a folder's pickled weights as safetensors into ``out``, and copy its other files.

    Objects other than tensors are refused, as loading them would run code.

    Raises:
        ModelError: there are none, or a file cannot be read so.
    """
    read_fields(folder)
    names = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if not names:
        raise ModelError(folder, f"holds no weights to convert ({', '.join(PICKLES)})")
    tensors: dict[str, Tensor] = {}
    for path in (inside(folder, name) for name in names):
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # of a damaged or hostile pickle
            reason = str(error).strip().split("\n", 1)[0]
            raise ModelError(
                path, f"holds more than plain tensors, or is damaged: {reason}"
            ) from None
        values = stored.values() if isinstance(stored, dict) else [None]
        if not all(isinstance(value, Tensor) for value in values):
            raise ModelError(path, "is not a mapping of names to tensors")
        if again := sorted(tensors.keys() & stored.keys()):
            raise ModelError(path, f"holds `{again[0]}`, and so does another file")
        tensors |= {str(name): value.clone().contiguous() for name, value in stored.items()}
    for path in sorted({file for pattern in OTHER_FILES for file in folder.glob(pattern)}):
        if path.is_file() and not path.name.endswith(".index.json"):
            shutil.copyfile(inside(folder, path.name), out / path.name)
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})


def convert_layout(
    folder: Path, target_folder: Path, layout: str, out: Path, verifier: str
) -> None:
    """Write a drafter into the folder ``out``, in another layout.

    Args:
        target_folder: its target, with which it is checked.
        layout: ``speculators``, or one of AUTHORS_LAYOUT.
        verifier: what speculators' file calls the target.

    Raises:
        ModelError: it cannot be used, has that layout already, or cannot be written in it.
    """
    stored = entries(folder)
    kind = kind_of(stored)
    if kind not in AUTHORS_LAYOUT or layout not in (SPECULATORS, AUTHORS_LAYOUT[kind]):
        what = KINDS.get(kind, "unknown by its tensors")
        raise ModelError(folder, f"is {what}, which has no layout {layout!r}")
    target = load_target(target_folder, device="meta")
    drafter = LOADERS[kind](folder, target, device="meta")
    config = drafter.config
    wrap = layout == SPECULATORS
    if config.speculators == wrap:
        raise ModelError(folder, f"has the layout {layout!r} already")
    if lost := _lost(config):
        raise ModelError(folder, f"cannot be written in the layout {layout!r}: {', '.join(lost)}")
    tensors = {n: read_tensor(stored[n].path, n) for n in stored if n in drafter.published()}
    if kind == "eagle3":
        old, new = LAYER[::-1] if wrap else LAYER
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    elif wrap:
        tensors |= _ends(entries(target_folder))
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    raw = _speculators_json(config, target, verifier) if wrap else config.to_json()
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _lost(config: Eagle3Config | DFlashConfig) -> list[str]:
    """The settings that the other layout cannot express."""
    if isinstance(config, Eagle3Config):
        return [name for name in UNSUPPORTED if config.speculators and getattr(config, name)]
    causal = not config.speculators and any(r.causal and r.window is None for r in config.reaches)
    mixed = len({r.causal for r in config.reaches if r.window is not None}) > 1
    return ["full layers that are causal"] * causal + ["sliding layers of two kinds"] * mixed


def _ends(stored: Stored) -> dict[str, Any]:
    """The target's embedding and head, under the names of a drafter's copies."""
    table = f"model.{EMBEDDING}"
    names = {EMBEDDING: table, LM_HEAD: LM_HEAD if LM_HEAD in stored else table}
    return {copy: read_tensor(stored[name].path, name) for copy, name in names.items()}


def _speculators_json(
    config: Eagle3Config | DFlashConfig, target: Decoder, verifier: str
) -> dict[str, Any]:
    """config.json of a drafter for a target in speculators' layout."""
    more: dict[str, Any]
    if isinstance(config, Eagle3Config):
        kind = "eagle3"
        name = "Eagle3Speculator"
        drafts = DRAFTS
        layer = {"model_type": "llama", "num_hidden_layers": 1, **config.shape_json()}
        more = dict.fromkeys(SWITCHES, False) | {TAPS_KEY: config.taps}
        vocabulary = config.draft_vocab_size
        width = config.target_hidden_size
    else:
        kind = "dflash"
        name = "DFlashSpeculator"
        drafts = config.block_size - 1
        layer = {k: v for k, v in config.to_json().items() if k not in NOT_OF_LAYERS}
        sliding = [reach for reach in config.reaches if reach.window is not None]
        more = {
            "block_size": config.block_size,
            STATES_KEY: [layer_id + 1 for layer_id in config.layer_ids],
            MASK_KEY: config.mask_token_id,
            "sliding_window_non_causal": bool(sliding) and not sliding[0].causal,
        }
        vocabulary = config.vocab_size
        width = config.hidden_size
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts}
    family = target.config.family.capitalize()
    return {
        "architectures": [name],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "draft_vocab_size": vocabulary,
        "target_hidden_size": width if width != config.hidden_size else None,
        **more,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {
                "name_or_path": verifier,
                "architectures": [f"{family}ForCausalLM"],
            },
        },
    }

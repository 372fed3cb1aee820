"""Checkpoints into models: targets, and drafters that fit one.

Every tensor of a drafter's file must be known and every parameter filled: a forgotten norm would
cost most of the acceptance without failing any test of the output.
"""

import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..decoder import Decoder, Share
from ..drafters.config import dflash_config, eagle3_config, eagle_config
from ..drafters.dflash import DFlashDraftModel, TargetEnds
from ..drafters.eagle import EMBEDDING, LM_HEAD, Eagle, Eagle3, EagleHead
from ..families import decoder_config
from ..files import ModelError
from ..linear import replace_
from .checkpoint import (
    KINDS,
    MAPS,
    Stored,
    compare,
    entries,
    fill,
    kind_of,
    listed,
    materialise,
    on_meta,
    read_tensor,
    window,
)
from .tokenizer import check_same_tokens

LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,6})\.")

Device = torch.device | str
Drafter = TypeVar("Drafter", Eagle, Eagle3, DFlashDraftModel)


def load_target(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    *,
    part: tuple[int, int] = (0, 1),
    scan: bool = True,
    whole_head: bool = False,
) -> Decoder:
    """A decoder from a Hugging Face folder (config.json and safetensors).

    `Decoder.notes` names unexpected tensors. On the device `meta` everything but values is checked.

    part: index and count: the part of as many ranks that `sharded` needs on one of them; nothing
        else is read. Embedding and norms are whole, and so is a tied head.
    scan: refuse values that are not finite.
    whole_head: the head is whole, for a drafter that may borrow it.
    Raises ModelError: the checkpoint is refused; the message names the file and the reason.
    Raises ValueError: the index of the part is out of range.
    """
    index, count = part
    config = decoder_config(folder)
    stored = _read(folder, "target")
    _check_layers(config.path, config.num_layers, stored)
    tied = (LM_HEAD,) if config.tied and LM_HEAD not in stored else ()
    share = Share.of(config, index, count)
    if tied or whole_head:
        share = share._replace(vocabulary=range(config.vocab_size))
    decoder = on_meta(config.path, lambda: Decoder(config, share))
    whole = decoder if count == 1 else on_meta(config.path, lambda: Decoder(config))
    extra = compare(folder, stored, _views(whole, tied))
    if tied:  # empty until the embedding has memory, which the head then shares
        decoder.lm_head.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    materialise(decoder, dtype, device)
    if tied:
        decoder.lm_head.weight = decoder.embed
    views = _views(decoder, tied)
    fill(views, stored, scan, {name: window(name, config, share) for name in views})
    ignored = (f"unexpected tensors ignored: {listed(extra)}",) if extra else ()
    decoder.notes = config.notes + ignored
    return decoder.eval()


def load_eagle3(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Eagle3:
    """An EAGLE-3 drafter in EAGLE's or speculators' layout, for one target, whose embedding it uses
    unless the file has its own.

    Raises ModelError: the checkpoint is refused, or belongs to another target.
    """
    stored = _read(folder, "eagle3")
    config = eagle3_config(folder, target.config)
    check_same_tokens(config, target.config, extra_tokens=True)
    _check_width(stored, config.taps, config.target_hidden_size)
    drafter = on_meta(config.path, lambda: Eagle3(config))
    _borrow_(drafter, config.path, stored, target)
    same_vocabulary = config.draft_vocab_size == config.vocab_size
    absent = tuple(MAPS) if same_vocabulary and "d2t" not in stored else ()
    _complete_(drafter, folder, stored, (dtype, device), absent)
    if absent or drafter.d2t.is_meta:
        return drafter
    # d2t leads into the target's vocabulary, and t2d is its image
    path = stored["d2t"].path
    targets = drafter.to_target(torch.arange(config.draft_vocab_size, device=drafter.d2t.device))
    outside = targets[(targets < 0) | (targets >= config.vocab_size)].tolist()
    if outside:
        reason = f"`d2t` leads to target id {outside[0]}"
        raise ModelError(path, f"{reason}; the vocabulary has {config.vocab_size}")
    image = torch.zeros_like(drafter.t2d).index_fill_(0, targets, True)
    if int(image.sum()) != config.draft_vocab_size or not torch.equal(image, drafter.t2d):
        raise ModelError(path, "`d2t` and `t2d` do not describe the same tokens")
    return drafter


def load_eagle(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Eagle:
    """An EAGLE-1 or EAGLE-2 drafter in the published layout, for one target, whose embedding and
    head it uses unless the file has its own.

    Raises ModelError: the checkpoint is refused, or belongs to another target.
    """
    stored = _read(folder, "eagle")
    config = eagle_config(folder, target.config)
    check_same_tokens(config, target.config, extra_tokens=True)
    drafter = on_meta(config.path, lambda: Eagle(config))
    _borrow_(drafter, config.path, stored, target)
    return _complete_(drafter, folder, stored, (dtype, device))


def load_vanilla(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Decoder:
    """A small language model that drafts for a target: any decoder with the same tokens.

    Raises ModelError: the checkpoint is refused, or its tokens are not the target's.
    """
    check_same_tokens(decoder_config(folder), target.config)
    return load_target(folder, dtype, device)


def load_dflash(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> DFlashDraftModel:
    """A DFlash drafter in z-lab's or speculators' layout, for one target.

    The target's embedding and head are used; copies of them in the file must be equal to them.

    Raises ModelError: the checkpoint is refused, or belongs to another target.
    """
    stored = dict(_read(folder, "dflash"))
    config = dflash_config(folder, target.config)
    check_same_tokens(config, target.config, extra_tokens=True)
    if config.speculators:
        for name, original in ((EMBEDDING, target.embed), (LM_HEAD, target.lm_head.weight)):
            entry = stored.pop(name, None)
            if entry is None:
                continue
            shape = list(original.shape)
            if list(entry.shape) != shape:
                reason = f"`{name}` has shape {list(entry.shape)}, the target's is {shape}"
                raise ModelError(entry.path, reason)
            copy = read_tensor(entry.path, name)
            original = original.to_dense() if original.is_mkldnn else original
            if not original.is_meta and not torch.equal(copy, original.to(copy.device, copy.dtype)):
                raise ModelError(entry.path, f"`{name}` is not the target's")
    _check_layers(config.path, config.num_layers, stored)
    _check_width(stored, config.layer_ids, config.hidden_size)
    if len(target.share.vocabulary) < target.vocab_size:
        raise ModelError(config.path, "drafts with the target's head: only a share of it is here")
    ends = TargetEnds(target.embed, target.lm_head.weight)
    drafter = on_meta(config.path, lambda: DFlashDraftModel(config, ends))
    return _complete_(drafter, folder, stored, (dtype, device))


LOADERS: Mapping[str, Callable[..., Any]] = {
    "eagle": load_eagle,
    "eagle3": load_eagle3,
    "dflash": load_dflash,
}


def _views(module: Decoder | Drafter, absent: Container[str]) -> dict[str, Tensor]:
    """The published tensors of a module that a file must have."""
    return {name: view for name, view in module.published().items() if name not in absent}


def _complete_(
    drafter: Drafter,
    folder: Path,
    stored: Stored,
    place: tuple[torch.dtype, Device],
    absent: tuple[str, ...] = (),
) -> Drafter:
    """Compare a drafter without memory with its file, then fill it from the file."""
    if extra := compare(folder, stored, _views(drafter, absent)):
        raise ModelError(stored[extra[0]].path, f"unexpected tensors: {listed(extra)}")
    materialise(drafter, *place)
    fill(_views(drafter, absent), stored)
    return drafter.eval()


def _borrow_(drafter: EagleHead, path: Path, stored: Stored, target: Decoder) -> None:
    """Let the drafter share the target's embedding and head where its file lacks them."""
    drafter.owned = drafter.ends & stored.keys()
    for name, weight in ((EMBEDDING, target.embed), (LM_HEAD, target.lm_head.weight)):
        if name in drafter.ends - drafter.owned:
            module = name.partition(".")[0]
            needed = list(drafter.get_parameter(name).shape)
            shape = list(weight.shape)
            if needed != shape:
                reason = f"has no `{module}` of its own, and would need one of shape {needed}"
                raise ModelError(path, f"{reason}: the target's is {shape}")
            replace_(drafter.get_submodule(module), "weight", weight)


def _read(folder: Path, kind: str) -> Stored:
    """The tensors of a folder's files; ModelError if they are those of another kind of model: the
    tensors decide, as published configs name all kinds of architectures."""
    stored = entries(folder)
    if kind != "target":  # speculators keeps these of its target's
        stored = {n: e for n, e in stored.items() if not n.startswith("verifier_")}
    actual = kind_of(stored)
    if actual not in ("", kind):
        path = next(iter(stored.values())).path
        raise ModelError(path, f"is {KINDS[actual]}, not {KINDS[kind]}")
    layers = _num_layers(stored)
    if kind.startswith("eagle") and layers > 1:
        raise ModelError(folder, f"{KINDS[kind]} has 1 layer here, this one has {layers}")
    return stored


def _check_width(stored: Stored, taps: tuple[int, ...], hidden: int) -> None:
    """Compare the number of taps with the width of `fc`, the only trace of it in the weights."""
    entry = stored.get("fc.weight")
    if entry is None or len(entry.shape) != 2 or entry.shape[1] == len(taps) * hidden:
        return
    reason = f"`fc.weight` takes {entry.shape[1]} features, and the {len(taps)} taps {taps} of a"
    raise ModelError(entry.path, f"{reason} target of width {hidden} are {len(taps) * hidden}")


def _check_layers(path: Path, count: int, stored: Stored) -> None:
    """Before a module is built for every layer that the config claims."""
    layers = _num_layers(stored)
    if count > layers:
        raise ModelError(path, f"`num_hidden_layers` is {count}, the weights hold {layers} layers")


def _num_layers(stored: Stored) -> int:
    return len({match[1] for name in stored if (match := LAYER.match(name))})

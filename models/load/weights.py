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
    StoredTensor,
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
Place = tuple[torch.dtype, Device]
Drafter = TypeVar("Drafter", Eagle, Eagle3, DFlashDraftModel)


def load_target(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    *,
    scan: bool = True,
) -> Decoder:
    """A decoder from a Hugging Face folder (config.json and safetensors).

    Unexpected tensors are told in `Decoder.notes`. On the device `meta` all is checked but values.

    Args:
        scan: for values that are not finite.

    Raises:
        ModelError: the checkpoint is refused; the message names the file and the reason.
    """
    return load_share(folder, 0, 1, dtype, device, scan=scan)


def load_share(
    folder: Path,
    index: int,
    count: int,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    *,
    scan: bool = True,
    head: bool = False,
) -> Decoder:
    """What part `index` of `count` ranks needs of a target, for `sharded`; nothing else is read.

    Embedding and norms are whole, and so is a head that is the embedding.

    Args:
        head: the head is whole, for a drafter that may borrow it.

    Raises:
        ModelError: as for `load_target`. ValueError: there is no such part.
    """
    config = decoder_config(folder)
    stored = _read(folder, "target")
    _check_layers(config.path, config.num_layers, stored)
    tied = (LM_HEAD,) if config.tied and LM_HEAD not in stored else ()
    share = Share.of(config, index, count)
    if tied or head:
        share = share._replace(vocabulary=range(config.vocab_size))
    decoder = on_meta(config.path, lambda: Decoder(config, share))
    whole = decoder if count == 1 else on_meta(config.path, lambda: Decoder(config))
    extra = compare(folder, stored, _views(whole, tied))
    if tied:  # until the embedding has memory: the head shall have none of its own
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
    """An EAGLE-3 drafter in EAGLE's or speculators' layout, for one target.

    Args:
        target: lends its embedding, unless the file holds its own.

    Raises:
        ModelError: the checkpoint is refused, or belongs to another target.
    """
    stored = _read(folder, "eagle3")
    config = eagle3_config(folder, target.config)
    check_same_tokens(config, target.config, own=False)
    _check_width(stored, config.taps, config.target_hidden_size)
    drafter = on_meta(config.path, lambda: Eagle3(config))
    _borrow_(drafter, config.path, stored, target)
    same_vocabulary = config.draft_vocab_size == config.vocab_size
    absent = tuple(MAPS) if same_vocabulary and "d2t" not in stored else ()
    _complete_(drafter, folder, stored, (dtype, device), absent)
    if not absent:
        _check_maps(stored["d2t"].path, drafter)
    return drafter


def load_eagle(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Eagle:
    """An EAGLE-1 or EAGLE-2 drafter in the published layout, for one target.

    Args:
        target: lends its embedding and its head, unless the file holds its own.

    Raises:
        ModelError: the checkpoint is refused, or belongs to another target.
    """
    stored = _read(folder, "eagle")
    config = eagle_config(folder, target.config)
    check_same_tokens(config, target.config, own=False)
    drafter = on_meta(config.path, lambda: Eagle(config))
    _borrow_(drafter, config.path, stored, target)
    return _complete_(drafter, folder, stored, (dtype, device))


def load_vanilla(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Decoder:
    """A small language model that drafts for a target: any decoder with the same tokens.

    Raises:
        ModelError: the checkpoint is refused, or its tokens are not the target's.
    """
    check_same_tokens(decoder_config(folder), target.config)
    return load_target(folder, dtype, device)


def load_dflash(
    folder: Path, target: Decoder, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> DFlashDraftModel:
    """A DFlash drafter in z-lab's or speculators' layout, for one target.

    The target's embedding and head are used; copies of them in the file must be equal to them.

    Raises:
        ModelError: the checkpoint is refused, or belongs to another target.
    """
    stored = dict(_read(folder, "dflash"))
    config = dflash_config(folder, target.config)
    check_same_tokens(config, target.config, own=False)
    if config.speculators:
        for name, theirs in ((EMBEDDING, target.embed), (LM_HEAD, target.lm_head.weight)):
            _check_copy(name, stored.pop(name, None), theirs)
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
    """What a file has to hold of a module: all that is published but what may be absent."""
    return {name: view for name, view in module.published().items() if name not in absent}


def _complete_(
    drafter: Drafter,
    folder: Path,
    stored: Stored,
    place: Place,
    absent: tuple[str, ...] = (),
) -> Drafter:
    """A drafter without memory is compared with its file, and then filled from it."""
    if extra := compare(folder, stored, _views(drafter, absent)):
        raise ModelError(stored[extra[0]].path, f"unexpected tensors: {listed(extra)}")
    materialise(drafter, *place)
    fill(_views(drafter, absent), stored)
    return drafter.eval()


def _borrow_(drafter: EagleHead, path: Path, stored: Stored, target: Decoder) -> None:
    """Let the drafter share of the target's embedding and head what its own file lacks."""
    drafter.owned = drafter.ends & stored.keys()
    for name, theirs in ((EMBEDDING, target.embed), (LM_HEAD, target.lm_head.weight)):
        if name in drafter.ends - drafter.owned:
            module = name.partition(".")[0]
            own = list(drafter.get_parameter(name).shape)
            shape = list(theirs.shape)
            if own != shape:
                reason = f"has no `{module}` of its own, and would need one of shape {own}"
                raise ModelError(path, f"{reason}: the target's is {shape}")
            replace_(drafter.get_submodule(module), "weight", theirs)


def _read(folder: Path, kind: str) -> Stored:
    """The tensors of a folder's files; ModelError if they are those of another kind of model.

    What a model is stands in its tensors: published configs name all kinds of architectures.
    """
    stored = entries(folder)
    if kind != "target":  # speculators keeps these of its target's
        stored = {n: e for n, e in stored.items() if not n.startswith("verifier_")}
    found = kind_of(stored)
    if found not in ("", kind):
        raise ModelError(next(iter(stored.values())).path, f"is {KINDS[found]}, not {KINDS[kind]}")
    layers = _layers(stored)
    if kind.startswith("eagle") and layers > 1:
        raise ModelError(folder, f"{KINDS[kind]} has 1 layer here, this one has {layers}")
    return stored


def _check_copy(name: str, entry: StoredTensor | None, theirs: Tensor) -> None:
    """A copy of a target's tensor says nothing new, unless it is another target's."""
    if entry is None:
        return
    own = list(entry.shape)
    shape = list(theirs.shape)
    if own != shape:
        raise ModelError(entry.path, f"`{name}` has shape {own}, the target's is {shape}")
    copy = read_tensor(entry.path, name)
    theirs = theirs.to_dense() if theirs.is_mkldnn else theirs
    if not theirs.is_meta and not torch.equal(copy, theirs.to(copy.device, copy.dtype)):
        raise ModelError(entry.path, f"`{name}` is not the target's")


def _check_width(stored: Stored, taps: tuple[int, ...], hidden: int) -> None:
    """How many taps a drafter was trained on stands only in the width of what joins them."""
    entry = stored.get("fc.weight")
    if entry is None or len(entry.shape) != 2 or entry.shape[1] == len(taps) * hidden:
        return
    reason = f"`fc.weight` takes {entry.shape[1]} features, and the {len(taps)} taps {taps} of a"
    raise ModelError(entry.path, f"{reason} target of width {hidden} are {len(taps) * hidden}")


def _check_maps(path: Path, drafter: Eagle3) -> None:
    """d2t must lead into the target's vocabulary, and t2d must be its image."""
    config = drafter.config
    if drafter.d2t.is_meta:
        return
    targets = drafter.to_target(torch.arange(config.draft_vocab_size, device=drafter.d2t.device))
    outside = targets[(targets < 0) | (targets >= config.vocab_size)].tolist()
    if outside:
        reason = f"`d2t` leads to target id {outside[0]}"
        raise ModelError(path, f"{reason}; the vocabulary has {config.vocab_size}")
    image = torch.zeros_like(drafter.t2d).index_fill_(0, targets, True)
    if int(image.sum()) != config.draft_vocab_size or not torch.equal(image, drafter.t2d):
        raise ModelError(path, "`d2t` and `t2d` do not describe the same tokens")


def _check_layers(path: Path, count: int, stored: Stored) -> None:
    """Before a module is built for every layer that the config claims."""
    layers = _layers(stored)
    if count > layers:
        raise ModelError(path, f"`num_hidden_layers` is {count}, the weights hold {layers} layers")


def _layers(stored: Stored) -> int:
    return len({match[1] for name in stored if (match := LAYER.match(name))})

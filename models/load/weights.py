"""Checkpoints into modules: everything is compared by name, shape and dtype before it is built."""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..config import DecoderConfig, decoder_config
from ..decoder import Decoder
from ..drafters.dflash import DFlashDraftModel, TargetEnds
from ..drafters.dflash_config import dflash_config
from ..drafters.eagle3 import Eagle3
from ..drafters.eagle3_config import Eagle3Config, eagle3_config
from ..files import ModelError
from .checkpoint import FLOATS, StoredTensor, check_finite, entries, read_tensors
from .tokenizers import check_same_tokens

SHOWN = 8  # names in one message
LM_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"  # of drafters
LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,6})\.")
DERIVED = ".rotary_emb.inv_freq"  # old Llama files store what config.json says already
MAPS = {"d2t": {"I64", "I32"}, "t2d": {"BOOL"}}  # between vocabularies; all else is floats


Built = TypeVar("Built", bound=nn.Module)


def load_target(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    strict: bool = False,
    scan: bool = True,
) -> Decoder:
    """A decoder from a Hugging Face folder (config.json and safetensors).

    Args:
        strict: unexpected tensors are an error; otherwise they are told in `Decoder.notes`.
        scan: look for NaN and infinity in every weight.

    Raises:
        ModelError: the checkpoint is refused; the message names the file and the reason.
    """
    config = decoder_config(folder)
    stored = entries(folder)
    _check_layers(config.path, config.num_layers, stored)
    decoder = on_meta(config.path, lambda: Decoder(config))
    expected = {name: tuple(view.shape) for name, view in decoder.published().items()}
    tied = config.tied and LM_HEAD not in stored
    if tied:
        del expected[LM_HEAD]
    extra = compare(folder, stored, expected)
    if extra and strict:
        raise ModelError(stored[extra[0]].path, f"unexpected tensors: {listed(extra)}")
    materialise(decoder, dtype, device)
    if tied:
        decoder.lm_head = decoder.embed
    views = {name: view for name, view in decoder.published().items() if name in expected}
    fill(views, stored, scan=scan)
    decoder.notes = (f"unexpected tensors ignored: {listed(extra)}",) if extra else ()
    return decoder.eval()


def load_eagle3(
    folder: Path,
    target: Decoder,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    taps: tuple[int, ...] | None = None,
    scan: bool = True,
) -> Eagle3:
    """An EAGLE-3 drafter in EAGLE's or speculators' layout, for one target.

    Every tensor of the file must be known and every parameter filled: a forgotten norm would
    cost most of the acceptance without failing any test of the output.

    Args:
        target: lends its embedding, unless the file holds its own.
        taps: overrides the tap ids of the file and of EAGLE-3's rule.

    Raises:
        ModelError: the checkpoint is refused, or belongs to another target.
    """
    config = eagle3_config(folder, target.config, taps)
    stored = {n: e for n, e in entries(folder).items() if not n.startswith("verifier_")}
    _check_fc(config, stored)
    drafter = on_meta(config.path, lambda: Eagle3(config))
    drafter.owns_embedding = EMBEDDING in stored
    expected = {name: tuple(view.shape) for name, view in drafter.published().items()}
    same_vocabulary = config.draft_vocab_size == config.vocab_size
    maps = [] if same_vocabulary and "d2t" not in stored else list(MAPS)
    expected = {name: shape for name, shape in expected.items() if name not in MAPS or name in maps}
    extra = compare(folder, stored, expected)
    if extra:
        raise ModelError(stored[extra[0]].path, f"unexpected tensors: {listed(extra)}")
    materialise(drafter, dtype, device)
    if not drafter.owns_embedding:
        _share(drafter, target.embed)
    fill({n: v for n, v in drafter.published().items() if n in expected}, stored, scan=scan)
    if maps:
        _check_maps(stored["d2t"].path, drafter)
    return drafter.eval()


def load_vanilla(
    folder: Path,
    target: Decoder,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A small language model that drafts for a target: any decoder with the same tokens.

    Raises:
        ModelError: the checkpoint is refused, or its tokens are not the target's.
    """
    check_same_tokens(decoder_config(folder), target.config)
    return load_target(folder, dtype, device)


def load_dflash(
    folder: Path,
    target: Decoder,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    scan: bool = True,
) -> DFlashDraftModel:
    """A DFlash drafter in z-lab's or speculators' layout, for one target.

    Every tensor of the file must be known and every parameter filled. The target's embedding and
    head are used; copies of them in the file must be equal to them.

    Raises:
        ModelError: the checkpoint is refused, or belongs to another target.
    """
    config = dflash_config(folder, target.config)
    stored = entries(folder)
    if config.speculators:
        stored = {n: e for n, e in stored.items() if not n.startswith("verifier_")}
        for name, theirs in ((EMBEDDING, target.embed), (LM_HEAD, target.lm_head)):
            _check_copy(name, stored.pop(name, None), theirs)
    _check_layers(config.path, config.num_layers, stored)
    _check_width(stored, config.layer_ids, config.hidden_size)
    ends = TargetEnds(target.embed, target.lm_head)
    drafter = on_meta(config.path, lambda: DFlashDraftModel(config, ends))
    expected = {name: tuple(view.shape) for name, view in drafter.published().items()}
    extra = compare(folder, stored, expected)
    if extra:
        raise ModelError(stored[extra[0]].path, f"unexpected tensors: {listed(extra)}")
    materialise(drafter, dtype, device)
    fill(drafter.published(), stored, scan=scan)
    return drafter.eval()


def _check_copy(name: str, entry: StoredTensor | None, theirs: Tensor) -> None:
    """A copy of a target's tensor says nothing new, unless it is another target's."""
    if entry is None:
        return
    if entry.shape != tuple(theirs.shape):
        raise ModelError(
            entry.path,
            f"`{name}` has shape {list(entry.shape)}, the target's is {list(theirs.shape)}",
        )
    (copy,) = read_tensors(entry.path, [name])
    if not torch.equal(copy, theirs.to(copy.device, copy.dtype)):
        raise ModelError(entry.path, f"`{name}` is not the target's")


def _check_fc(config: Eagle3Config, stored: Mapping[str, StoredTensor]) -> None:
    if "layers.0.self_attn.q_proj.weight" in stored and not config.speculators:
        path = stored["layers.0.self_attn.q_proj.weight"].path
        raise ModelError(path, "is an EAGLE-1 or EAGLE-2 drafter, not EAGLE-3")
    _check_width(stored, config.taps, config.target_hidden_size)


def _check_width(stored: Mapping[str, StoredTensor], taps: tuple[int, ...], hidden: int) -> None:
    """How many taps a drafter was trained on stands only in the width of what joins them."""
    entry = stored.get("fc.weight")
    if entry is None or len(entry.shape) != 2 or entry.shape[1] == len(taps) * hidden:
        return
    raise ModelError(
        entry.path,
        f"`fc.weight` takes {entry.shape[1]} features, and the {len(taps)} taps {taps} of a target"
        f" of width {hidden} are {len(taps) * hidden}",
    )


def _share(drafter: Eagle3, embedding: nn.Parameter) -> None:
    own, theirs = list(drafter.embed_tokens.weight.shape), list(embedding.shape)
    if own != theirs:
        raise ModelError(
            drafter.config.path,
            f"has no `embed_tokens` of its own, and would need one of shape {own}: the target's"
            f" is {theirs}",
        )
    drafter.embed_tokens.weight = embedding


def _check_maps(path: Path, drafter: Eagle3) -> None:
    """d2t must lead into the target's vocabulary, and t2d must be its image."""
    config = drafter.config
    targets = drafter.to_target(torch.arange(config.draft_vocab_size, device=drafter.d2t.device))
    outside = targets[(targets < 0) | (targets >= config.vocab_size)].tolist()
    if outside:
        raise ModelError(
            path, f"`d2t` leads to target id {outside[0]}; the vocabulary has {config.vocab_size}"
        )
    image = torch.zeros_like(drafter.t2d).index_fill_(0, targets, True)
    if int(image.sum()) != config.draft_vocab_size or not torch.equal(image, drafter.t2d):
        raise ModelError(path, "`d2t` and `t2d` do not describe the same tokens")


def on_meta(path: Path, build: Callable[[], Built]) -> Built:
    """The module without memory: its names and shapes are wanted first."""
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # torch and transformers, given sizes and settings of a file
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(path, f"describes no possible model ({cause})") from None


def _check_layers(path: Path, claimed: int, stored: Mapping[str, StoredTensor]) -> None:
    """Before a module is built for every layer that the config claims."""
    held = {int(found[1]) for name in stored if (found := LAYER.match(name))}
    if claimed > len(held):
        raise ModelError(
            path, f"`num_hidden_layers` is {claimed}, the weights hold {len(held)} layers"
        )


def compare(
    folder: Path, stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Raise ModelError for missing, misshapen and non-float tensors; return unexpected names."""
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ModelError(folder, f"{len(missing)} tensors are missing: {listed(missing)}")
    for name, shape in expected.items():
        entry = stored[name]
        if entry.dtype not in MAPS.get(name, FLOATS):
            raise ModelError(entry.path, f"`{name}` is {entry.dtype}: unsupported quantisation")
        if entry.shape != shape:
            raise ModelError(
                entry.path,
                f"`{name}` has shape {list(entry.shape)}, config.json makes it {list(shape)}",
            )
    return [n for n in stored if n not in expected and not n.endswith(DERIVED)]


def materialise(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a module built on `meta` real parameters, all NaN so that an unfilled one is seen."""
    for part in module.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            empty = torch.full(value.shape, torch.nan, dtype=dtype, device=device)
            setattr(part, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def fill(views: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], *, scan: bool) -> None:
    """Copy the stored tensors into the views, file by file."""
    order = sorted(views, key=lambda name: (stored[name].path, name))
    for path, group in groupby(order, key=lambda name: stored[name].path):
        for name in group:
            (value,) = read_tensors(path, [name])
            value = value.to(views[name].dtype) if value.is_floating_point() else value
            if scan:
                check_finite(path, name, value)
            with torch.no_grad():
                views[name].copy_(value)


def check_tokenizer(config: DecoderConfig, max_id: int) -> None:
    """Raise ModelError if the tokenizer has an id that has no embedding row."""
    if max_id >= config.vocab_size:
        raise ModelError(
            config.path,
            f"the tokenizer's highest id is {max_id}, the embedding has {config.vocab_size} rows",
        )


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    rest = len(every) - SHOWN
    return ", ".join(every[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

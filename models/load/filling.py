"""Stored tensors into modules: all is compared by name, shape and dtype before it is copied."""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..files import ModelError
from .checkpoint import FLOATS, StoredTensor, check_finite, read_tensors

SHOWN = 8  # names in one message
DERIVED = ".rotary_emb.inv_freq"  # old Llama files store what config.json says already
MAPS = {"d2t": {"I64", "I32"}, "t2d": {"BOOL"}}  # between vocabularies; all else is floats

Stored = Mapping[str, StoredTensor]
Built = TypeVar("Built", bound=nn.Module)


def on_meta(path: Path, build: Callable[[], Built]) -> Built:
    """The module without memory: its names and shapes are wanted first."""
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # torch and transformers, given sizes and settings of a file
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(path, f"describes no possible model ({cause})") from None


def compare(
    folder: Path, stored: Stored, views: Mapping[str, Tensor], *, strict: bool
) -> list[str]:
    """Raise ModelError for missing, misshapen and non-float tensors; return unexpected names.

    Args:
        strict: raise for unexpected ones too.
    """
    missing = [name for name in views if name not in stored]
    if missing:
        raise ModelError(folder, f"{len(missing)} tensors are missing: {listed(missing)}")
    for name, view in views.items():
        entry, shape = stored[name], tuple(view.shape)
        if entry.dtype not in MAPS.get(name, FLOATS):
            raise ModelError(entry.path, f"`{name}` is {entry.dtype}: unsupported quantisation")
        if entry.shape != shape:
            raise ModelError(
                entry.path,
                f"`{name}` has shape {list(entry.shape)}, config.json makes it {list(shape)}",
            )
    extra = [n for n in stored if n not in views and not n.endswith(DERIVED)]
    if extra and strict:
        raise ModelError(stored[extra[0]].path, f"unexpected tensors: {listed(extra)}")
    return extra


def materialise(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a module built on `meta` real parameters, all NaN so that an unfilled one is seen."""
    for part in module.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            if not value.is_meta:  # the target's own
                continue
            empty = torch.full(value.shape, torch.nan, dtype=dtype, device=device)
            setattr(part, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def fill(views: Mapping[str, Tensor], stored: Stored, *, scan: bool) -> None:
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


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    rest = len(every) - SHOWN
    return ", ".join(every[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

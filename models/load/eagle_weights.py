"""EAGLE-1 and EAGLE-2 checkpoints, which share one format, into their module."""

from collections.abc import Mapping
from pathlib import Path

import torch

from ..decoder import Decoder
from ..drafters.eagle import EMBEDDING, ENDS, LM_HEAD, Eagle
from ..drafters.eagle_config import eagle_config
from ..files import ModelError
from .checkpoint import StoredTensor, entries
from .weights import compare, fill, listed, materialise, on_meta


def load_eagle(
    folder: Path,
    target: Decoder,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    scan: bool = True,
) -> Eagle:
    """An EAGLE-1 or EAGLE-2 drafter in the published layout, for one target.

    Every tensor of the file must be known and every parameter filled.

    Args:
        target: lends its embedding and its head, unless the file holds its own.

    Raises:
        ModelError: the checkpoint is refused, or belongs to another target.
    """
    config = eagle_config(folder, target.config)
    stored = entries(folder)
    _check_kind(stored)
    drafter = on_meta(config.path, lambda: Eagle(config))
    drafter.owned = ENDS & stored.keys()
    expected = {name: tuple(view.shape) for name, view in drafter.published().items()}
    extra = compare(folder, stored, expected)
    if extra:
        raise ModelError(stored[extra[0]].path, f"unexpected tensors: {listed(extra)}")
    materialise(drafter, dtype, device)
    if EMBEDDING not in drafter.owned:
        drafter.embed_tokens.weight = target.embed
    if LM_HEAD not in drafter.owned:
        drafter.lm_head.weight = target.lm_head
    fill(drafter.published(), stored, scan=scan)
    return drafter.eval()


def _check_kind(stored: Mapping[str, StoredTensor]) -> None:
    """The other member of the family, whose config.json may look the same."""
    other = next((name for name in stored if name.startswith("midlayer.")), None)
    if other is not None:
        path = stored[other].path
        raise ModelError(path, "is an EAGLE-3 drafter, not EAGLE-1 or EAGLE-2")

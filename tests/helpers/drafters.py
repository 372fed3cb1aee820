"""Tiny drafters of every kind for the tiny targets: models that often agree with them, or not."""

import shutil
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from helpers.support import Tiny
from helpers.tiny import write_tiny_dflash, write_tiny_eagle, write_tiny_medusa, write_tiny_mtp
from specsot.engine.models import Models, with_drafter

KINDS = (
    "eagle3",
    "eagle2",
    "eagle1",
    "dflash",
    "vanilla",
    "adaptive",
    "ngram",
    "recycle",
    "suffix",
    "medusa",
    "mtp",
)
COSTS = "drafter.costs={target: {1: 2.0, 64: 9.0}, drafter: {1: 0.2, 64: 1.0}, overhead: 1.0}"
SETTINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "eagle3": (
        ("drafter.num_draft_tokens=6", "drafter.draft_depth=3", "drafter.top_k=4"),
        (
            "drafter.num_draft_tokens=9",
            "drafter.draft_depth=4",
            "drafter.top_k=3",
            "drafter.rows_per_round=10",
        ),
        (
            "drafter.num_draft_tokens={1: 9, 3: 4}",
            "drafter.draft_depth=3",
            "drafter.top_k=2",
            "drafter.with=[recycle, suffix]",
        ),
        (
            "drafter.num_draft_tokens={1: 9, 3: 4}",
            "drafter.draft_depth=3",
            "drafter.top_k=2",
            "drafter.or=[recycle, {kind: suffix, num_draft_tokens: {1: 5, 3: 2}}, none]",
        ),
    ),
    "eagle2": (
        ("drafter.num_draft_tokens={1: 9, 3: 4}", "drafter.draft_depth=4", "drafter.top_k=3"),
        ("drafter.num_draft_tokens={1: 6, 2: 3, 3: 0}", "drafter.with=[recycle]"),
    ),
    "eagle1": ((), ("drafter.tree=[[1], [0], [1, 2], [0, 0], [1, 2, 0], [0, 0, 1]]",)),
    "dflash": (
        ("drafter.block_size=4",),
        ("drafter.grow=ddtree", "drafter.num_draft_tokens=6", "drafter.block_size=5"),
    ),
    "vanilla": (
        ("drafter.gamma=3",),
        ("drafter.gamma_policy=egag", "drafter.gamma_max=4", "drafter.egag_ema_beta=0.5"),
        ("drafter.gamma=3", "drafter.or=[{kind: recycle, num_draft_tokens: auto}]", COSTS),
    ),
    "adaptive": (
        ("drafter.gamma_policy=heuristic", "drafter.gamma=2", "drafter.gamma_max=5"),
        ("drafter.gamma_policy=svip", "drafter.gamma=4"),
        ("drafter.gamma_policy=confidence", "drafter.gamma=4"),
        ("drafter.gamma_policy=adaedl", "drafter.gamma=4"),
    ),
    "ngram": (
        ("drafter.width=1",),
        ("drafter.num_draft_tokens=5", "drafter.draft_depth=3"),
    ),
    "recycle": (
        (),
        (
            "drafter.num_draft_tokens=7",
            "drafter.draft_depth=3",
            "drafter.filler_top_k=3",
            "drafter.most_contexts=16",
        ),
    ),
    "suffix": (
        (),
        ("drafter.num_draft_tokens=5", "drafter.draft_depth=3", "drafter.most_tokens=90"),
    ),
    "mtp": (("drafter.num_draft_tokens=6", "drafter.draft_depth=3", "drafter.top_k=3"),),
    "medusa": (
        ("drafter.num_draft_tokens=6",),
        ("drafter.num_draft_tokens={1: 9, 3: 4, 4: 0}", "drafter.draft_depth=2"),
    ),
}
"""Per kind: settings that differ in what they do."""
CHOOSING = {
    "eagle3": ("drafter.num_draft_tokens=auto", "drafter.draft_depth=4", "drafter.top_k=3", COSTS),
    "dflash": (
        "drafter.grow=ddtree",
        "drafter.num_draft_tokens=auto",
        "drafter.block_size=5",
        COSTS,
    ),
    "vanilla": ("drafter.gamma_policy=cost", "drafter.gamma_max=6", COSTS),
    "ngram": ("drafter.num_draft_tokens=auto", "drafter.most_nodes=9", COSTS),
    "recycle": ("drafter.num_draft_tokens=auto", "drafter.most_nodes=9", COSTS),
    "suffix": ("drafter.num_draft_tokens=auto", "drafter.most_nodes=9", COSTS),
    "medusa": ("drafter.num_draft_tokens=auto", "drafter.most_nodes=9", COSTS),
}
"""Settings that leave it to the rounds how much they draft."""
for _kind, _sets in CHOOSING.items():
    SETTINGS[_kind] = (*SETTINGS[_kind], _sets)
NOISE = 0.4


def settings_of(kind: str, number: int) -> tuple[str, ...]:
    return (f"drafter.kind={kind}", *SETTINGS[kind][number % len(SETTINGS[kind])])


def drafting(made: Tiny, kind: str) -> Models:
    if kind in ("eagle3", "ngram", "recycle", "suffix"):
        return made.models
    return with_drafter(made.models, _folder(made.folder, kind), kind)


@cache
def _folder(target: Path, kind: str) -> Path:
    folder = target.parent / kind
    write = {"eagle2": write_tiny_eagle, "eagle1": write_tiny_eagle, "dflash": write_tiny_dflash}
    write |= {"medusa": write_tiny_medusa, "mtp": write_tiny_mtp}
    return write[kind](folder, target) if kind in write else _disturbed(folder, target)


def _disturbed(folder: Path, target: Path) -> Path:
    """The target itself with noise: right often enough, and wrong often enough."""
    shutil.copytree(target, folder)
    file, draw = folder / "model.safetensors", torch.Generator().manual_seed(3)
    weights = load_file(file)
    for name, value in weights.items():
        if "layers" in name and value.ndim == 2:
            noise = torch.randn(value.shape, generator=draw, dtype=torch.float32)
            weights[name] = value + (NOISE * value.float().std() * noise).to(value.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return folder

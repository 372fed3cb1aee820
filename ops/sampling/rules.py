"""Sampling settings of requests as columns: a value per active branch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .settings import TIES, SamplingRules


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The rules of several branches (or rows) side by side; S stands for either.

    Per branch: the numbers of `SamplingRules`, float64 or int64; bias_ids_SC, biases_SC padded
    with (0, 0); stop_ids_SC, stop_biases_SC padded likewise, -inf for real stop ids; forced_SC
    padded with -1.

    Host facts, the same for all: depth, how many of the best scores the filters have to look at
    (0 for no filter); most_kept, how many ids a drawn row keeps at most; what is asked for at all.
    No row's result depends on its neighbours.
    """

    greedy_S: Tensor
    temperature_S: Tensor
    scale_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    repetition_S: Tensor
    presence_S: Tensor
    frequency_S: Tensor
    bias_ids_SC: Tensor
    biases_SC: Tensor
    stop_ids_SC: Tensor
    stop_biases_SC: Tensor
    least_new_S: Tensor
    forced_SC: Tensor
    depth: int
    most_kept: int
    any_greedy: bool
    all_greedy: bool
    any_min_p: bool
    penalises: bool
    looks_back: bool

    def of_rows(self, branch_R: Tensor) -> "SamplingColumns":
        """The columns of rows that belong to these branches."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        picks: dict[str, Any] = {
            name: value.index_select(0, branch_R)
            for name, value in values
            if isinstance(value, Tensor)
        }
        return replace(self, **picks)


def columns(
    rules: Sequence[SamplingRules],
    stop_ids: Sequence[Collection[int]],
    vocabulary: int,
    device: torch.device,
) -> SamplingColumns:
    """The columns of these branches; built when the set of active branches changes.

    Args:
        stop_ids: of each branch, held back by `min_new_tokens`.
    """
    drawn = [one for one in rules if not one.greedy]

    def floats(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(device)

    stops = [[(stop, -torch.inf) for stop in sorted(some)] for some in stop_ids]
    bias_ids_SC, biases_SC = _pairs([one.biases for one in rules])
    stop_ids_SC, stop_biases_SC = _pairs(stops)
    scales = [
        1.0 if r.greedy or r.filter_order == "filters_first" else r.temperature for r in rules
    ]
    return SamplingColumns(
        greedy_S=torch.tensor([one.greedy for one in rules]).to(device),
        temperature_S=floats([one.temperature or 1.0 for one in rules]),
        scale_S=floats(scales),
        top_k_S=torch.tensor([one.top_k for one in rules]).to(device),
        top_p_S=floats([one.top_p for one in rules]),
        min_p_S=floats([one.min_p for one in rules]),
        repetition_S=floats([one.repetition_penalty for one in rules]),
        presence_S=floats([one.presence_penalty for one in rules]),
        frequency_S=floats([one.frequency_penalty for one in rules]),
        bias_ids_SC=bias_ids_SC.to(device),
        biases_SC=biases_SC.to(device),
        stop_ids_SC=stop_ids_SC.to(device),
        stop_biases_SC=stop_biases_SC.to(device),
        least_new_S=torch.tensor([one.min_new_tokens for one in rules]).to(device),
        forced_SC=_padded([one.forced for one in rules], -1).to(device),
        depth=_depth(drawn, vocabulary),
        most_kept=max((_most_kept(one, vocabulary) for one in drawn), default=1),
        any_greedy=len(drawn) < len(rules),
        all_greedy=not drawn,
        any_min_p=any(one.min_p for one in drawn),
        penalises=any(one.penalises for one in rules),
        looks_back=any(one.looks_back for one in rules),
    )


def _most_kept(rules: SamplingRules, vocabulary: int) -> int:
    return min(rules.top_k + TIES, vocabulary) if rules.top_k else vocabulary


def _depth(drawn: Sequence[SamplingRules], vocabulary: int) -> int:
    """Top p alone needs the whole vocabulary in order; behind top k only what that leaves."""
    filtered = [one for one in drawn if 0 < one.top_k < vocabulary or one.top_p < 1]
    return max((_most_kept(one, vocabulary) for one in filtered), default=0)


def _pairs(rows: Sequence[Sequence[tuple[int, float]]]) -> tuple[Tensor, Tensor]:
    """(ids int64, values float64), each [S, C], padded with (0, 0)."""
    return (
        _padded([[token for token, _ in row] for row in rows], 0),
        _padded([[value for _, value in row] for row in rows], 0.0),
    )


def _padded(rows: Sequence[Sequence[float]], empty: float) -> Tensor:
    """int64 [S, C], or float64 if `empty` is a float."""
    most = max((len(row) for row in rows), default=0)
    full = [[*row, *[empty] * (most - len(row))] for row in rows]
    dtype = torch.float64 if isinstance(empty, float) else torch.int64
    return torch.tensor(full, dtype=dtype).view(len(rows), most)

"""Logits processors: from the logits of a model to the scores that tokens are drawn from.

The order is that of transformers. Rows at temperature 0 keep all their scores. Of entries that tie
for the last places, top p keeps the lowest ids, so that the kept set does not depend on a sort."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .coins import ranked
from .settings import TIES, SamplingRules


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The rules of several branches (or rows; S is either) as columns, float64 or int64;
    biases are padded with (0, 0), forced tokens with -1; stop ids have a bias of -inf. depth: best
    scores that the filters read; most_kept: ids that a drawn row keeps; settings that occur."""

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

    def of_rows(self, branch_R: Tensor) -> "SamplingColumns":
        """The columns of rows that belong to these branches."""
        values = [(column.name, getattr(self, column.name)) for column in fields(self)]
        tensors = [(name, value) for name, value in values if isinstance(value, Tensor)]
        picks: dict[str, Any] = {name: v.index_select(0, branch_R) for name, v in tensors}
        return replace(self, **picks)


def columns(
    rules: Sequence[SamplingRules],
    stop_ids: Sequence[Collection[int]],
    vocabulary: int,
    device: torch.device,
) -> SamplingColumns:
    """The columns of these branches; `stop_ids` of each are withheld by `min_new_tokens`."""
    drawn = [rule for rule in rules if not rule.greedy]
    # Top p alone needs the whole vocabulary in order; after top k only the kept ids.
    kept = [min(r.top_k + TIES, vocabulary) if r.top_k else vocabulary for r in drawn]
    filters = [0 < rule.top_k < vocabulary or rule.top_p < 1 for rule in drawn]
    stops = [[(stop, -torch.inf) for stop in sorted(some)] for some in stop_ids]

    def floats(values: Iterable[float]) -> Tensor:
        return torch.tensor([*values], dtype=torch.float64, device=device)

    def ints(values: Iterable[int]) -> Tensor:
        return torch.tensor([*values], device=device)

    def table(rows: Sequence[Sequence[float]], empty: float, dtype: torch.dtype) -> Tensor:
        most = max((len(row) for row in rows), default=0)
        full = [[*row, *[empty] * (most - len(row))] for row in rows]
        return torch.tensor(full, dtype=dtype).view(len(rows), most).to(device)

    def pairs(rows: Sequence[Sequence[tuple[int, float]]]) -> tuple[Tensor, Tensor]:
        ids = [[token for token, _ in row] for row in rows]
        values = [[value for _, value in row] for row in rows]
        return table(ids, 0, torch.int64), table(values, 0.0, torch.float64)

    bias_ids_SC, biases_SC = pairs(
        [(*rule.logit_bias, *((token, -torch.inf) for token in rule.banned)) for rule in rules]
    )
    stop_ids_SC, stop_biases_SC = pairs(stops)
    return SamplingColumns(
        greedy_S=ints(rule.greedy for rule in rules),
        temperature_S=floats(rule.temperature or 1.0 for rule in rules),
        scale_S=floats(rule.scale for rule in rules),
        top_k_S=ints(rule.top_k for rule in rules),
        top_p_S=floats(rule.top_p for rule in rules),
        min_p_S=floats(rule.min_p for rule in rules),
        repetition_S=floats(rule.repetition_penalty for rule in rules),
        presence_S=floats(rule.presence_penalty for rule in rules),
        frequency_S=floats(rule.frequency_penalty for rule in rules),
        bias_ids_SC=bias_ids_SC,
        biases_SC=biases_SC,
        stop_ids_SC=stop_ids_SC,
        stop_biases_SC=stop_biases_SC,
        least_new_S=ints(rule.min_new_tokens for rule in rules),
        forced_SC=table([rule.forced for rule in rules], -1, torch.int64),
        depth=max((most for most, cuts in zip(kept, filters, strict=True) if cuts), default=0),
        most_kept=max(kept, default=1),
        any_greedy=len(drawn) < len(rules),
        all_greedy=not drawn,
        any_min_p=any(rule.min_p for rule in drawn),
        penalises=any(rule.penalises for rule in rules),
    )


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the next tokens of S branches are drawn; a round without one takes the best tokens.

    key_S: int64, of each branch's coins. seen_SV: bool, ids in prompt or answer; counts_SV: int32,
    occurrences in the answer; [S, 0] without penalties. answered_S: int64, tokens of the answer
    that are counted: not a tree's root token, which is on every path."""

    rules: SamplingColumns
    key_S: Tensor
    seen_SV: Tensor
    counts_SV: Tensor
    answered_S: Tensor


def take_in_(seen_SV: Tensor, counts_SV: Tensor, branch_C: Tensor, ids_C: Tensor) -> None:
    """Count committed answer tokens: ids_C[i] was written by branch_C[i]."""
    seen_SV[branch_C, ids_C] = True
    one_C = torch.ones_like(ids_C, dtype=counts_SV.dtype)
    counts_SV.index_put_((branch_C, ids_C), one_C, accumulate=True)


def process(
    logits_RV: Tensor, sampler: Sampler, branch_R: Tensor, *, tokens_RC: Tensor, path_RC: Tensor
) -> Tensor:
    """Scores [R, V] that tokens are drawn from, float32 (float64 for float64): log-probabilities up
    to a constant per row. branch_R: int64. tokens_RC, path_RC: int64 and bool, the tree's tokens
    and which of them are on the row's path (its own token included); [R, 0] outside trees."""
    rules = sampler.rules
    rows = rules.of_rows(branch_R)
    scores_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    scores_RV = _biased(scores_RV, rows.bias_ids_SC, rows.biases_SC)
    if rules.penalises:
        on_path_RV = torch.zeros_like(scores_RV, dtype=torch.int32)
        tokens_RC = tokens_RC.clamp(min=0)  # padding nodes have -1
        on_path_RV.scatter_add_(1, tokens_RC, path_RC.int())
        seen_RV = sampler.seen_SV.index_select(0, branch_R) | (on_path_RV > 0)
        counts_RV = on_path_RV + sampler.counts_SV.index_select(0, branch_R)
        kind = scores_RV.dtype
        repetition_R1 = rows.repetition_S.to(kind)[:, None]
        less_RV = torch.where(scores_RV < 0, scores_RV * repetition_R1, scores_RV / repetition_R1)
        scores_RV = torch.where(seen_RV, less_RV, scores_RV)
        present_RV = (counts_RV > 0).to(kind) * rows.presence_S.to(kind)[:, None]
        repeats_RV = counts_RV.to(kind) * rows.frequency_S.to(kind)[:, None]
        scores_RV = scores_RV - repeats_RV - present_RV
    answered_R = sampler.answered_S.index_select(0, branch_R) + path_RC.sum(1)
    early_R1 = (answered_R < rows.least_new_S)[:, None]
    biases_RC = torch.where(early_R1, rows.stop_biases_SC, 0.0)
    scores_RV = _biased(scores_RV, rows.stop_ids_SC, biases_RC)
    if most := rows.forced_SC.shape[1]:  # only this token, with score 0
        answered_R1 = answered_R[:, None]
        due_R1 = rows.forced_SC.gather(1, answered_R1.clamp(max=most - 1))
        only_RV = torch.full_like(scores_RV, -torch.inf).scatter(1, due_R1.clamp(min=0), 0.0)
        scores_RV = only_RV.where((due_R1 >= 0) & (answered_R1 < most), scores_RV)
    return scores_RV if rules.all_greedy else warped(scores_RV, rows)


def choose(scores_RV: Tensor, rules: SamplingColumns, branch_R: Tensor, key_R: Tensor) -> Tensor:
    """int64 [R]: the best id of greedy rows (lowest of equals), of others a draw by `key_R`."""
    if rules.all_greedy:
        return scores_RV.argmax(-1)
    drawn_R = ranked(scores_RV, key_R, rules.most_kept, 1).squeeze(1)
    if not rules.any_greedy:
        return drawn_R
    return torch.where(rules.greedy_S.index_select(0, branch_R), scores_RV.argmax(-1), drawn_R)


def probabilities(scores_RV: Tensor, greedy_R: Tensor) -> Tensor:
    """[R, V]: softmax of the scores; one-hot at the best id (lowest of equals) for greedy rows."""
    one_hot_RV = torch.zeros_like(scores_RV).scatter(1, scores_RV.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy_R[:, None], one_hot_RV, scores_RV.softmax(-1))


def warped(scores_RV: Tensor, rows: SamplingColumns) -> Tensor:
    """Temperature and filters; greedy rows stay as they are."""
    kind = scores_RV.dtype
    judged_RV = scores_RV / rows.scale_S.to(kind)[:, None]
    keep_RV = rows.greedy_S[:, None] | _kept_by_rank(judged_RV, rows)
    if rows.any_min_p:
        low_R1 = judged_RV.amax(-1, keepdim=True) + rows.min_p_S.log().to(kind)[:, None]
        keep_RV = keep_RV & ((judged_RV >= low_R1) | rows.greedy_S[:, None])
    return (scores_RV / rows.temperature_S.to(kind)[:, None]).where(keep_RV, -torch.inf)


def _kept_by_rank(z_RV: Tensor, rows: SamplingColumns) -> Tensor:
    """bool [R, V]: the ids that top k and then top p keep. Only the `depth` highest values are
    sorted; their ids follow from a comparison with the last value that stays."""
    size = z_RV.shape[1]
    depth = rows.depth
    if depth == 0:
        return torch.ones_like(z_RV, dtype=torch.bool)
    top_RK = z_RV.topk(depth).values if depth < size else z_RV.sort(descending=True).values
    no_k_R = (rows.top_k_S == 0) | (rows.top_k_S >= size)
    place_R = torch.where(no_k_R, size, rows.top_k_S).clamp(max=depth) - 1
    most_R = torch.where(no_k_R, size, rows.top_k_S + TIES)
    rank_K = torch.arange(depth, device=z_RV.device)
    tied_RK = (top_RK >= top_RK.gather(1, place_R[:, None])) & (rank_K < most_R[:, None])
    # top p keeps entries with less than p of the mass before them; the first always stays
    mass_RK = (top_RK - top_RK[:, :1]).exp().where(tied_RK, 0.0).double()
    through_RK = mass_RK.cumsum(1)
    nucleus_RK = through_RK - mass_RK < rows.top_p_S[:, None] * through_RK[:, -1:]
    nucleus_RK[:, 0] = True
    stays_RK = tied_RK & (nucleus_RK | (rows.top_p_S >= 1)[:, None])
    cut_R1 = top_RK.gather(1, stays_RK.sum(1, keepdim=True) - 1)
    room_R1 = (stays_RK & (top_RK == cut_R1)).sum(1, keepdim=True)
    equal_RV = z_RV == cut_R1
    first_RV = equal_RV & (equal_RV.cumsum(1, dtype=torch.int32) <= room_R1)
    free_R1 = (no_k_R & (rows.top_p_S >= 1))[:, None]
    return (z_RV > cut_R1) | first_RV | free_R1


def _biased(scores_RV: Tensor, ids_RC: Tensor, biases_RC: Tensor) -> Tensor:
    if ids_RC.shape[1] == 0:
        return scores_RV
    return scores_RV.scatter_add(1, ids_RC, biases_RC.to(scores_RV.dtype))

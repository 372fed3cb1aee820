"""Beam search on the device: the live continuations, the finished hypotheses, and the end.

The arithmetic is that of transformers 5 (`GenerationMixin._beam_search`), step for step in float32:
sums of log-probabilities, divided by length ** `length_penalty` once a hypothesis has ended."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from .registry import op
from .types import Rows

NONE = -1.0e9  # added to the sum of what must not live on


class Beams(NamedTuple):
    """The state of each search before a step; W beams, best first: float32, the live beams' sums of
    log-probabilities, the best hypotheses' scores (-inf for none); bool, whether there is one."""

    running_SW: Tensor
    kept_SW: Tensor
    ended_SW: Tensor


@dataclass(frozen=True, slots=True)
class Searches:
    """The searches of a forward: those that had beams in it, then new ones. int64: tokens of a
    hypothesis after this step, the maximum of that, and stop ids, padded with -1."""

    beams: Beams
    length_S1: Tensor
    budget_S1: Tensor
    stops_SE: Tensor


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choices of a step (int64), best first: the beam that each new beam continues, and its
    token; the source of each finished hypothesis, the old one w, or candidate W + c; the same of
    all candidates; the state afterwards; and whether the search has ended."""

    parent_SW: Tensor
    token_SW: Tensor
    origin_SW: Tensor
    parent_SC: Tensor
    token_SC: Tensor
    beams: Beams
    over_S: Tensor


def first_beams(num_beams: int, device: torch.device) -> Beams:
    """A new search: one live beam, so that the first step has no duplicates."""
    running_SW = torch.full((1, num_beams), NONE, device=device)
    running_SW[:, 0] = 0.0
    kept_SW = torch.full((1, num_beams), -inf, device=device)
    return Beams(running_SW, kept_SW, torch.zeros_like(kept_SW).bool())


@op("beam.select", writes="chosen", needs="beam")
def select(
    rows: Rows,
    logits: Tensor,
    searches: Searches,
    *,
    num_beams: int,
    length_penalty: float,
    early_stopping: bool | str,
) -> Chosen:
    """Keep the best continuations as beams, and the best finished hypotheses; logits: [R, V], a row
    for each live beam, then one for each new search. There are enough candidates for W live beams
    even if all stop ids are among them."""
    beams = searches.beams
    vocab = logits.shape[1]
    log_RV = logits.float().log_softmax(-1)
    trees_SWV = log_RV[: rows.tree_rows].view(rows.trees, num_beams, vocab)
    first_SWV = log_RV[rows.tree_rows :, None].expand(-1, num_beams, -1)  # they all see the prompt
    sums_SWV = torch.cat([trees_SWV, first_SWV]) + beams.running_SW[:, :, None]
    best = sums_SWV.flatten(1).topk(max(2, 1 + searches.stops_SE.shape[1]) * num_beams)
    parent_SC = best.indices // vocab
    token_SC = best.indices % vocab
    stops_SC = (token_SC[:, :, None] == searches.stops_SE[:, None]).any(-1)
    length_S1 = searches.length_S1
    stops_SC = stops_SC | (length_S1 >= searches.budget_S1)
    running_SC = best.values + stops_SC.float() * NONE
    on_SW = running_SC.topk(num_beams).indices
    # only the first W candidates can finish; the others are possible continuations
    ended_SC = stops_SC & (torch.arange(stops_SC.shape[1], device=stops_SC.device) < num_beams)
    scores_SC = best.values / length_S1.double().pow(length_penalty).float()
    scores_SC = torch.cat([beams.kept_SW, scores_SC.masked_fill(~ended_SC, -inf)], dim=1)
    finished = scores_SC.topk(num_beams)
    origin_SW = finished.indices
    ended_SW = torch.cat([beams.ended_SW, ended_SC], dim=1).gather(1, origin_SW)
    after = Beams(running_SC.gather(1, on_SW), finished.values, ended_SW)
    longest_S1 = length_S1
    if early_stopping == "never" and length_penalty > 0.0:
        longest_S1 = searches.budget_S1  # with more tokens a live beam may still get better
    enough_S = after.ended_SW.all(1)
    if early_stopping is not True and num_beams > 1:  # one beam is greedy decoding
        divisor_S = longest_S1[:, 0].double().pow(length_penalty).float()
        reachable_S = after.running_SW[:, 0] / divisor_S
        enough_S = enough_S & (reachable_S <= after.kept_SW[:, -1])
    return Chosen(
        parent_SW=parent_SC.gather(1, on_SW),
        token_SW=token_SC.gather(1, on_SW),
        origin_SW=origin_SW,
        parent_SC=parent_SC,
        token_SC=token_SC,
        beams=after,
        over_S=enough_S | stops_SC.all(1),
    )

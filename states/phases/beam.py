"""The phases of beam search: every branch is a search, every live beam is a row of the forward."""

import numpy as np
import torch

from ...ops.attention.metadata import tensor
from ...ops.beam import Beams, Chosen, Searches, first_beams
from ...ops.forward import HostReader
from ...ops.registry import op
from ...ops.types import Candidates, Proposal
from ..beam import BeamState, BeamStep, extend_, write_tokens_
from ..manager import BranchStateManager
from ..round import Batch, RoundSummary


def _beams(branches: BranchStateManager) -> BeamState:
    assert branches.beams is not None, "the graph has the block `beam`"
    return branches.beams


@op("beam.expand", writes="proposal", needs="beam")
def expand_beams(branches: BranchStateManager) -> Proposal:
    """The last token of every live beam: a tree without levels, its nodes side by side."""
    beams = _beams(branches)
    device = branches.kv.data.device
    tokens = [beams.searches[branch.owner].tokens_Wn[1:, -1] for branch in branches.active]
    tokens_SN = tensor(np.array(tokens).reshape(len(tokens), beams.width - 1), device)
    none_SN = torch.zeros_like(tokens_SN)
    return Candidates(tokens_SN, none_SN - 1, none_SN, none_SN.float()).proposal(levels=0)


@op("beam.gather", writes="searches", needs="beam")
def gather_beams(branches: BranchStateManager, batch: Batch) -> Searches:
    """The state of every search in these rows, on the device; new searches have one beam."""
    beams = _beams(branches)
    device = branches.kv.data.device
    searches = [beams.search(branch) for branch in batch.branches]
    none = _part(first_beams(beams.width, device), slice(0, 0))
    parts = [none, *(search.beams for search in searches)]
    stops = [sorted(branch.request.stop_ids) for branch in batch.branches]
    most = max(map(len, stops), default=0)
    return Searches(
        Beams(*map(torch.cat, zip(*parts, strict=True))),
        tensor([search.length + 1 for search in searches], device)[:, None],
        tensor([branch.budget for branch in batch.branches], device)[:, None],
        tensor([[*s, *[-1] * (most - len(s))] for s in stops], device).view(len(stops), most),
    )


@op(
    "beam.commit_",
    writes="committed",
    drops="batch rows proposal logits features blended searches chosen",
    commits=True,
    needs="beam",
)
def commit_beams_(
    branches: BranchStateManager, batch: Batch, host: HostReader, chosen: Chosen
) -> RoundSummary:
    """The step's one host read: commit the rows of live beams, end the searches that are over."""
    beams = _beams(branches)
    parts = [chosen.parent_SW, chosen.token_SW, chosen.origin_SW, chosen.parent_SC, chosen.token_SC]
    parts += [chosen.beams.ended_SW, chosen.beams.kept_SW.view(torch.int32), chosen.over_S]
    step = BeamStep(*host.read_all(parts))
    placed = batch.placed
    for span, slots in zip(batch.spans, placed.spans, strict=True):
        for slots_n in slots.slots_Cn:
            branches.kv.commit_(slots_n, span.positions)
    for branch in batch.newcomers:
        branch.length += len(branch.prompt)
    before = [len(branch.tokens) for branch in batch.branches]
    for number, branch in enumerate(batch.branches):
        search = beams.searches[branch.owner] = beams.search(branch)
        search.beams = _part(chosen.beams, slice(number, number + 1))
        extend_(search, step, number)
        if number < len(batch.ran):
            beams.commit_rows_(branch, batch.rows.node_slots_ST[number], step.parent_SW[number])
        write_tokens_(branch, search, step, number)
    counts = zip(batch.branches, before, strict=True)
    committed = tuple(len(branch.tokens) - count for branch, count in counts)
    branches.lifecycle.release_and_prepare_(batch.branches)
    return RoundSummary(
        branches=tuple(branch.name for branch in batch.branches),
        committed=committed,
        accepted=(*[0] * len(batch.ran), *[-1] * len(batch.newcomers)),
        drafted=0,
        target_length=branches.kv.current_length,
        draft_length=0,
        rows=placed.rows.tokens_BQ.numel(),
        padding=sum(placed.paddings),
        alignment=placed.rows.alignment,
    )


def _part(beams: Beams, which: slice) -> Beams:
    return Beams(*[value_SW[which] for value_SW in beams])

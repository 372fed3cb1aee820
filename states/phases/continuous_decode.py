"""The phase `continuous_decode`: the round of `verify`, with prompts that start in one forward."""

from ...ops.draft.proposals import share
from ...ops.registry import op
from ...ops.types import Proposal, Rows
from ..manager import BranchStateManager
from ..round import Batch
from ..scheduler import StepPlan


@op("branch.admit_", writes="batch rows proposal")
def admit_(
    branches: BranchStateManager,
    proposal: Proposal,
    step: StepPlan,
    *,
    rows_per_round: int | None = None,
) -> tuple[Batch, Rows, Proposal]:
    """All trees and the prompts of all that starts in this step, as rows of one forward."""
    if rows_per_round is not None:
        proposal = share(proposal, rows_per_round)
    batch = branches.batch_builder.build_(step, proposal)
    return batch, batch.rows, proposal

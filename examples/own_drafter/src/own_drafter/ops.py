"""An op of the package's own. Only a run imports this module."""

from specsot.ops.registry import op
from specsot.ops.types import Proposal


@op("own.count_drafts", writes="drafted_rows")
def count_drafts(proposal: Proposal) -> int:
    """How many rows of the target's forward this round's drafts take; the trace shows it."""
    return proposal.tokens_SN.numel()

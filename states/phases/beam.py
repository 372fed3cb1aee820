"""The phases of beam search: every branch is a search, every live beam is a row of the forward."""

from dataclasses import replace

from ...ops.beam import Chosen, Searches
from ...ops.forward import HostReader
from ...ops.registry import op
from ...ops.types import Proposal
from ..beam import BeamState
from ..manager import BranchStateManager
from ..round import Batch, RoundSummary


def _beams(branches: BranchStateManager) -> BeamState:
    assert branches.beams is not None, "the graph has the block `beam`"
    return branches.beams


@op("beam.expand", writes="proposal", needs="beam")
def expand_beams(branches: BranchStateManager) -> Proposal:
    """The last token of every live beam, as the rows of the next forward."""
    return _beams(branches).offer()


@op("beam.gather", writes="searches", needs="beam")
def gather_beams(branches: BranchStateManager, batch: Batch) -> Searches:
    """The state of every search in these rows; new searches have one beam."""
    return _beams(branches).gather(batch)


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
    summary = _beams(branches).commit_(batch, host, chosen)
    branches.lifecycle.release_and_prepare_(batch.branches)
    return replace(summary, target_length=branches.kv.current_length)

"""The ops of a beam search that know who there is: its beams as rows, and what is kept of them."""

from ...ops.beam import Chosen, Searches
from ...ops.host import HostReader
from ...ops.registry import op
from ...ops.types import Proposal
from ..manager.batch import Batch
from ..manager.beam import BeamState
from ..manager.manager import BranchStateManager
from ..requests.branch import RoundSummary


def _beams(branches: BranchStateManager) -> BeamState:
    assert branches.beams is not None, "the graph has the block `beam`"
    return branches.beams


@op("beam.expand", writes="proposal", needs="beam")
def expand(branches: BranchStateManager) -> Proposal:
    """The last token of every live beam, as the rows of the next forward."""
    return _beams(branches).offer(branches.active)


@op("beam.gather", writes="searches", needs="beam")
def gather(branches: BranchStateManager, batch: Batch) -> Searches:
    """What is known of every search in these rows; those that begin have one beam."""
    return _beams(branches).known(batch)


@op(
    "beam.commit_",
    writes="committed",
    drops="batch rows proposal logits features blended searches chosen",
    commits=True,
    needs="beam",
)
def commit_(
    branches: BranchStateManager, batch: Batch, host: HostReader, chosen: Chosen
) -> RoundSummary:
    """The step's one host read: beams that live on keep their rows, searches that are over end."""
    return branches.commit_beams_(batch, host, chosen)

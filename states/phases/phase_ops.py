"""The ops that move requests and branches: which rows the next forward gets, what it committed."""

from torch import Tensor

from ...ops.blend.blend import BlendReport
from ...ops.draft.proposals import share
from ...ops.host import HostReader
from ...ops.registry import op
from ...ops.types import DraftRows, Proposal, Rows
from ...ops.verify.verify import Accepted, FirstTokens
from ..manager.batch import Batch
from ..manager.manager import BranchStateManager
from ..requests.branch import Branch, RoundSummary
from ..requests.drafting import Drafting


@op("request.admit_", writes="batch rows")
def open_requests_(branches: BranchStateManager) -> tuple[Batch, Rows]:
    """Prompt rows of the waiting requests that fit: shared prefix, then the root branch."""
    batch = branches.open_requests_()
    return batch, batch.rows


@op("branch.fork_", writes="batch rows", needs="skeleton")
def fork_(branches: BranchStateManager) -> tuple[Batch, Rows]:
    """Prompt rows of the waiting branches that fit, behind their prefix. 0 bytes copied."""
    batch = branches.fork_()
    return batch, batch.rows


@op("branch.fold_", writes="batch rows", needs="skeleton")
def fold_(branches: BranchStateManager) -> tuple[Batch, Rows]:
    """Rows of requests whose parts are all done: the parts one after another, to be combined.

    Without rows if nobody combines any, or if none of them fits yet.
    """
    batch = branches.fold_()
    return batch, batch.rows


@op("branch.tree_", writes="batch rows proposal")
def tree_(
    branches: BranchStateManager, proposal: Proposal, *, rows_per_round: int | None = None
) -> tuple[Batch, Rows, Proposal]:
    """All trees as rows of one forward, cut down to the rows that the branches share (if any)."""
    proposal = share(proposal, rows_per_round)
    batch = branches.tree_rows_(proposal)
    return batch, batch.rows, proposal


@op("branch.admit_", writes="batch rows proposal")
def admit_(
    branches: BranchStateManager, proposal: Proposal, *, rows_per_round: int | None = None
) -> tuple[Batch, Rows, Proposal]:
    """The same, and the prompts of whoever can start now, as rows of one forward."""
    proposal = share(proposal, rows_per_round)
    batch = branches.admit_(proposal)
    return batch, batch.rows, proposal


@op(
    "branch.start_",
    writes="committed",
    drops="batch rows logits features blended roots",
    commits=True,
)
def start_(
    branches: BranchStateManager,
    batch: Batch,
    host: HostReader,
    features: Tensor | None,
    blended: BlendReport | None,
    roots: FirstTokens,
) -> RoundSummary:
    """Commit prompt rows; every started branch gets its root token (one host read)."""
    return branches.commit_(batch, host, features, None, roots, blended)


@op(
    "branch.commit_",
    writes="committed",
    drops="batch rows logits features blended roots accepted proposal",
    commits=True,
)
def commit_(
    branches: BranchStateManager,
    batch: Batch,
    host: HostReader,
    features: Tensor | None,
    blended: BlendReport | None,
    accepted: Accepted,
    roots: FirstTokens,
) -> RoundSummary:
    """The round's one host read; commit accepted rows in place, advance tips, finish branches."""
    return branches.commit_(batch, host, features, accepted, roots, blended)


@op("branch.intake_", writes="draft_rows")
def intake_(drafting: Drafting, *, attention: str = "auto") -> DraftRows | tuple[Branch, ...]:
    """Everything committed since the drafter's last forward, of all branches, as its rows.

    A drafter without a pool takes no rows in: it gets the active branches.
    """
    return drafting.intake_(attention)

"""The phase `verify`: all trees in one target forward; accepted rows are committed in place.

Between `branch.tree_` and `branch.commit_` the graph runs tensor ops of `ops/`: `mask.build`,
`plan.compile`, `target.forward_`, `verify.accept` and `branch.root`."""

from torch import Tensor

from ...ops.blend import BlendReport
from ...ops.draft.proposals import share
from ...ops.forward import HostReader
from ...ops.registry import op
from ...ops.types import Proposal, Rows
from ...ops.verify.verify import Accepted, FirstTokens
from ..manager import BranchStateManager
from ..round import Batch, RoundSummary


@op("branch.tree_", writes="batch rows proposal")
def tree_(
    branches: BranchStateManager, proposal: Proposal, *, rows_per_round: int | None = None
) -> tuple[Batch, Rows, Proposal]:
    """All trees as rows of one forward, cut to the shared budget `rows_per_round`, if there is
    one."""
    if rows_per_round is not None:
        proposal = share(proposal, rows_per_round)
    batch = branches.batch_builder.build_(None, proposal)
    return batch, batch.rows, proposal


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
    """The round's one host read; commit accepted rows in place, advance and end branches."""
    return branches.committer.commit_(
        batch, host=host, features_QF=features, accepted=accepted, roots=roots, report=blended
    )

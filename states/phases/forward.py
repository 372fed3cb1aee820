"""The phases with a forward of the target: `skeleton`, `prefill` and `parallel_prefill` prefill
prompts and start their branches; `verify` and, with prompts that start, `continuous_decode` verify
all trees in one forward. Accepted rows are committed in place.

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
from ..scheduler import StepPlan


@op("request.admit_", writes="batch rows")
def open_requests_(branches: BranchStateManager, step: StepPlan) -> tuple[Batch, Rows]:
    """Prompt rows of the requests and branches that start while no branch runs: the shared prefix,
    then the root branch."""
    batch = branches.batch_builder.build_(step)
    return batch, batch.rows


@op("branch.fork_", writes="batch rows", needs="skeleton")
def fork_(branches: BranchStateManager, step: StepPlan) -> tuple[Batch, Rows]:
    """Prompt rows of the branches that start, after their shared prefix. 0 bytes copied."""
    batch = branches.batch_builder.build_(step)
    return batch, batch.rows


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
    return branches.committer.commit_(
        batch, host=host, features_QF=features, accepted=None, roots=roots, report=blended
    )


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

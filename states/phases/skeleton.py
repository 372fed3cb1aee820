"""The phases `skeleton` and `prefill`: prefill prompts and start their branches."""

from torch import Tensor

from ...ops.blend import BlendReport
from ...ops.forward import HostReader
from ...ops.registry import op
from ...ops.types import Rows
from ...ops.verify.verify import FirstTokens
from ..manager import BranchStateManager
from ..round import Batch, RoundSummary
from ..scheduler import StepPlan


@op("request.admit_", writes="batch rows")
def open_requests_(branches: BranchStateManager, step: StepPlan) -> tuple[Batch, Rows]:
    """Prompt rows of the requests and branches that start while no branch runs: the shared prefix,
    then the root branch."""
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

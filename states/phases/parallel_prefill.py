"""The phase `parallel_prefill`: prefill the prompts of all branches in one forward."""

from ...ops.registry import op
from ...ops.types import Rows
from ..manager import BranchStateManager
from ..round import Batch
from ..scheduler import StepPlan


@op("branch.fork_", writes="batch rows", needs="skeleton")
def fork_(branches: BranchStateManager, step: StepPlan) -> tuple[Batch, Rows]:
    """Prompt rows of the branches that start, after their shared prefix. 0 bytes copied."""
    batch = branches.batch_builder.build_(step)
    return batch, batch.rows

"""The ops of the states `schedule` and `idle`."""

from ...ops.registry import op
from ..manager import BranchStateManager
from ..scheduler import Inbox, StepPlan


@op("schedule.plan_", writes="step")
def plan_(branches: BranchStateManager, inbox: Inbox) -> StepPlan:
    """Take in who came and who is to end, retire what ended, and decide what this step does."""
    return branches.plan_(inbox)


@op("schedule.wait", commits=True)
def wait(branches: BranchStateManager, inbox: Inbox) -> None:
    """Sleep until somebody comes, or nobody will any more; at once if somebody is there."""
    if not branches.table.any_unfinished:
        inbox.wait()

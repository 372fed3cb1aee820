"""The conditions a transition may name: host integers only, nothing is read from a device."""

from ...ops.registry import guard
from ..manager.manager import BranchStateManager
from ..requests.branch import Stage


@guard("outlines_finished")
def outlines_finished(branches: BranchStateManager) -> bool:
    """A root branch has ended and its outline is not parsed yet."""
    return any(
        r.stage is Stage.OUTLINE and r.root is not None and r.root.stage is Stage.DONE
        for r in branches.unfinished
    )


@guard("all_finished")
def all_finished(branches: BranchStateManager) -> bool:
    """Every request is finished."""
    return not branches.unfinished


@guard("parts_finished")
def parts_finished(branches: BranchStateManager) -> bool:
    """All parts of a request are done, and the answer that combines them can start now."""
    return bool(branches.folds())


@guard("branches_running")
def branches_running(branches: BranchStateManager) -> bool:
    """Some branch is active."""
    return bool(branches.active)


@guard("newcomers_fit")
def newcomers_fit(branches: BranchStateManager) -> bool:
    """Somebody who waits can ride in the next forward of the running branches."""
    return bool(branches.active) and any(branches.waiting())


@guard("branches_ready")
def branches_ready(branches: BranchStateManager) -> bool:
    """A waiting branch can start now."""
    return bool(branches.waiting()[0])


@guard("none_running")
def none_running(branches: BranchStateManager) -> bool:
    """No branch is active, and a waiting branch can start now."""
    return not branches.active and branches_ready(branches)


@guard("requests_waiting")
def requests_waiting(branches: BranchStateManager) -> bool:
    """No branch is active or can start, and a waiting request can."""
    waiting, requests = branches.waiting()
    return not branches.active and not waiting and bool(requests)

"""The conditions a transition may name. Those of `schedule` read its plan and nothing else."""

from ...ops.registry import guard
from ..scheduler import Does, Inbox, StepPlan


@guard("outlines_finished")
def outlines_finished(step: StepPlan) -> bool:
    """Outlines are written and are to be parsed."""
    return step.does is Does.PARSE


@guard("answers_ready")
def answers_ready(step: StepPlan) -> bool:
    """Requests have ended, and their answers are wanted now."""
    return step.does is Does.ANSWER


@guard("parts_finished")
def parts_finished(step: StepPlan) -> bool:
    """All parts of a request are done, and the answer that combines them can start now."""
    return step.does is Does.FOLD


@guard("branches_ready")
def branches_ready(step: StepPlan) -> bool:
    """Waiting branches start in a forward of their own."""
    return step.does is Does.FORK


@guard("requests_waiting")
def requests_waiting(step: StepPlan) -> bool:
    """No branch is active or can start, and a waiting request can."""
    return step.does is Does.OPEN


@guard("branches_running")
def branches_running(step: StepPlan) -> bool:
    """Trees are drafted and verified for the branches that run."""
    return step.does is Does.ROUND


@guard("newcomers_fit")
def newcomers_fit(step: StepPlan) -> bool:
    """Somebody who waits rides in the forward of the running branches."""
    return step.does is Does.ROUND and step.starts > 0


@guard("no_more_requests")
def no_more_requests(inbox: Inbox) -> bool:
    """Nothing is left to be taken in, and nothing will come."""
    return inbox.over

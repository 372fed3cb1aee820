"""The phases `schedule` and `idle`: plan the next step, or wait for the next request.

Every transition out of `schedule` has a guard that tests the plan; the first one whose guard holds
is taken."""

from ...ops.registry import guard, op
from ..manager import BranchStateManager
from ..scheduler import Inbox, StepPlan


@op("schedule.plan_", writes="step")
def plan_(branches: BranchStateManager, inbox: Inbox) -> StepPlan:
    """Queue new requests, release ended ones, and plan the step. A request that can never run next
    to the others is refused instead of waiting forever."""
    table = branches.table
    arrived, ended = inbox.drain()
    for request in arrived:
        branches.lifecycle.submit(request)
    for request, finish in ended:
        table.end(request, finish)
    if table.deadlines:
        table.expire()
    if table.cancelled:
        branches.lifecycle.release_and_prepare_()
    while True:
        plan = branches.scheduler.plan_(serves=inbox.serves)
        if not plan.is_idle or not branches.lifecycle.refuse_stuck_():
            return plan


@guard("outlines_finished")
def outlines_finished(step: StepPlan) -> bool:
    """Outlines are complete and not parsed yet."""
    return bool(step.outlines)


@guard("answers_ready")
def answers_ready(step: StepPlan) -> bool:
    """Requests have ended and their answers are due."""
    return step.answers > 0


@guard("parts_finished")
def parts_finished(step: StepPlan) -> bool:
    """All parts of a request are complete, and the branch that combines them can start."""
    return bool(step.folds)


@guard("branches_ready")
def branches_ready(step: StepPlan) -> bool:
    """Branches start in a forward of their own."""
    return bool(step.parallel)


@guard("requests_waiting")
def requests_waiting(step: StepPlan) -> bool:
    """No branch runs, and requests or branches can start."""
    return not step.running and bool(step.branches or step.requests or step.chunks)


@guard("branches_running")
def branches_running(step: StepPlan) -> bool:
    """Branches run: their trees are drafted and verified."""
    return step.running > 0


@op("schedule.wait", commits=True)
def wait(branches: BranchStateManager, inbox: Inbox) -> None:
    """Block until a request comes or the inbox is closed; return at once if a request waits."""
    if not (branches.table.open or branches.table.waiting):
        inbox.wait()


@guard("no_more_requests")
def no_more_requests(inbox: Inbox) -> bool:
    """The inbox is closed and empty."""
    return inbox.over

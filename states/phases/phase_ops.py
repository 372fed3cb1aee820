"""The ops that move requests, branches and beams: the next forward's rows, what it committed."""

from dataclasses import replace

from torch import Tensor

from ...ops.beam import Chosen, Searches
from ...ops.blend import BlendReport
from ...ops.draft.proposals import share
from ...ops.host import HostReader
from ...ops.registry import op
from ...ops.types import Proposal, Rows
from ...ops.verify.verify import Accepted, FirstTokens
from ..beam import BeamState
from ..layout import Batch
from ..manager import BranchStateManager
from ..round import RoundSummary
from ..scheduler import StepPlan


@op("request.admit_", writes="batch rows")
def open_requests_(branches: BranchStateManager, step: StepPlan) -> tuple[Batch, Rows]:
    """Prompt rows of the requests that begin: shared prefix, then the root branch. Further samples
    of a prompt that has been read start here too, where nobody runs."""
    starting = branches.starting(step), branches.beginning(step), branches.reading(step)
    batch = branches.placer.place_(None, *starting)
    return batch, batch.rows


@op("branch.fork_", writes="batch rows", needs="skeleton")
def fork_(branches: BranchStateManager, step: StepPlan) -> tuple[Batch, Rows]:
    """Prompt rows of the branches that start, behind their prefix. 0 bytes copied."""
    batch = branches.placer.place_(None, branches.starting(step), [])
    return batch, batch.rows


@op("branch.fold_", writes="batch rows", needs="skeleton")
def fold_(branches: BranchStateManager, step: StepPlan) -> tuple[Batch, Rows]:
    """Rows of requests whose parts are all done: the parts one after another, to be combined, or
    what asks for that alone, where they are read as they lie.

    Without rows if this step combines none.
    """
    folds = [branch for branch in branches.starting(step) if branch.combines]
    batch = branches.placer.place_(None, folds, [])
    if branches.admission.optimistic:  # what the fold reads may have to be read again
        return batch, batch.rows
    for branch in folds:  # the parts are on their way into the pool, or there already
        if branches.fold is not None:
            branches.fold.forget_(branch.request)
        branch.prompt = replace(branch.prompt, chunks=())
    return batch, batch.rows


@op("branch.tree_", writes="batch rows proposal")
def tree_(
    branches: BranchStateManager, proposal: Proposal, *, rows_per_round: int | None = None
) -> tuple[Batch, Rows, Proposal]:
    """All trees as rows of one forward, cut down to the rows that the branches share (if any)."""
    if rows_per_round is not None:
        proposal = share(proposal, rows_per_round)
    batch = branches.placer.place_(proposal, [], [])
    return batch, batch.rows, proposal


@op("branch.admit_", writes="batch rows proposal")
def admit_(
    branches: BranchStateManager,
    proposal: Proposal,
    step: StepPlan,
    *,
    rows_per_round: int | None = None,
) -> tuple[Batch, Rows, Proposal]:
    """The same, and the prompts of whoever starts in this step, as rows of one forward."""
    if rows_per_round is not None:
        proposal = share(proposal, rows_per_round)
    newcomers = branches.starting(step), branches.beginning(step), branches.reading(step)
    batch = branches.placer.place_(proposal, *newcomers)
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


# -- beam search ----------------------------------------------------------------------------------


def _beams(branches: BranchStateManager) -> BeamState:
    assert branches.beams is not None, "the graph has the block `beam`"
    return branches.beams


@op("beam.expand", writes="proposal", needs="beam")
def expand_beams(branches: BranchStateManager) -> Proposal:
    """The last token of every live beam, as the rows of the next forward."""
    return _beams(branches).offer()


@op("beam.gather", writes="searches", needs="beam")
def gather_beams(branches: BranchStateManager, batch: Batch) -> Searches:
    """What is known of every search in these rows; those that begin have one beam."""
    return _beams(branches).known(batch)


@op(
    "beam.commit_",
    writes="committed",
    drops="batch rows proposal logits features blended searches chosen",
    commits=True,
    needs="beam",
)
def commit_beams_(
    branches: BranchStateManager, batch: Batch, host: HostReader, chosen: Chosen
) -> RoundSummary:
    """The step's one host read: beams that live on keep their rows, searches that are over end."""
    summary = _beams(branches).commit_(batch, host, chosen)
    branches.lifecycle.retire_and_prepare_(batch.everyone)
    return replace(summary, target_length=branches.kv.current_length)

"""The two draft states of kind `echo`, and an op of its own. Only a run imports this module."""

from specsot.ops.draft.host_tree import HostTree, pack
from specsot.ops.registry import op
from specsot.ops.types import Proposal
from specsot.states.manager import BranchStateManager
from specsot.states.request import Branch


@op("draft.expand_root_", drafters="echo", writes="frontier", drops="draft_rows")
def expand_root_(draft_rows: tuple[Branch, ...]) -> list[list[int]]:
    """The text of every active branch, its root token last."""
    return [branch.context() for branch in draft_rows]


@op("draft.grow_tree_", drafters="echo", writes="proposal", drops="frontier")
def grow_tree_(branches: BranchStateManager, frontier: list[list[int]], *, nodes: int) -> Proposal:
    """Per branch, what followed its last token when it was written or read before."""
    return pack([chain(ids, nodes) for ids in frontier], branches.kv.data.device)


def chain(ids: list[int], nodes: int) -> HostTree:
    """At most `nodes` tokens, each the child of the one before."""
    places = [i for i, token in enumerate(ids[:-1]) if token == ids[-1]]
    tokens = tuple(ids[places[-1] + 1 :][:nodes]) if places else ()
    depths = tuple(range(1, len(tokens) + 1))
    return HostTree(tokens, tuple(d - 2 for d in depths), depths, (0.0,) * len(tokens))


@op("own.count_drafts", writes="drafted_rows")
def count_drafts(proposal: Proposal) -> int:
    """How many rows of the target's forward this round's drafts take; the trace shows it."""
    return proposal.tokens_SN.numel()

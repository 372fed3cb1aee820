"""The phase `grow_tree`: a drafter deepens all trees; a grammar may force tokens instead."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ...ops.registry import guard, op
from ...ops.types import Proposal
from ..drafter import Drafter
from ..manager import BranchStateManager
from ..scheduler import StepPlan


@op("draft.grow_tree_", writes="proposal", drops="frontier")
def grow_tree_(drafter: Drafter, frontier: Any) -> Proposal:
    """A token tree for every active branch."""
    return drafter.grow(frontier)


@op("outline.force", writes="proposal", needs="skeleton")
def force(branches: BranchStateManager, proposal: Proposal) -> Proposal:
    """Replace a tree by the chain of tokens that a grammar forces, if the chain is longer than half
    of the tree's depth."""
    nodes = proposal.tokens_SN.shape[1]
    chains = {}
    for tree, branch in enumerate(branches.table.active):
        if branch.matcher is not None:
            chain: list[int] = []
            with suppress(Exception):  # an error ends the branch when its next token is drawn
                chain = branch.matcher.forced()[:nodes]
            if 2 * len(chain) > proposal.levels:
                chains[tree] = chain
    return _with_chains(proposal, chains) if chains else proposal


def _with_chains(proposal: Proposal, chains: dict[int, list[int]]) -> Proposal:
    """The proposal with some trees replaced by one path each, padded with invalid nodes."""
    tokens = proposal.tokens_SN.clone()
    valid = proposal.valid_SN.clone()
    parents = proposal.parents_SN.clone()
    depths = proposal.depths_SN.clone()
    scores = proposal.scores_SN.clone()
    sizes = list(proposal.laid_out)
    nodes = tokens.shape[1]
    steps_N = torch.arange(nodes, device=tokens.device)
    for tree, chain in chains.items():
        padded = chain + [0] * (nodes - len(chain))
        tokens[tree] = torch.tensor(padded, dtype=torch.int64, device=tokens.device)
        valid[tree] = steps_N < len(chain)
        parents[tree] = torch.where(valid[tree], steps_N - 1, -1)
        depths[tree] = torch.where(valid[tree], steps_N + 1, 1)
        sizes[tree] = len(chain)
        scores[tree] = 0.0  # log-probability of a certain token: ranks first in a shared budget
    return replace(
        proposal,
        tokens_SN=tokens,
        valid_SN=valid,
        parents_SN=parents,
        depths_SN=depths,
        scores_SN=scores,
        levels=max(proposal.levels, *(len(chain) for chain in chains.values())),
        forced=tuple(chains),
        sizes=tuple(sizes),
    )


@guard("newcomers_fit")
def newcomers_fit(step: StepPlan) -> bool:
    """Requests or branches start in the forward of the running branches."""
    return step.num_starts > 0

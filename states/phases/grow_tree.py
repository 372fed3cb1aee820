"""The phase `grow_tree`: a drafter deepens all trees; a grammar may force tokens instead."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ...ops.attention.metadata import tensor
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
    trees, nodes = proposal.tokens_SN.shape
    chains = {}
    for tree, branch in enumerate(branches.table.active):
        if branch.matcher is not None:
            with suppress(Exception):  # an error ends the branch when its next token is drawn
                chain = branch.matcher.forced()[:nodes]
                if 2 * len(chain) > proposal.levels:
                    chains[tree] = chain
    if not chains:
        return proposal
    device = proposal.tokens_SN.device
    chain_of = [chains.get(tree, []) for tree in range(trees)]
    tokens_SN = tensor([chain + [0] * (nodes - len(chain)) for chain in chain_of], device)
    size_S1 = tensor([len(chain) for chain in chain_of], device)[:, None]
    step_N = torch.arange(nodes, device=device)
    valid_SN = step_N < size_S1
    kept_S1 = size_S1 == 0
    return replace(
        proposal,
        tokens_SN=proposal.tokens_SN.where(kept_S1, tokens_SN),
        valid_SN=proposal.valid_SN.where(kept_S1, valid_SN),
        parents_SN=proposal.parents_SN.where(kept_S1, (step_N - 1).where(valid_SN, -1)),
        depths_SN=proposal.depths_SN.where(kept_S1, (step_N + 1).where(valid_SN, 1)),
        scores_SN=proposal.scores_SN.where(kept_S1, 0.0),  # certain: first in a shared budget
        levels=max(proposal.levels, *map(len, chain_of)),
        forced=tuple(chains),
        sizes=tuple(len(c) or size for c, size in zip(chain_of, proposal.laid_out, strict=True)),
    )


@guard("newcomers_fit")
def newcomers_fit(step: StepPlan) -> bool:
    """Requests or branches start in the forward of the running branches."""
    return step.num_starts > 0

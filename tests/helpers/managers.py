"""A manager without models: requests of made-up ids, and rounds whose outcome a test writes."""

from collections.abc import Sequence
from typing import Any

import torch

from specsot.ops.draft.ngram import HostTree
from specsot.ops.draft.proposals import pack
from specsot.ops.forward import HostReader
from specsot.ops.kv.pool import KVCache
from specsot.ops.types import Proposal
from specsot.ops.verify.verify import Accepted, FirstTokens, GrammarRows
from specsot.states.graph.graph import LAYOUTS, Graph, SchedulerBlock
from specsot.states.graph.plugins import DRAFTERS
from specsot.states.manager import BranchStateManager
from specsot.states.phases import continuous_decode, parallel_prefill, skeleton, verify
from specsot.states.phases.schedule import plan_
from specsot.states.request import Branch, Finish, Request, Stage
from specsot.states.request_table import RunLimits
from specsot.states.round import Batch
from specsot.states.scheduler import Inbox, StepPlan
from specsot.states.text.tokens import PromptTokens

STOP = 2
VOCABULARY = 100


def limits(
    layout: str = "bim",
    drafter: str = "none",
    *,
    capacity: int = 256,
    most: int = 4,
    max_positions: int = 1000,
    policy: str = "fcfs",
    max_wait: int = 256,
) -> RunLimits:
    block: Any = LAYOUTS[layout](kind=layout, kv_slots=capacity, max_num_branches=most)
    drafts = DRAFTERS[drafter](kind=drafter)
    graph = Graph.model_construct(
        layout=block,
        drafter=drafts,
        skeleton=None,
        scheduler=SchedulerBlock(policy=policy, max_wait=max_wait, prefix_cache=False),
    )
    return RunLimits(graph, max_positions, VOCABULARY)


def manager(layout: str = "bim", drafter: str = "none", **settings: Any) -> BranchStateManager:
    """A manager over pools of one tiny layer; settings as for `limits`."""
    fixed = limits(layout, drafter, **settings)
    block = fixed.graph.layout
    rows = block.max_num_branches if layout == "batching" else 1
    size = getattr(block, "block_size", 1)
    kv, draft = (KVCache(1, 1, 2, block.kv_slots, rows, block_size=size) for _ in range(2))
    draft = draft if fixed.graph.drafter.has_model else None
    return BranchStateManager(kv, draft, fixed, lambda branch: branch.prompt)


def request(
    key: str = "a", prefix: Sequence[int] = (), tail: Sequence[int] = (8, 9), **more: Any
) -> Request:
    """A request of a plain answer; with `outline_budget` one that writes an outline."""
    settings = {"budget": 10, "outline_budget": 0, "stop_ids": frozenset({STOP})} | more
    texts = (PromptTokens(tuple(prefix)), PromptTokens(tuple(tail)))
    return Request(key, 0, "?", *texts, **settings)


def running(made: BranchStateManager, *requests: Request, first: int = 20) -> list[Branch]:
    """Submit requests and start them; their first tokens are `first` and the following ids."""
    batch = open_requests_(made, *requests)
    commit_(made, batch, range(first, first + len(batch.newcomers)))
    return list(batch.newcomers)


def fan_out_(
    made: BranchStateManager, one: Request, hoist: Sequence[int], prompts: Sequence[Sequence[int]]
) -> list[Branch]:
    assert one.root is not None
    made.kv_cache.promote_root_(one.root)
    one.common_prompt, one.stage = PromptTokens(tuple(hoist)), Stage.RUNNING
    for index, ids in enumerate(prompts):
        branch = made.table.new_branch(one, index, one.budget)
        branch.prompt = PromptTokens(tuple(ids))
        one.branches.append(branch)
    made.lifecycle.release_and_prepare_()
    return one.branches


def fanned_out(
    made: BranchStateManager, one: Request, hoist: Sequence[int], prompts: Sequence[Sequence[int]]
) -> list[Branch]:
    """The branches of a request that is started and whose outline has ended."""
    (root,) = running(made, one, first=30)
    root.end(Finish.STOP)
    return fan_out_(made, one, hoist, prompts)


def proposal(*trees: Sequence[tuple[int, int]]) -> Proposal:
    """Trees of (token, parent), parents before children; -1 is the root."""
    made = []
    for tree in trees:
        tokens, parents, depths = [t for t, _ in tree], [p for _, p in tree], list[int]()
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        made.append(HostTree(tuple(tokens), tuple(parents), tuple(depths), (0.0,) * len(tokens)))
    return pack(made, torch.device("cpu"))


def chain(*tokens: int) -> list[tuple[int, int]]:
    return [(token, at - 1) for at, token in enumerate(tokens)]


def accepted(
    batch: Batch, offer: Proposal, paths: Sequence[Sequence[int]], bonus: Sequence[int]
) -> Accepted:
    """What `verify.accept` would say: the nodes (from 1 on) that hold, and what follows them."""
    trees, nodes = batch.rows.trees, offer.tokens_SN.shape[1] + 1
    roots_S1 = torch.tensor([[branch.tokens[-1]] for branch in batch.ran])
    tokens_SN = offer.tokens_SN.where(offer.valid_SN, -1)
    path_ST = torch.zeros(trees, nodes, dtype=torch.bool)
    path_ST[:, 0] = True
    for tree, path in enumerate(paths):
        path_ST[tree, list(path)] = True
    parents_ST = torch.cat([torch.zeros_like(roots_S1), offer.parents_SN + 1], dim=1)
    return Accepted(
        torch.zeros(trees, nodes, dtype=torch.int64),
        path_ST,
        torch.tensor(list(bonus)),
        torch.cat([roots_S1, tokens_SN], dim=1),
        parents_ST,
        side_outputs_SC=torch.zeros(trees, 0, dtype=torch.int64),
        bound=none(),
    )


def none() -> GrammarRows:
    return GrammarRows(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, VOCABULARY))


def commit_(
    made: BranchStateManager,
    batch: Batch,
    drawn: Sequence[int] = (),
    outcome: Accepted | None = None,
) -> Any:
    """Commit a batch, in which the feature of each row is its number."""
    features = torch.arange(batch.rows.tokens_BQ.numel())[:, None].float()
    roots = FirstTokens(torch.tensor([*drawn], dtype=torch.int64), none())
    return made.committer.commit_(
        batch, host=HostReader(), features_QF=features, accepted=outcome, roots=roots
    )


def start_(made: BranchStateManager, *requests: Request) -> Batch:
    return made.batch_builder.build_(StepPlan(0, "", requests=requests))


def plan(made: BranchStateManager, inbox: Inbox | None = None) -> StepPlan:
    return plan_(made, inbox or Inbox())


def open_requests_(made: BranchStateManager, *requests: Request) -> Batch:
    """Submit requests; the prompts of all that can start."""
    for one in requests:
        made.lifecycle.submit(one)
    return skeleton.open_requests_(made, plan(made))[0]


def fork_(made: BranchStateManager) -> Batch:
    return parallel_prefill.fork_(made, plan(made))[0]


def tree_rows_(made: BranchStateManager, offer: Proposal) -> Batch:
    return verify.tree_(made, offer)[0]


def admit_(made: BranchStateManager, offer: Proposal) -> Batch:
    return continuous_decode.admit_(made, offer, plan(made))[0]

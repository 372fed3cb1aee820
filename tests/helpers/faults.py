"""Faults that are planted into the engine, each with rows of the table that show it.

A fault replaces one function by a wrong one. Those that change no token of a single run have tests
of their own: stale rows of a drafter (tests/runs/test_newcomers.py, tests/engine/certify) and rules
of rejection (tests/laws, tests/runs/test_rejection_runs.py)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from helpers.axes import Case
from specsot.engine.record.metrics import Meter
from specsot.engine.run.session import Session
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.attention.metadata import TreeMask, Visibility
from specsot.ops.forward import HostReader
from specsot.ops.kv.pool import KVCache
from specsot.ops.verify import verify
from specsot.states import commit, prefix_cache, sampling
from specsot.states.kv_cache import KVCacheManager
from specsot.states.layout import Layout
from specsot.states.lifecycle import Lifecycle
from specsot.states.prompt_builder import PromptBuilder
from specsot.states.request import Branch, Finish, Request
from specsot.states.request_table import SegmentTree
from specsot.states.round import RoundSummary

EAGLE = ("eagle3", 0)
DRAFTED = Case(drafter=EAGLE, stops=(), budget=16)
ENDING = Case(drafter=("vanilla", 0), stops=(0, 2, 3), budget=24, parts=8)
WARM = Case(temperature=0.8, dtype="float64", stops=(), budget=16)
DRAWN = replace(WARM, temperature=2.0, parts=8)
FOLLOWING = Case(max_num_branches=1, requests=4)


class Fault(NamedTuple):
    """A function of an owner, the wrong one, called with the good one, and a case that shows it."""

    name: str
    owner: Any
    function: str
    wrong: Callable[..., Any]
    case: Case

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        good = getattr(self.owner, self.function)
        patch.setattr(
            self.owner, self.function, lambda *args, **more: self.wrong(good, *args, **more)
        )


# -- tokens ---------------------------------------------------------------------------------------


def last_token_alone(good: Any, branch: Branch, tokens: Sequence[int]) -> int:
    stops, branch.request.stop_ids = branch.request.stop_ids, frozenset()
    committed = good(branch, tokens[:-1])
    branch.request.stop_ids = stops
    return int(committed if branch.finish else committed + good(branch, tokens[-1:]))


def stop_is_kept(good: Any, branch: Branch, tokens: Sequence[int]) -> int:
    committed = good(branch, tokens)
    branch.tokens.extend([2] if branch.finish is Finish.STOP else [])
    return int(committed)


def one_token_more(good: Any, branch: Branch, tokens: Sequence[int]) -> int:
    branch.budget += 1
    committed = good(branch, tokens)
    branch.budget -= 1
    return int(committed)


def bonus_of_the_root(good: Any, proposal: Any, above_STT: Any, drawn_ST: Any) -> Any:
    return good(proposal, above_STT, drawn_ST)[0], drawn_ST[:, 0]


def without(name: str) -> Any:
    return lambda good, self: replace(good(self), **{name: 0 if name == "top_k" else 1.0})


def drops_first(good: Any, self: Lifecycle, branch: Branch) -> None:
    good(self, branch)
    if len(branch.tokens) > 2:
        del branch.tokens[0]


def quotes_nothing(good: Any, self: PromptBuilder, branch: Branch) -> Any:
    point = branch.point
    branch.point = point and replace(point, deps=())
    found = good(self, branch)
    branch.point = point
    return found


# -- attention ------------------------------------------------------------------------------------


def all_drafts_seen(good: Any, self: TreeMask, *given: Any) -> None:
    good(self._replace(visible_STT=torch.ones_like(self.visible_STT)), *given)


def drafts_one_on(
    good: Any, self: Layout, kv: KVCache, trees: Any, *rest: Any, **facts: Any
) -> Any:
    placed = good(self, kv, trees, *rest, **facts)
    if trees is not None:
        rows = placed.rows
        rows.positions_BQ.view(-1)[rows.nodes_ST[:, 1:].flatten()] += 1
    return placed


# -- rows -----------------------------------------------------------------------------------------


def first_nodes(good: Any, *given: Any, **more: Any) -> Any:
    tree = good(*given, **more)
    return replace(tree, path=(*range(len(tree.path)),))


def ends_early(good: Any, self: KVCache, source: Any, target: Any, cause: str) -> None:
    good(self, source, target, cause)
    self.data[:, :, :, torch.from_numpy(np.asarray(target))[-8:]] = 0.0


def reuses_more(good: Any, first: Any, second: Any) -> int:
    length = good(first, second)
    return int(min(length + 20, len(first), len(second))) if length else 0


def unless_cancelled(good: Any, self: KVCacheManager, request: Request, *, wipe: bool) -> None:
    if not request.cancelled:
        good(self, request, wipe=wipe)


def reads_twice(good: Any, self: HostReader, *given: Any) -> Any:
    good(self, *given)
    return good(self, *given)


def counts_one_less(good: Any, self: Meter, summary: RoundSummary, at: int) -> None:
    good(self, replace(summary, committed=(0, *summary.committed[1:])), at)


FAULTS = (
    Fault("ends inside accepted paths are missed", commit, "append_tokens", last_token_alone,
          ENDING),
    Fault("the stop token is part of the answer", commit, "append_tokens", stop_is_kept, ENDING),
    Fault("one token more than the budget", commit, "append_tokens", one_token_more, DRAFTED),
    Fault("the final token is that of the root", verify, "matching", bonus_of_the_root, DRAFTED),
    Fault("a token is lost in a preemption", Lifecycle, "_preempt_branch_", drops_first,
          replace(DRAFTED, admission="forced")),
    Fault("results are not quoted", PromptBuilder, "branch", quotes_nothing, Case(deps="chain")),
    Fault("all branches share their coins", sampling, "branch_key",
          lambda good, seed, branch: good(seed, 0), replace(WARM, work="samples")),
    Fault("the answer is not penalised", sampling, "take_in_",
          lambda good, *given: None, replace(WARM, rules="penalties")),
    Fault("top_k is not applied", Session, "_sampling", without("top_k"),
          replace(DRAWN, rules="top_k")),
    Fault("top_p is not applied", Session, "_sampling", without("top_p"),
          replace(DRAWN, rules="top_p")),
    Fault("every branch sees every other", Visibility, "sees",
          lambda good, self, *given: good(self, *given) | (given[1] >= 0),
          Case(attention="dense")),
    Fault("the prefix is not seen", SegmentTree, "path",
          lambda good, self, segment: good(self, segment)[:1], Case()),
    Fault("drafts see their siblings", TreeMask, "mark_", all_drafts_seen, DRAFTED),
    Fault("drafts stand one position on", Layout, "place_", drafts_one_on, DRAFTED),
    Fault("layers have no window", AttentionPlan, "for_layers",
          lambda good, self, positions_N, groups, dtype, narrow=None: good(
              self, positions_N, groups, dtype), Case(family="mistral, narrow")),
    Fault("rows of other nodes are committed", commit, "_accept_path", first_nodes,
          replace(DRAFTED, drafter=("eagle1", 1), parts=8)),
    Fault("a rejected row stays", KVCache, "release_",
          lambda good, self, slots: good(self, slots[1:]), DRAFTED),
    Fault("a copied prefix ends too early", KVCache, "copy_", ends_early,
          Case(layout="batching", parts=8)),
    Fault("cancelled requests keep their rows", KVCacheManager, "end_request_", unless_cancelled,
          Case(arrivals="busy")),
    Fault("cached rows of other tokens are reused", prefix_cache, "shared_length", reuses_more,
          FOLLOWING),
    Fault("rows of shared trees change places", commit, "packed_places",
          lambda good, has_ST: good(has_ST)[::-1], replace(DRAFTED, rows_per_round=7)),
    Fault("the device is read twice", HostReader, "read", reads_twice, Case()),
    Fault("a token is not counted", Meter, "forward_done", counts_one_less, Case()),
)  # fmt: skip
FAULTS += tuple(
    Fault(
        f"paths end one node further, {work}",
        verify,
        "_longest_path",
        lambda good, agrees, *rest: good(agrees | True, *rest),
        replace(DRAFTED, work=work),
    )
    for work in ("parts", "blended", "folded", "attended")
)

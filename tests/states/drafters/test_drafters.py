"""What each kind of drafter has yet to take in after every step of a branch's life."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.managers import request

from specsot.ops.draft.sizes import Curve, RoundCosts
from specsot.ops.kv.pool import Ints
from specsot.states.commit import Committer
from specsot.states.drafter import SALTS, DraftContext, Drafter, remembered_
from specsot.states.graph.plugins import drafter_class
from specsot.states.request import Branch, Finish, Stage
from specsot.states.round import CommittedRows, RoundResult
from specsot.states.text.tokens import PromptTokens

PREFIX, OWNER = 7, 8  # segments of the request and of its branch
POOLED = pytest.mark.parametrize("kind", ["eagle3", "dflash", "vanilla"])


def new_drafter(kind: str, **settings: Any) -> Any:
    model = SimpleNamespace(vocab_size=100)
    nothing: Any = None
    context = DraftContext(table=nothing, layout=nothing, samplers=nothing, model=model)
    made = drafter_class(kind)
    return made(made.Settings.model_validate({"kind": kind, **settings}), context)


def features(*values: float) -> torch.Tensor:
    return torch.tensor([values]).T.repeat(1, 3)


def rows(*flat: int) -> Ints:
    return np.array(flat, np.int32)


def branch_of(index: int = 0, tokens: tuple[int, ...] = (20,)) -> Branch:
    """A branch behind the prefix 1 2 3 with the prompt 4 5; `tokens` are its answer so far."""
    one = request(prefix=[1, 2, 3])
    one.prefix_owner, one.context, one.prefix_length = PREFIX, [1, 2, 3], 3
    made = Branch(one, index, OWNER, 10, prompt=PromptTokens((4, 5)), stage=Stage.RUNNING)
    made.start, made.length, made.tokens = 3, 5, list(tokens)
    one.branches, one.root = ([], made) if index < 0 else ([made], None)
    return made


def prefix(*tokens: int, position: int, flat: Ints, of: torch.Tensor | None) -> CommittedRows:
    return CommittedRows(
        owner=PREFIX, prefix=PREFIX, position=position, tokens=[*tokens], rows=flat, features_QF=of
    )


def observe(
    state: Drafter, branch: Branch, *rows: Any, of: torch.Tensor, path: bool = False
) -> None:
    """Commit rows of a branch: their position, tokens and flat indices."""
    committer = Committer.__new__(Committer)
    committer.drafter, committer.fold = state, None
    committer._observe_(branch, *rows, features_QF=of, is_path=path)


def take_in_path(
    state: Drafter, branch: Branch, path: tuple[int, ...], flat: Ints, *, ends: bool = False
) -> None:
    """Commit the root, the path and a bonus token; row n has the feature 60 + n."""
    branch.tokens += [*path, 99]
    if ends:
        branch.end(Finish.LENGTH)
    position, first = branch.length, branch.num_cached_tokens
    branch.num_cached_tokens += len(flat)
    tokens = branch.tokens[first : branch.num_cached_tokens]
    observe(state, branch, position, tokens, flat, of=features(60, 61, 62), path=True)


def queued(state: Drafter) -> list[tuple[int, int, list[int], list[float] | None]]:
    """(owner, position, tokens, the first number of each row's feature)."""
    assert {one.owner for one in state.inbox} <= {PREFIX, OWNER}
    firsts = [None if one.features is None else one.features[:, 0].tolist() for one in state.inbox]
    rows = zip(state.inbox, firsts, strict=True)
    return [(one.owner, one.position, [*one.tokens], first) for one, first in rows]


def started(kind: str, branch: Branch) -> Any:
    """After the forward of a whole prompt: flat rows 0 to 4, with the features 10 to 14."""
    state, given = new_drafter(kind), features(10, 11, 12, 13, 14)
    state.observe(prefix(1, 2, 3, position=0, flat=rows(0, 1, 2), of=given))
    observe(state, branch, 3, branch.prompt.ids, rows(3, 4), of=given)
    return state


def test_a_drafter_without_a_pool_takes_nothing_in() -> None:
    state = started("none", branch_of())
    assert not state.inbox and state.learn((), result(1), ()) == ()


STARTED = {
    # EAGLE pairs every feature with the token after it: the last one of the prefix with the first
    # token of each branch behind it.
    "eagle3": [(PREFIX, 0, [2, 3], [10, 11]), (OWNER, 2, [4], [12]), (OWNER, 3, [5, 20], [13, 14])],
    # DFlash takes every token with its own feature.
    "dflash": [(PREFIX, 0, [1, 2, 3], [10, 11, 12]), (OWNER, 3, [4, 5], [13, 14])],
    # A language model reads the text with the next root.
    "vanilla": [(PREFIX, 0, [1, 2, 3], None), (OWNER, 3, [4, 5, 20], None)],
}


@POOLED
def test_after_its_prompt_a_branch_and_its_prefix_wait_for_the_drafter(kind: str) -> None:
    state = started(kind, branch_of())
    assert queued(state) == STARTED[kind]
    if kind == "eagle3":
        assert state.last[PREFIX][1][0] == 12 and state.last[OWNER][1][0] == 14


@pytest.mark.parametrize(
    ("kind", "index", "path", "flat", "expected"),
    [
        ("eagle3", 0, (21, 22), (0, 2, 1), [(OWNER, 5, [21, 22, 99], [60, 62, 61])]),
        ("eagle3", -1, (21,), (0, 2), [(OWNER, 5, [21], [60])]),
        ("dflash", 0, (21,), (0, 2), [(OWNER, 5, [20, 21], [60, 62])]),
        ("dflash", -1, (21,), (0, 2), [(OWNER, 5, [20, 21], [60, 62])]),
        ("vanilla", 0, (21,), (0, 1), [(OWNER, 6, [21, 99], None)]),
        ("vanilla", -1, (21,), (0, 1), [(OWNER, 6, [21], None)]),
    ],
)
def test_a_path_is_taken_in_up_to_the_next_root_and_of_an_ended_outline_what_has_rows(
    kind: str, index: int, path: tuple[int, ...], flat: tuple[int, ...], expected: Any
) -> None:
    branch = branch_of(index)
    state = started(kind, branch)
    state.inbox.clear()
    take_in_path(state, branch, path, rows(*flat), ends=index < 0)
    assert queued(state) == expected
    if kind == "eagle3":
        assert state.last[OWNER][1][0] == 60 + flat[-1]


def test_eagle_joins_the_parts_of_a_prefix() -> None:
    state = started("eagle3", branch_of())
    state.inbox.clear()
    state.observe(prefix(30, 31, position=3, flat=rows(0, 1), of=features(50, 51)))
    assert queued(state) == [(PREFIX, 2, [30], [12]), (PREFIX, 3, [31], [50])]
    assert state.last[PREFIX][1][0] == 51


def result(trees: int, side: list[list[int]] | None = None, nodes: int = 3) -> RoundResult:
    none_S = np.zeros((trees, 0), np.int64)
    side_SC = none_S if side is None else np.array(side, np.int64)
    tokens_ST = np.zeros((trees, nodes), np.int64)
    return RoundResult(none_S, none_S, tokens_ST, tokens_ST, none_S, tokens_ST, side_SC)


def test_a_length_policy_learns_what_became_of_its_drafts() -> None:
    branches = [branch_of(), branch_of()]
    branches[1].owner = 9
    state = new_drafter("adaptive", gamma=4, gamma_policy="heuristic", gamma_max=9)
    for one in branches:
        one.budget = 50
    assert state.plan_(branches) == (4, 4)
    records = state.learn(branches, result(2), [[0, 1, 2, 3, 4], [0, 1]])
    assert [(one.gamma, one.accepted) for one in records] == [(4, 4), (4, 1)]
    assert state.plan_(branches) == (6, 3)
    state.forget([OWNER])
    assert state.plan_(branches) == (4, 3)
    branches[0].budget = 3
    assert state.plan_(branches) == (1, 3), "one of two tokens is the target's own"


@POOLED
def test_the_rows_of_an_answer_that_ended_are_not_taken_in(kind: str) -> None:
    branch = branch_of()
    state = started(kind, branch)
    take_in_path(state, branch, (21,), rows(0, 1), ends=True)
    assert queued(state) == STARTED[kind]


@POOLED
def test_an_outline_becomes_a_part_of_the_prefix(kind: str) -> None:
    root = branch_of(-1)
    state = started(kind, root)
    state.promote(root)
    assert queued(state) == [(PREFIX, *rest) for _, *rest in STARTED[kind]]
    if kind == "eagle3":
        assert OWNER not in state.last and state.last[PREFIX][1][0] == 14


@POOLED
def test_nothing_of_segments_that_are_given_back_stays(kind: str) -> None:
    state = started(kind, branch_of())
    state.forget([OWNER])
    assert {one.owner for one in state.inbox} == {PREFIX}
    state.forget([PREFIX])
    assert not state.inbox
    assert not getattr(state, "last", None) and not getattr(state, "lengths", None)


def test_what_is_counted_of_a_branch_ends_with_its_rows() -> None:
    state = new_drafter("vanilla", gamma_policy="cost")
    costs = RoundCosts(Curve.of({1: 1.0}), Curve.of({1: 0.1}))
    state = type(state)(state.settings, replace(state.context, costs=costs))
    state.chooser.by_owner.update({PREFIX: (1.0, 2.0), OWNER: (3.0, 4.0)})
    state.forget([OWNER])
    assert state.chooser.by_owner == {PREFIX: (1.0, 2.0)}


# -- n-grams -------------------------------------------------------------------------------------


REPEATED = (1, 2)  # behind the text 1 2 3 4 5: what followed 1 2 before was a 3


def test_lookup_drafts_what_followed_in_the_branchs_own_text() -> None:
    state, branch = (
        new_drafter("ngram", draft_depth=3, longest=2, width=1),
        branch_of(tokens=REPEATED),
    )
    tree = state.tree_(branch, 3)
    assert tree.tokens == (3, 4, 5)
    branch.tokens += [3, 9, 1, 2, 3]
    state.settings = state.settings.model_copy(update={"draft_depth": 1, "width": 2})
    assert state.tree_(branch, 2).tokens == (4, 9)
    assert len(state.indices[OWNER].ids) == branch.size, "only what is new is read"


def test_the_text_of_a_branch_ends_with_its_rows() -> None:
    state = new_drafter("ngram", draft_depth=3, longest=2, width=1)
    state.tree_(branch_of(tokens=REPEATED), 3)
    assert state.indices
    state.forget([OWNER])
    assert not state.indices


def test_the_salts_that_were_used_last_are_remembered() -> None:
    memory: dict[str, list[int]] = {}
    first = remembered_(memory, "first", list)
    for number in range(SALTS - 1):
        remembered_(memory, str(number), list)
    assert remembered_(memory, "first", list) is first and len(memory) == SALTS
    remembered_(memory, "new", list)
    assert "first" in memory and "0" not in memory and len(memory) == SALTS

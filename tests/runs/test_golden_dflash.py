"""Whole DFlash and DDTree runs of the reference code, reproduced through `dflash` and `ddtree`.

The recorded runs end after the round in which the budget is reached; theirs have stop ids only
where a run has the same text without.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.sequences import DFLASH_GOLDEN
from helpers.support import FixedBook, Graphs, start

from specsot.engine.models import Models, with_drafter
from specsot.models.load.weights import load_target
from specsot.states.request import Branch

RUNS: dict[str, Any] = json.loads((DFLASH_GOLDEN / "generate.json").read_text())
TREES: dict[str, Any] = json.loads((DFLASH_GOLDEN / "ddtree.json").read_text())["runs"]
GREEDY = [name for name, case in RUNS.items() if not case["temperature"]]
GREEDY_TREES = [name for name, case in TREES.items() if not case["temperature"]]


@pytest.fixture(scope="module")
def models() -> Models:
    target = load_target(DFLASH_GOLDEN / "target")
    plain = Models(target, None, None, (), torch.device("cpu"), torch.float32)
    return with_drafter(plain, DFLASH_GOLDEN / "draft", "dflash")


def rounds(
    graphs: Graphs, models: Models, graph: str, prompt: Sequence[int], count: int, sets: list[str]
) -> tuple[Branch, list[tuple[list[int], list[int], list[int]]]]:
    """The branch after so many rounds, and what was proposed: root and tokens, parents, depths."""
    book = FixedBook({"p": prompt})
    session = graphs.session(graph, models, book, budget=40 * count, sets=sets)
    run, proposed = start(session, ["p"]), []
    branch = None
    run.advance()  # the first `schedule`: nobody has begun
    while branch is None or len(branch.accepted) < count:
        run.advance()
        branch = run.requests[0].branches[0]
        if run.state == "grow_tree":
            proposal = run.board["proposal"]
            tokens, parents, depths = (
                part[0].tolist()
                for part in (proposal.tokens_SN, proposal.parents_SN, proposal.depths_SN)
            )
            proposed.append(([branch.tokens[-1], *tokens], parents, depths))
    return branch, proposed


@pytest.mark.parametrize("name", GREEDY)
def test_every_block_and_every_acceptance(name: str, models: Models, graphs: Graphs) -> None:
    case = RUNS[name]
    size, steps = case["block_size"] or 8, case["steps"]
    accepted = case.get("fixed_acceptance_lengths", case["acceptance_lengths"])
    sets = [f"drafter.block_size={size}"]
    branch, blocks = rounds(graphs, models, "dflash", case["prompt"], len(accepted), sets)
    assert [block for block, _, _ in blocks][: len(steps)] == [s["verify_input_ids"] for s in steps]
    assert all(parents == list(range(-1, size - 2)) for _, parents, _ in blocks)
    assert [count + 1 for count in branch.accepted] == accepted
    written = [*case["prompt"], *branch.tokens]
    output = case.get("fixed_output_ids", case["output_ids"])
    assert written[: len(output)] == output


@pytest.mark.parametrize("name", GREEDY_TREES)
def test_every_tree_and_every_acceptance(name: str, models: Models, graphs: Graphs) -> None:
    case = TREES[name]
    sets, count = [f"drafter.num_draft_tokens={case['budget']}"], len(case["acceptance_lengths"])
    branch, trees = rounds(graphs, models, "ddtree", case["prompt"], count, sets)
    for (tokens, parents, depths), recorded in zip(trees, case["rounds"], strict=False):
        own = recorded["tree"]
        assert tokens[1:] == own["node_token_ids"]
        assert depths == own["node_depths"]
        assert [-1, *(parent + 1 for parent in parents)] == own["parents"]
    assert [count + 1 for count in branch.accepted] == case["acceptance_lengths"]
    written = [*case["prompt"], *branch.tokens]
    assert written[: len(case["output_ids"])] == case["output_ids"]

"""DFlash with trees: whole golden runs, whose text is that of the runs without."""

import json
from typing import Any

import pytest
import torch
from helpers.sequences import DFLASH_GOLDEN, Pair, Pooled, cut, golden_pair
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.models.drafters.dflash import DFlashDraftModel
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.draft.dflash import tree
from specsot.ops.layer_plan import decode_plan
from specsot.ops.types import Proposal, ancestors

RUNS: dict[str, Any] = json.loads((DFLASH_GOLDEN / "ddtree.json").read_text())["runs"]
GREEDY = [name for name, case in RUNS.items() if not case["temperature"]]


@pytest.fixture(scope="module")
def models() -> tuple[Decoder, DFlashDraftModel]:
    return golden_pair()


def answers(run: Pooled, root: int, start: int, drafted: Proposal) -> list[int]:
    """The target's choice after every node of a tree whose root stands at `start`."""
    tokens = torch.tensor([root, *drafted.tokens_SN[0].tolist()])
    positions = torch.tensor([0, *drafted.depths_SN[0].tolist()]) + start
    slots, extent = run.slots[start : start + len(tokens)], len(run.slots)
    mask = torch.zeros(1, len(tokens), extent, dtype=torch.bool)
    mask[:, :, run.slots[:start]] = True
    mask[:, :, slots] = ancestors(drafted.parents_SN, drafted.levels)
    with torch.inference_mode():
        out = run.model(
            tokens[None],
            positions[None],
            slots[None],
            AttentionPlan.dense(mask, torch.zeros(1, extent, dtype=torch.int64)),
            run.kv,
            decode_plan(run.model.num_layers),
            torch.arange(len(tokens)),
            (),
        )
    return out.logits_RV.argmax(-1).tolist()


def walk(drafted: Proposal, said: list[int]) -> list[int]:
    links = zip(drafted.parents_SN[0].tolist(), drafted.tokens_SN[0].tolist(), strict=True)
    places = {(parent + 1, token): i for i, (parent, token) in enumerate(links, 1)}
    found = [0]
    while (found[-1], said[found[-1]]) in places:
        found.append(places[found[-1], said[found[-1]]])
    return found


def generate(pair: Pair, prompt: list[int], new: int, nodes: int) -> tuple[list[int], list[Any]]:
    taps, start, rounds = pair.drafter.tap_ids, len(prompt), []
    out = pair.run.forward(torch.tensor(prompt), 0, taps)
    ids, fresh = [*prompt, int(out.logits_RV[-1].argmax())], out.taps_QF
    while start < len(prompt) + new:
        assert fresh is not None
        pair.take_in(fresh, start - len(fresh))
        logits = pair.drafter.logits(pair.draft(ids[-1], start, 8)[1:])
        drafted = tree(logits.log_softmax(-1)[None], nodes)
        said = answers(pair.run, ids[-1], start, drafted)
        path = walk(drafted, said)
        rounds.append((path, drafted))
        accepted = [ids[-1], *(int(drafted.tokens_SN[0, i - 1]) for i in path[1:])]
        fresh = pair.run.forward(torch.tensor(accepted), start, taps).taps_QF
        ids, start = [*ids, *accepted[1:], said[path[-1]]], start + len(path)
    return cut(ids[: len(prompt) + new], len(prompt), []), rounds


@pytest.mark.parametrize("name", GREEDY)
def test_whole_runs_with_trees(models: tuple[Decoder, DFlashDraftModel], name: str) -> None:
    case = RUNS[name]
    ids, rounds = generate(
        Pair(*models, capacity=160), case["prompt"], case["max_new_tokens"], case["budget"]
    )
    assert ids == case["output_ids"]
    assert [len(path) for path, _ in rounds] == case["acceptance_lengths"]
    for (path, drafted), recorded in zip(rounds, case["rounds"], strict=False):
        assert path == recorded["accepted_indices"]
        assert nodes_of(drafted.tokens_SN) == recorded["tree"]["node_token_ids"]
        assert nodes_of(drafted.depths_SN) == recorded["tree"]["node_depths"]
        assert [-1, *nodes_of(drafted.parents_SN + 1)] == recorded["tree"]["parents"]


def nodes_of(value_SN: Tensor) -> list[int]:
    found: list[int] = value_SN[0].tolist()
    return found

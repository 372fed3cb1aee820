"""Whole runs on two ranks, each of which makes the same decisions: the tokens of one process."""

import os
from pathlib import Path
from random import Random

import pytest
import torch
from helpers.sharded_work import engine, greedy, measured, run_ranks, runs
from helpers.support import SEED, Reference

DRAWN = ("sampling.temperature=0.8", "sampling.top_p=0.9")
CASES = (
    ("autoregressive", "", ()),
    ("ngram", "", ()),
    ("eagle", "eagle3", ()),
    ("eagle", "eagle3", DRAWN),
    ("eagle2", "eagle2", ()),
    ("dflash", "dflash", ()),
    ("ddtree", "dflash", ()),
    ("speculative", "vanilla", ()),
    ("bim_eagle", "eagle3", ()),
    ("bim_eagle", "eagle3", DRAWN),
    ("paged_eagle", "eagle3", ()),
    ("batching_eagle", "eagle3", ()),
)
SINGLE, SEVERAL = CASES[:8], CASES[8:]  # branches
DRAWN_CASES = (*Random(SEED).sample(SINGLE, 3), *Random(SEED).sample(SEVERAL, 1))


def test_ranks_decide_as_one_process_and_measure_nothing(tmp_path: Path) -> None:
    """Whole runs, and an engine on every rank."""
    cases = DRAWN_CASES if "SPECSOT_TEST_ALL" not in os.environ else CASES
    whole, served = runs(None, cases), engine(None)
    ranks = run_ranks(2, tmp_path, (runs, cases), (engine,), (measured,))
    (first, *_), (second, *_) = ranks
    assert len(whole) == len(cases) and first == second, "a rank has decided otherwise"
    for name, answers in whole.items():
        assert first[name] == answers, name
        assert sum(len(ids) for texts in answers.values() for ids in texts) > 20
        branches = max(len(texts) for texts in answers.values())
        assert branches > 3 if "_" in name.partition(" ")[0] else branches == 1
    assert [one[1] for one in ranks] == [served, served] and max(map(len, served)) > 1
    assert all("give drafter.costs" in one[2] for one in ranks)


@pytest.mark.real_model
def test_a_model_whose_heads_do_not_come_out_even(smollm2: Path, tmp_path: Path) -> None:
    ids = torch.arange(1000, 1040)
    whole = greedy(None, smollm2, ids)
    ranks = run_ranks(2, tmp_path, (greedy, smollm2, ids))
    (first, heads), (second, others) = (rank[0] for rank in ranks)
    assert first == second and (heads, others) == (2, 1)
    pairs = enumerate(zip(first, whole[0], strict=True))
    differs = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if differs is not None:  # then a tie, see `Reference.tie`
        before = [*ids.tolist(), *first[:differs]]
        assert Reference(smollm2).tie(before, (), first[differs])

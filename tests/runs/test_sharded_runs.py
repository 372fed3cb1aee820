"""Whole runs on two ranks, each of which makes the same decisions: the tokens of one process."""

from pathlib import Path

import pytest
import torch
from helpers.sharded_work import engine, greedy, measured, run_ranks, runs
from helpers.support import Reference

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


def test_tokens_of_one_process(tmp_path: Path) -> None:
    whole, (first, second) = runs(None, CASES), run_ranks(2, runs, tmp_path, CASES)
    assert len(whole) == len(CASES) and first == second, "a rank has decided otherwise"
    for name, answers in whole.items():
        assert first[name] == answers, name
        assert sum(len(ids) for texts in answers.values() for ids in texts) > 20
        branches = max(len(texts) for texts in answers.values())
        assert branches > 3 if "_" in name.partition(" ")[0] else branches == 1


def test_an_engine_on_every_rank(tmp_path: Path) -> None:
    whole, (first, second) = engine(None), run_ranks(2, engine, tmp_path)
    assert first == second == whole and max(map(len, whole)) > 1


def test_ranks_do_not_measure_each_for_itself(tmp_path: Path) -> None:
    said = run_ranks(2, measured, tmp_path)
    assert all("give drafter.costs" in one for one in said)


@pytest.mark.real_model
def test_a_model_whose_heads_do_not_come_out_even(smollm2: Path, tmp_path: Path) -> None:
    ids = torch.arange(1000, 1040)
    whole = greedy(None, smollm2, ids)
    (first, heads), (second, others) = run_ranks(2, greedy, tmp_path, smollm2, ids)
    assert first == second and (heads, others) == (2, 1)
    pairs = enumerate(zip(first, whole[0], strict=True))
    differs = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if differs is not None:  # then a tie, see `Reference.tie`
        before = [*ids.tolist(), *first[:differs]]
        assert Reference(smollm2).tie(before, (), first[differs])

"""Four ranks: one group, two of two, and every rank alone, with the weights where they are."""

from pathlib import Path

import pytest
import torch
from helpers.decoders import SHAPE, UNEVEN, save
from helpers.sharded_work import alone, often, regroup_bytes, regrouped, run_ranks

from specsot.models.families import decoder_config

IDS = torch.randint(SHAPE["vocab_size"], (16,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("steps", [[4, 2, 1], [4, 1]])
def test_one_group_then_two_then_everybody_alone(steps: list[int], tmp_path: Path) -> None:
    save(tmp_path / "model", "llama", UNEVEN)
    found = run_ranks(4, regrouped, tmp_path, tmp_path / "model", IDS, steps)
    config = decoder_config(tmp_path / "model")
    heads = {4: [1, 1, 1, 0], 2: [2, 2, 1, 1], 1: [3, 3, 3, 3]}
    for rank, one in enumerate(found):
        assert [step["tokens"] for step in one] == [alone(tmp_path / "model", IDS)] * len(steps)
        assert [step["heads"] for step in one] == [heads[tp][rank] for tp in steps]
        assert not any(step["copied"] for step in one)
        for step in one:
            size = regroup_bytes(config.num_layers, step["heads"], config.head_dim, 15, 4)
            assert step["got"] == size


def test_a_hundred_regroups_leave_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path / "model", "llama", UNEVEN)
    for files, memory in run_ranks(2, often, tmp_path, tmp_path / "model", IDS, 100):
        assert files[9] == files[-1]
        assert memory[-1] - memory[9] < 4000, "kilobytes"

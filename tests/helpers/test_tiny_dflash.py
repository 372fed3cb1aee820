"""The tiny DFlash drafter: repeatable, and worth drafting with for the tiny targets."""

from pathlib import Path

import pytest

from helpers.tiny_models.tiny import likely_ids, write_tiny_target
from helpers.tiny_models.tiny_dflash import write_tiny_dflash
from specsot.models.drafters.config import Reach
from specsot.models.load.checkpoint import model_hash
from specsot.models.load.weights import load_dflash, load_target

from .blocks import Pair

PROMPTS = ([7, 8, 9], [100, 20, 64, 11])


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("llama", 1), ("qwen3", 2)])
def test_it_is_often_right_and_often_wrong(family: str, seed: int, tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path / "target", family, seed))
    folder = write_tiny_dflash(tmp_path / "draft", tmp_path / "target", seed)
    drafter = load_dflash(folder, target)
    accepted = []
    for prompt in PROMPTS:
        run = Pair(target, drafter).generate(prompt, 40, [], 8)
        assert run.ids == Pair(target, drafter).generate(prompt, 40, [], 1).ids
        accepted += run.accepted
    assert 1.3 < sum(accepted) / len(accepted) < 6
    assert {1, 2, 3} <= set(accepted)


def test_the_context_counts(tmp_path: Path) -> None:
    """A drafter that is given other features drafts otherwise."""
    target = load_target(write_tiny_target(tmp_path / "target"))
    drafter = load_dflash(write_tiny_dflash(tmp_path / "draft", tmp_path / "target"), target)
    one, other = Pair(target, drafter), Pair(target, drafter)
    hidden = []
    for pair, ids in ((one, [7, 8, 9]), (other, [7, 60, 9])):
        taps = pair.run.forward(one.run.slots.new_tensor(ids), 0, drafter.tap_ids).taps_QF
        assert taps is not None
        pair.take_in(taps, 0)
        hidden.append(pair.draft(5, 3, 8))
    assert (hidden[0] - hidden[1]).abs().max() > 0.1


def test_sizes_and_the_mask_id(tmp_path: Path) -> None:
    target = load_target(write_tiny_target(tmp_path / "target", hidden=48, layers=5))
    folder = write_tiny_dflash(
        tmp_path / "draft", tmp_path / "target", block_size=5, layers=3, window=32
    )
    drafter = load_dflash(folder, target)
    assert drafter.config.reaches == (Reach(32, causal=True), Reach(), Reach())
    assert (drafter.block_size, drafter.tap_ids) == (5, (1, 3))
    assert drafter.mask_token_id not in likely_ids(target.lm_head.weight).tolist()
    assert max(Pair(target, drafter).generate([7, 8, 9], 40, [], 5).accepted) > 2


def test_the_same_seed_writes_the_same_files(tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "target")
    hashes = [
        model_hash(write_tiny_dflash(tmp_path / name, tmp_path / "target", seed))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert hashes[0] == hashes[1] != hashes[2]

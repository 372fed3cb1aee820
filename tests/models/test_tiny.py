"""The tiny models are what tests elsewhere rely on: repeatable, lively, worth drafting for."""

from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.sequences import Pair, Pooled

from specsot.models.drafters.config import Reach
from specsot.models.families import families
from specsot.models.load.weights import load_dflash, load_target, model_hash

NEW = 40
PROMPTS = ([7, 8, 9], [100, 20, 64, 11], [3, 3])


def greedy(run: Pooled, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """Token ids with `NEW` more, and the features of all but the last."""
    taps = (2, 4, 5)
    out, fresh, features = run.forward(torch.tensor(ids), 0, taps), list(ids), []
    for _ in range(NEW):
        features.append(out.taps_QF)
        fresh.append(int(out.logits_RV[-1].argmax()))
        out = run.forward(torch.tensor(fresh[-1:]), len(fresh) - 1, taps)
    return fresh, torch.cat(features)


@pytest.mark.parametrize("family", families())
def test_text_wanders_inside_the_likely_tokens(family: str, tmp_path: Path) -> None:
    model = load_target(tiny.write_tiny_target(tmp_path, family, 1))
    likely = set(tiny.likely_ids(model.lm_head.weight).tolist())
    assert len(likely) == 20 and {0, tiny.EOS, tiny.PAD} <= likely
    texts = [greedy(Pooled(model, torch.arange(64)), prompt)[0][-NEW:] for prompt in PROMPTS[:2]]
    assert all(set(text) <= likely and len(set(text)) >= 7 for text in texts)
    assert texts[0] != texts[1]


def test_the_same_seed_writes_the_same_files(tmp_path: Path) -> None:
    def hashes(name: str, seed: int) -> list[str]:
        target = tiny.write_tiny_target(tmp_path / name, "qwen2", seed)
        eagle = tiny.write_tiny_eagle3(tmp_path / f"{name}-eagle3", target, seed)
        return [model_hash(f) for f in (target, eagle, tiny.write_tiny_dflash(eagle, target, seed))]

    first, other = hashes("a", 3), hashes("c", 5)
    assert first == hashes("b", 3) and not set(first) & set(other)


def test_the_context_counts(tmp_path: Path) -> None:
    target = load_target(tiny.write_tiny_target(tmp_path / "target"))
    drafter = load_dflash(tiny.write_tiny_dflash(tmp_path / "draft", tmp_path / "target"), target)
    hidden = []
    for ids in ([7, 8, 9], [7, 60, 9]):
        pair = Pair(target, drafter)
        taps = pair.run.forward(torch.tensor(ids), 0, drafter.tap_ids).taps_QF
        assert taps is not None
        pair.take_in(taps, 0)
        hidden.append(pair.draft(5, 3, 8))
    assert (hidden[0] - hidden[1]).abs().max() > 0.1


def test_sizes_and_the_mask_id(tmp_path: Path) -> None:
    target = load_target(tiny.write_tiny_target(tmp_path / "target", hidden=48, layers=5))
    folder = tiny.write_tiny_dflash(
        tmp_path / "draft", tmp_path / "target", block_size=5, layers=3, window=32
    )
    drafter = load_dflash(folder, target)
    assert drafter.config.reaches == (Reach(32, causal=True), Reach(), Reach())
    assert (drafter.block_size, drafter.tap_ids) == (5, (1, 3))
    assert drafter.mask_token_id not in tiny.likely_ids(target.lm_head.weight).tolist()
    assert max(Pair(target, drafter).generate([7, 8, 9], 40, [], 5).accepted) > 2

"""The DFlash drafter against vectors of the reference code, and against itself in other layouts;
blocks and trees of whole runs: runs/test_golden_dflash.py."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sequences import DFLASH_GOLDEN, Pair, golden_pair, pool
from helpers.tiny import WEIGHTS, as_speculators, edit
from safetensors.torch import load_file
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.models.drafters.config import Reach, default_layer_ids, dflash_config
from specsot.models.drafters.dflash import DFlashDraftModel, within
from specsot.models.load.weights import load_dflash, load_target
from specsot.ops.attention.backends import AttentionPlan

LIMIT = 1e-4
RUNS: dict[str, Any] = json.loads((DFLASH_GOLDEN / "generate.json").read_text())
Both = tuple[Decoder, DFlashDraftModel]


@pytest.fixture(scope="module")
def models() -> Both:
    return golden_pair()


@pytest.fixture(scope="module")
def at() -> dict[str, Tensor]:
    return load_file(DFLASH_GOLDEN / "forward.safetensors")


def near(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= LIMIT


def test_its_parameters_are_the_published_tensors(models: Both) -> None:
    published, stored = models[1].published(), load_file(DFLASH_GOLDEN / "draft" / WEIGHTS)
    assert published.keys() == stored.keys()
    assert all(torch.equal(published[name], stored[name]) for name in stored)


def test_features_and_context(models: Both, at: dict[str, Tensor]) -> None:
    pair = Pair(*models)
    out = pair.run.forward(at["input_ids"][0], 0, pair.drafter.tap_ids)
    near(out.logits_RV, at["target_logits"][0])
    assert out.taps_QF is not None
    near(out.taps_QF, at["target_hidden"][0])
    near(pair.drafter.fuse(out.taps_QF), at["context"][0])


@pytest.mark.parametrize("pieces", [[11], [4, 1, 6], [1] * 11])
def test_a_block_after_a_context_that_came_in_pieces(
    models: Both, at: dict[str, Tensor], pieces: list[int]
) -> None:
    pair, start = Pair(*models), 0
    for piece in at["target_hidden"][0].split(pieces):
        pair.take_in(piece, start)
        start += len(piece)
    seen: list[Tensor] = []
    inputs = (pair.drafter.stack[1].input_layernorm, pair.drafter.norm)
    hooks = [part.register_forward_pre_hook(lambda _, x: seen.append(x[0])) for part in inputs]
    hidden = pair.draft(int(at["block_ids"][0, 0]), start, 8)
    for hook in hooks:
        hook.remove()
    near(torch.stack(seen), at["layer_hidden"][:, 0])
    near(hidden, at["hidden"][0])
    near(pair.drafter.logits(hidden), at["logits"][0])


@pytest.mark.parametrize("name", RUNS)
def test_whole_runs(models: Both, name: str) -> None:
    """Sampled runs replay the recorded answers; drafts are argmax at every temperature.

    Where a stop id is the mask id, the reference ends at its own padding: only its steps are used.
    """
    case = RUNS[name]

    def answer(step: int, logits: Tensor) -> list[int]:
        if case["temperature"]:
            return case["steps"][step]["posterior"] if step >= 0 else [case["first_token"]]
        return logits.argmax(-1).tolist()

    size, stops = case["block_size"] or 8, case["stop_token_ids"] or []
    run = Pair(*models).generate(case["prompt"], case["max_new_tokens"], stops, size, answer)
    assert run.ids == case.get("fixed_output_ids", case["output_ids"])
    assert run.accepted == case.get("fixed_acceptance_lengths", case["acceptance_lengths"])
    for ours, theirs in zip(run.steps, case["steps"], strict="quirk" not in case):
        keys = ("start", "verify_input_ids", "posterior", "new_context_len")
        assert list(ours) == [theirs[key] for key in keys]


def test_rounds_of_a_run(models: Both) -> None:
    at = load_file(DFLASH_GOLDEN / "rounds.safetensors")
    run = Pair(*models, seed=3).generate(RUNS["greedy"]["prompt"], 30, [], 8)
    for step in range(4):
        near(run.taps[step], at[f"step{step}.target_hidden"][0])
        near(run.hidden[step], at[f"step{step}.hidden"][0])


def test_the_reach_of_a_layer_drawn_as_matrices() -> None:
    seen, queries = torch.ones(1, 3, 5, dtype=torch.bool), torch.tensor([[2, 3, 4]])

    def draw(reach: Reach) -> list[str]:
        mask = within(seen, queries, torch.arange(5)[None], reach)[0]
        return ["".join("#" if x else "." for x in row) for row in mask.tolist()]

    assert draw(Reach()) == ["#####", "#####", "#####"]
    assert draw(Reach(None, causal=True)) == ["###..", "####.", "#####"]
    assert draw(Reach(2, causal=True)) == [".##..", "..##.", "...##"]
    assert draw(Reach(2)) == [".###.", "..###", "...##"]


def test_branches_side_by_side_do_not_see_each_other(models: Both, at: dict[str, Tensor]) -> None:
    """Two branches behind one prefix of 4: as one sequence, and as two rows of a pool."""
    drafter, taps = models[1], at["target_hidden"][0]
    alone = []
    for length, anchor in BRANCHES:
        pair = Pair(*models)
        pair.take_in(torch.cat((taps[:4], taps[11 - length + 4 :])), 0)
        alone.append(pair.draft(anchor, length, 8))
    for packed in (True, False):
        with torch.inference_mode():
            ours = _two_branches(drafter, taps, packed)
        assert (ours - torch.stack(alone)).abs().max() < 1e-5


BRANCHES = ((9, 5), (6, 70))  # length and anchor


def _two_branches(drafter: DFlashDraftModel, taps: Tensor, packed: bool) -> Tensor:
    """hidden [2, 8, H]; with `packed` the prefix is held once, else once in each row."""
    kv = pool(drafter, 40, rows=1 if packed else 2)
    mask, positions = torch.zeros(2, 8, 40).bool(), torch.full((2, 40), 10**6)
    slots, prefix = torch.zeros(2, 8, dtype=torch.int64), drafter.fuse(taps[:4])
    free = 4
    for branch, (length, _) in enumerate(BRANCHES):
        row, free = (0, free) if packed else (branch, 4)
        if branch == 0 or not packed:
            drafter.write_context_(prefix, torch.arange(4), torch.arange(4) + 40 * row, kv)
        own = torch.arange(free, free + length - 4 + 8)
        context = drafter.fuse(taps[11 - length + 4 :])
        drafter.write_context_(context, torch.arange(4, length), own[:-8] + 40 * row, kv)
        positions[row, :4], positions[row, own] = torch.arange(4), torch.arange(4, length + 8)
        mask[branch, :, :4] = mask[branch, :, own] = True
        slots[branch], free = own[-8:] + 40 * row, free + len(own)
    ids = torch.full((2, 8), drafter.mask_token_id)
    lengths, ids[:, 0] = torch.tensor(BRANCHES).unbind(1)
    queries = lengths[:, None] + torch.arange(8)
    if not packed:
        apart = AttentionPlan.dense(mask, positions, stride=40)
        return drafter(ids, queries, slots, apart, kv)
    flat = (x.reshape(1, -1) for x in (ids, queries, slots))
    seen = AttentionPlan.dense(mask.reshape(1, 16, 40), positions[:1])
    return drafter(*flat, seen, kv).view(2, 8, -1)


def test_taps_in_another_order_and_taken_twice(models: Both) -> None:
    target, drafter = models
    config = replace(drafter.config, layer_ids=(2, 0, 2))
    assert config.tap_ids == (1, 3)
    other = DFlashDraftModel(config, drafter.ends)
    with torch.no_grad():
        first, last = drafter.fc.weight.chunk(2, -1)
        other.fc.weight.copy_(torch.cat((0.25 * last, first, 0.75 * last), -1))
        other.hidden_norm.load_state_dict(drafter.hidden_norm.state_dict())
        features = torch.randn(3, 2 * target.hidden_size)
        near(other.fuse(features), drafter.fuse(features))


def test_bfloat16_and_the_ends_of_the_target(models: Both) -> None:
    target, drafter = models
    narrow = load_dflash(DFLASH_GOLDEN / "draft", target, torch.bfloat16)
    assert narrow.ends.embed_VH is target.embed and narrow.ends.head_VH is target.lm_head.weight
    pair, wide = Pair(target, narrow), Pair(target, drafter)
    prompt = RUNS["greedy"]["prompt"]
    assert pair.generate(prompt, 30, [], 8).ids == wide.generate(prompt, 30, [], 8).ids
    assert narrow.logits(torch.zeros(1, 64, dtype=torch.bfloat16)).dtype == torch.float32


def test_the_rule_for_taps() -> None:
    facts = json.loads((DFLASH_GOLDEN / "training.json").read_text())["build_target_layer_ids"]
    for sizes, expected in facts.items():
        assert default_layer_ids(*map(int, sizes.split(","))) == tuple(expected), sizes


# -- files: what is read in which spelling; those that are refused: test_bad_checkpoints.py

SLIDING = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return load_target(DFLASH_GOLDEN / "target")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DFLASH_GOLDEN / "draft", tmp_path / "draft"))


def test_the_architecture_of_the_config_is_no_matter(draft: Path, target: Decoder) -> None:
    edit(draft, architectures=["LlamaForCausalLM"])
    (note,) = load_dflash(draft, target).notes
    assert "['LlamaForCausalLM']: read as DFlashDraftModel" in note


def test_spellings_of_later_files(draft: Path, target: Decoder) -> None:
    first = dflash_config(draft, target.config)
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    edit(draft, {"block_size": 8}, block_size=None, rope_theta=None, rope_parameters=rope)
    assert dflash_config(draft, target.config) == first
    assert first.block_size == 8 and first.rope.theta == 1e6


def test_the_layout_of_speculators(draft: Path, target: Decoder) -> None:
    first = load_dflash(draft, target)
    second = load_dflash(as_speculators(draft, target), target)
    assert second.config == replace(first.config, speculators=True)
    assert all(torch.equal(v, second.published()[k]) for k, v in first.published().items())


def test_sliding_layers_of_speculators(draft: Path, target: Decoder) -> None:
    edit(draft, layer_types=SLIDING, sliding_window=16)
    as_speculators(draft, target)
    assert dflash_config(draft, target.config).reaches == (Reach(16, causal=True), Reach())
    edit(draft, sliding_window_non_causal=True)
    assert dflash_config(draft, target.config).reaches == (Reach(16), Reach())


CAUSAL = {"layer_types": SLIDING, "sliding_window": 16, "use_sliding_window": True}
KINDS: dict[str, tuple[dict[str, object], tuple[Reach, Reach]]] = {
    "named": (CAUSAL, (Reach(16, causal=True), Reach())),
    "named, not causal": (CAUSAL | {"is_causal": False}, (Reach(16), Reach())),
    "all causal": ({"is_causal": True}, (Reach(None, causal=True), Reach(None, causal=True))),
    "section": (CAUSAL | {"is_causal": True, "inner": {"causal": False}}, (Reach(16), Reach())),
    "from a layer on": (
        CAUSAL | {"layer_types": None, "max_window_layers": 1},
        (Reach(), Reach(16, causal=True)),
    ),
    "off": (CAUSAL | {"layer_types": None, "use_sliding_window": False}, (Reach(), Reach())),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_layers_are_read_and_written(name: str, draft: Path, target: Decoder) -> None:
    changes, expected = KINDS[name]
    edit(draft, **changes)
    config = dflash_config(draft, target.config)
    assert config.reaches == expected
    assert bool(config.notes) == any(reach.window for reach in expected)
    (draft / "config.json").write_text(json.dumps(config.to_json()))
    assert dflash_config(draft, target.config) == config


def test_without_taps_the_rule_holds(draft: Path, target: Decoder) -> None:
    edit(draft, inner={"target_layer_ids": None})
    assert dflash_config(draft, target.config).layer_ids == (1, 1)


def test_scaled_angles_survive(draft: Path, target: Decoder) -> None:
    edit(draft, rope_scaling={"rope_type": "linear", "factor": 2.0})
    config = dflash_config(draft, target.config)
    assert (config.rope.kind, config.rope.settings) == ("linear", {"factor": 2.0})
    (draft / "config.json").write_text(json.dumps(config.to_json()))
    assert dflash_config(draft, target.config) == config
    plain, scaled = load_dflash(DFLASH_GOLDEN / "draft", target), load_dflash(draft, target)
    assert torch.equal(scaled.frequencies_RF * 2, plain.frequencies_RF)

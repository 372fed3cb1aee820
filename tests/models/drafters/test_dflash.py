"""The DFlash drafter against vectors of the reference code, and against itself in other layouts."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.sequences import DFLASH_GOLDEN, Pair, golden_pair
from safetensors.torch import load_file
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.models.drafters.config import Reach, default_layer_ids
from specsot.models.drafters.dflash import DFlashDraftModel, within
from specsot.models.load.weights import load_dflash
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.forward import BlockDrafter
from specsot.ops.kv.pool import KVCache

LIMIT = 1e-4
RUNS: dict[str, Any] = json.loads((DFLASH_GOLDEN / "generate.json").read_text())
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def models() -> tuple[Decoder, DFlashDraftModel]:
    return golden_pair()


@pytest.fixture(scope="module")
def at() -> dict[str, Tensor]:
    return load_file(DFLASH_GOLDEN / "forward.safetensors")


def near(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= LIMIT


def test_it_fulfils_its_protocol(models: tuple[Decoder, DFlashDraftModel]) -> None:
    drafter: BlockDrafter = models[1]
    assert (drafter.block_size, drafter.mask_token_id, drafter.tap_ids) == (8, 127, (1, 3))


def test_its_parameters_are_the_published_tensors(models: tuple[Decoder, DFlashDraftModel]) -> None:
    published, stored = models[1].published(), load_file(DFLASH_GOLDEN / "draft" / WEIGHTS)
    assert published.keys() == stored.keys()
    assert all(torch.equal(published[name], stored[name]) for name in stored)


def test_features_and_context(
    models: tuple[Decoder, DFlashDraftModel], at: dict[str, Tensor]
) -> None:
    pair = Pair(*models)
    out = pair.run.forward(at["input_ids"][0], 0, pair.drafter.tap_ids)
    near(out.logits_RV, at["target_logits"][0])
    assert out.taps_QF is not None
    near(out.taps_QF, at["target_hidden"][0])
    near(pair.drafter.fuse(out.taps_QF), at["context"][0])


@pytest.mark.parametrize("pieces", [[11], [4, 1, 6], [1] * 11])
def test_a_block_after_a_context_that_came_in_pieces(
    models: tuple[Decoder, DFlashDraftModel], at: dict[str, Tensor], pieces: list[int]
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
def test_whole_runs(models: tuple[Decoder, DFlashDraftModel], name: str) -> None:
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


def test_rounds_of_a_run(models: tuple[Decoder, DFlashDraftModel]) -> None:
    at = load_file(DFLASH_GOLDEN / "rounds.safetensors")
    run = Pair(*models, seed=3).generate(RUNS["greedy"]["prompt"], 30, [], 8)
    for step in range(4):
        near(run.taps[step], at[f"step{step}.target_hidden"][0])
        near(run.hidden[step], at[f"step{step}.hidden"][0])


def varied(drafter: DFlashDraftModel, reaches: tuple[Reach, ...]) -> DFlashDraftModel:
    other = DFlashDraftModel(replace(drafter.config, reaches=reaches), drafter.ends)
    other.load_state_dict(drafter.state_dict())
    return other.eval()


REACHES = {
    "full": (Reach(), Reach()),
    "sliding": (Reach(9, causal=True), Reach()),
    "sliding, both ways": (Reach(9), Reach(12)),
    "causal": (Reach(None, causal=True), Reach(None, causal=True)),
}


def by_hand(drafter: DFlashDraftModel, context_KH: Tensor, anchor: int) -> Tensor:
    """One block with every score written out, no pool and no folding of heads: [Q, H]."""
    size, length = drafter.block_size, len(context_KH)
    ids = torch.full((size,), drafter.mask_token_id).index_fill(0, torch.tensor([0]), anchor)
    before, own = torch.arange(length), torch.arange(length, length + size)
    ahead = torch.cat((before, own))[None] - own[:, None]
    x = drafter.embed(ids)
    for layer, reach in zip(drafter.stack, drafter.config.reaches, strict=True):
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), drafter.angles(own))
        k0, v0 = layer.self_attn.keys_values(context_KH, drafter.angles(before))
        keys, values = torch.cat((k0, k)), torch.cat((v0, v))
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if reach.causal:
            hidden |= ahead > 0
        if reach.window:
            hidden |= ahead.abs() >= reach.window
        heads = []
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = q[:, head] @ keys[:, group].T / drafter.head_dim**0.5
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            heads.append(weights @ values[:, group])
        x = layer.finish(x, torch.cat(heads, -1))
    return drafter.norm(x)


@pytest.mark.parametrize("name", REACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kind_of_layer_against_scores_written_out(
    models: tuple[Decoder, DFlashDraftModel],
    at: dict[str, Tensor],
    name: str,
    dtype: torch.dtype,
) -> None:
    drafter = varied(models[1], REACHES[name]).to(dtype)
    pair = Pair(models[0], drafter)
    pair.take_in(at["target_hidden"][0], 0)
    hidden = pair.draft(5, 11, 8)
    assert hidden.dtype == drafter.logits(hidden).dtype == dtype
    with torch.inference_mode():
        expected = by_hand(drafter, drafter.fuse(at["target_hidden"][0]), 5)
    assert (hidden - expected).abs().max() < (1e-5 if dtype == torch.float32 else 1e-12)


def test_the_reach_of_a_layer_drawn_as_matrices() -> None:
    seen, queries = torch.ones(1, 3, 5, dtype=torch.bool), torch.tensor([[2, 3, 4]])

    def draw(reach: Reach) -> list[str]:
        mask = within(seen, queries, torch.arange(5)[None], reach)[0]
        return ["".join("#" if x else "." for x in row) for row in mask.tolist()]

    assert draw(Reach()) == ["#####", "#####", "#####"]
    assert draw(Reach(None, causal=True)) == ["###..", "####.", "#####"]
    assert draw(Reach(2, causal=True)) == [".##..", "..##.", "...##"]
    assert draw(Reach(2)) == [".###.", "..###", "...##"]


def test_branches_side_by_side_do_not_see_each_other(
    models: tuple[Decoder, DFlashDraftModel], at: dict[str, Tensor]
) -> None:
    """Two branches behind one prefix of 4: as one sequence, and as two rows of a pool."""
    drafter, taps = models[1], at["target_hidden"][0]
    lengths, anchors = (9, 6), (5, 70)
    alone = []
    for length, anchor in zip(lengths, anchors, strict=True):
        pair = Pair(*models)
        pair.take_in(torch.cat((taps[:4], taps[11 - length + 4 :])), 0)
        alone.append(pair.draft(anchor, length, 8))
    with torch.inference_mode():
        packed = _two_branches(drafter, taps, lengths, anchors, packed=True)
        rows = _two_branches(drafter, taps, lengths, anchors, packed=False)
    for ours in (packed, rows):
        assert (ours - torch.stack(alone)).abs().max() < 1e-5


def _two_branches(
    drafter: DFlashDraftModel,
    taps: Tensor,
    lengths: tuple[int, int],
    anchors: tuple[int, int],
    *,
    packed: bool,
) -> Tensor:
    """hidden [2, 8, H]; with `packed` the prefix is held once, else once in each row."""
    shape = (drafter.num_layers, drafter.kv_heads, drafter.head_dim, 40, 1 if packed else 2)
    kv = KVCache(*shape)
    kv.data.fill_(1e3)
    mask, positions = torch.zeros(2, 8, 40).bool(), torch.full((2, 40), 10**6)
    slots, prefix = torch.zeros(2, 8, dtype=torch.int64), drafter.fuse(taps[:4])
    free = 4
    for branch, length in enumerate(lengths):
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
    ids[:, 0] = torch.tensor(anchors)
    queries = torch.tensor(lengths)[:, None] + torch.arange(8)
    if not packed:
        apart = AttentionPlan.dense(mask, positions, stride=40)
        return drafter(ids, queries, slots, apart, kv)
    flat = (x.reshape(1, -1) for x in (ids, queries, slots))
    seen = AttentionPlan.dense(mask.reshape(1, 16, 40), positions[:1])
    return drafter(*flat, seen, kv).view(2, 8, -1)


def test_taps_in_another_order_and_taken_twice(models: tuple[Decoder, DFlashDraftModel]) -> None:
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


def test_bfloat16_and_the_ends_of_the_target(models: tuple[Decoder, DFlashDraftModel]) -> None:
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

"""The EAGLE-3 drafter against vectors of the reference code and of speculators."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.sequences import EAGLE_GOLDEN, Pooled, causal, pool
from helpers.tiny import edit, put
from safetensors.torch import load_file, save_file
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.models.drafters.eagle import Eagle3
from specsot.models.files import ModelError
from specsot.models.load.weights import load_eagle3, load_target
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import decode_plan

LIMIT = 1e-4
CASES = {"e3_llama": ("llama", "llama_eagle3"), "e3_qwen3": ("qwen3", "qwen3_eagle3")}
SPECULATORS = EAGLE_GOLDEN / "drafts" / "llama_eagle3_speculators"


class Golden:
    """One recorded first round with the models that it was recorded from."""

    def __init__(self, case: str, draft: str | None = None) -> None:
        target, eagle3 = CASES[case]
        self.at = load_file(EAGLE_GOLDEN / case / "first_round.safetensors")
        self.target: Decoder = load_target(EAGLE_GOLDEN / "targets" / target)
        self.drafter: Eagle3 = load_eagle3(EAGLE_GOLDEN / "drafts" / (draft or eagle3), self.target)
        self.length = len(self.at["prompt_ids"])

    def near(self, ours: Tensor, name: str) -> None:
        theirs = self.at[name]
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= LIMIT, name


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def draft(
    drafter: Eagle3, kv: KVCache, ids: Tensor, hidden: Tensor, start: int, visible: AttentionPlan
) -> Tensor:
    """Rows at consecutive slots from `start`, at the positions of those slots."""
    slots = torch.arange(start, start + len(ids))[None]
    with torch.inference_mode():
        return drafter(ids[None].long(), hidden[None], slots, slots, visible, kv)[0]


def prefill(golden: Golden, kv: KVCache) -> Tensor:
    hidden = golden.drafter.fuse(golden.at["draft.in_hidden"])
    return draft(golden.drafter, kv, golden.at["draft.in_ids"], hidden, 0, causal(golden.length))


def log_probabilities(golden: Golden, hidden: Tensor) -> Tensor:
    return golden.drafter.logits(hidden).log_softmax(-1)


def test_prefill_of_the_target(golden: Golden) -> None:
    run = Pooled(golden.target, torch.arange(golden.length))
    out = run.forward(golden.at["prompt_ids"].long(), 0, golden.drafter.tap_ids)
    golden.near(out.logits_RV, "target.prefill_logits")
    golden.near(out.taps_QF, "target.prefill_aux_hidden")


def test_verification_of_a_tree(golden: Golden) -> None:
    at, length = golden.at, golden.length
    run = Pooled(golden.target, torch.arange(100))
    run.forward(at["prompt_ids"].long(), 0)
    tree = at["tree.tree_mask"].bool()
    nodes = len(tree)
    mask = torch.cat((torch.ones(nodes, length, dtype=torch.bool), tree), 1)[None]
    slots = torch.arange(length, length + nodes)[None]
    with torch.inference_mode():
        out = golden.target(
            at["tree.draft_tokens"].long()[None],
            at["verify.position_ids"].long()[None],
            slots,
            AttentionPlan.dense(mask, torch.zeros(1, length + nodes, dtype=torch.int64)),
            run.kv,
            decode_plan(golden.target.num_layers),
            torch.arange(nodes),
            golden.drafter.tap_ids,
        )
    golden.near(out.logits_RV, "verify.logits")
    golden.near(out.taps_QF, "verify.aux_hidden")


def test_prefill_of_the_drafter_and_the_rows_it_keeps(golden: Golden) -> None:
    kv = pool(golden.drafter, 100)
    out = prefill(golden, kv)
    golden.near(out, "root.out_hidden")
    golden.near(log_probabilities(golden, out[-1]), "root.logprobs")
    golden.near(kv.data[0, 0, :, : golden.length], "draft.kv.k")
    golden.near(kv.data[0, 1, :, : golden.length], "draft.kv.v")


def test_every_level_of_the_first_tree(golden: Golden) -> None:
    at, kv = golden.at, pool(golden.drafter, 100)
    prefill(golden, kv)
    levels = [name for name in at if name.endswith(".tree_mask") and name.startswith("level")]
    for level in range(len(levels)):
        own = at[f"level{level}.tree_mask"].bool()
        rows, start = len(own), golden.length + level * len(own)
        mask = torch.cat((torch.ones(rows, golden.length, dtype=torch.bool), own), 1)[None]
        slots = torch.arange(start, start + rows)[None]
        with torch.inference_mode():
            out = golden.drafter(
                at[f"level{level}.in_ids"].long()[None],
                at[f"level{level}.in_hidden"][None],
                at[f"level{level}.position_ids"].long()[None],
                slots,
                AttentionPlan.dense(mask, torch.zeros(1, start + rows, dtype=torch.int64)),
                kv,
            )[0]
        golden.near(out, f"level{level}.out_hidden")
        golden.near(log_probabilities(golden, out), f"level{level}.logprobs")


def test_the_second_draft_continues_the_kept_rows(golden: Golden) -> None:
    at, kv = golden.at, pool(golden.drafter, 100)
    prefill(golden, kv)
    rows, start = len(at["round1.in_ids"]), golden.length
    mask_BQK = causal(start + rows).groups[0].mask_GqK[:, start:]
    visible = AttentionPlan.dense(mask_BQK, torch.arange(start + rows)[None])
    hidden = golden.drafter.fuse(at["round1.in_hidden"])
    out = draft(golden.drafter, kv, at["round1.in_ids"], hidden, start, visible)
    golden.near(out, "round1.root.out_hidden")
    golden.near(kv.data[0, 0, :, : start + rows], "round1.kv.k")
    golden.near(kv.data[0, 1, :, : start + rows], "round1.kv.v")


def test_a_draft_id_leads_to_its_target_id(golden: Golden) -> None:
    drafter = golden.drafter
    ids = torch.arange(drafter.config.draft_vocab_size).view(2, -1)
    targets = drafter.to_target(ids)
    assert targets.shape == ids.shape and targets.unique().numel() == ids.numel()
    assert torch.equal(drafter.t2d.nonzero().flatten(), targets.flatten().sort().values)


def test_both_layouts_of_one_drafter_give_the_same_output() -> None:
    eagle, speculators = Golden("e3_llama"), Golden("e3_llama", SPECULATORS.name)
    out, same = (
        prefill(eagle, pool(eagle.drafter, 20)),
        prefill(speculators, pool(eagle.drafter, 20)),
    )
    assert torch.equal(out, same)
    assert torch.equal(eagle.drafter.d2t, speculators.drafter.d2t)
    assert set(speculators.drafter.published()) == set(load_file(SPECULATORS / "model.safetensors"))


def test_float64_and_bfloat16() -> None:
    golden = Golden("e3_llama")
    wide = load_eagle3(EAGLE_GOLDEN / "drafts" / "llama_eagle3", golden.target, torch.float64)
    hidden = wide.fuse(golden.at["draft.in_hidden"])
    kv = pool(wide, 20, torch.float64)
    out = draft(wide, kv, golden.at["draft.in_ids"], hidden, 0, causal(golden.length))
    assert out.dtype == wide.logits(out).dtype == torch.float64
    golden.near(out.float(), "root.out_hidden")
    narrow = load_eagle3(EAGLE_GOLDEN / "drafts" / "llama_eagle3", golden.target, torch.bfloat16)
    hidden = narrow.fuse(golden.at["draft.in_hidden"])
    kv = pool(narrow, 20, torch.bfloat16)
    out = draft(narrow, kv, golden.at["draft.in_ids"], hidden, 0, causal(golden.length))
    assert (out.float() - golden.at["root.out_hidden"]).abs().max() < 0.1
    assert narrow.logits(out).dtype == torch.float32


VARIANTS: dict[str, dict[str, object]] = {
    "default": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all31": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
}


def variant(folder: Path, name: str) -> Path:
    shutil.copytree(SPECULATORS, folder)
    extra = load_file(SPECULATORS / "norm_variants.safetensors")
    weights = load_file(SPECULATORS / "model.safetensors")
    wanted = {"norm_before_fc": "input_norm", "fc_norm": "fc_norm.", "all31": "fc_norm."}
    prefix = wanted.get(name)
    if prefix is not None:
        weights |= {k: v for k, v in extra.items() if k.startswith(prefix) and k.endswith("weight")}
    save_file(weights, folder / "model.safetensors")
    edit(folder, **VARIANTS[name])
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_switches_of_speculators(name: str, tmp_path: Path) -> None:
    """Step 0 is a causal forward; step 1 feeds its output back, one position on.

    In step 1 a row sees the step-0 keys of its own and earlier rows and, beside them, its own new
    key; one forward per row over the same pool says the same.
    """
    golden = Golden("e3_llama")
    at = load_file(SPECULATORS / "norm_variants.safetensors")
    drafter = load_eagle3(variant(tmp_path / name, name), golden.target)
    rows = len(at["in_ids"])
    kv, ids = pool(drafter, 2 * rows), at["in_ids"]
    kept: list[Tensor] = []
    drafter.midlayer.register_forward_hook(lambda module, given, out: kept.append(out))

    def near(ours: Tensor, what: str) -> None:
        assert (ours - at[f"{name}.{what}"]).abs().max() <= LIMIT, what

    out = draft(drafter, kv, ids, drafter.fuse(at["in_aux_hidden"]), 0, causal(rows))
    near(kept[0], "step0.layer_out")
    near(drafter.logits(out), "step0.logits")
    history = torch.ones(rows, rows, dtype=torch.bool).tril()
    mask = torch.cat((history, torch.eye(rows, dtype=torch.bool)), 1)[None]
    shifted = torch.cat((ids[1:], torch.zeros(1, dtype=ids.dtype)))
    slots = torch.arange(rows, 2 * rows)[None]
    positions = torch.arange(1, rows + 1)[None]
    visible = AttentionPlan.dense(mask, torch.zeros(1, 2 * rows, dtype=torch.int64))
    with torch.inference_mode():
        out = drafter(shifted[None], out[None], positions, slots, visible, kv)[0]
    near(kept[1], "step1.layer_out")
    near(drafter.logits(out), "step1.logits")


def test_what_a_silent_or_ambiguous_file_is_taken_to_mean(tmp_path: Path) -> None:
    target = load_target(EAGLE_GOLDEN / "targets" / "llama")
    folder = variant(tmp_path / "silent", "default")
    edit(folder, norm_before_residual=None)
    drafter = load_eagle3(folder, target)
    assert drafter.config.norm_before_residual and "norm_before_residual" in drafter.notes[0]
    other = tmp_path / "specforge"
    shutil.copytree(EAGLE_GOLDEN / "drafts" / "llama_eagle3", other)
    edit(other, norm_output=True)
    drafter = load_eagle3(other, target)
    assert not drafter.config.norm_output and "norm_output" in drafter.notes[0]


def test_a_config_of_forty_layers_over_the_tensors_of_one(tmp_path: Path) -> None:
    """Communities copy a target's config.json and change what their loader looks at."""
    target = load_target(EAGLE_GOLDEN / "targets" / "llama")
    folder = tmp_path / "odd"
    shutil.copytree(EAGLE_GOLDEN / "drafts" / "llama_eagle3", folder)
    plain = load_eagle3(folder, target)
    edit(folder, num_hidden_layers=40, architectures=["Odd"], rope_theta=10000.0)
    odd = load_eagle3(folder, target)
    (note,) = odd.notes
    assert note.startswith("`num_hidden_layers` is 40: EAGLE-3 drafters have one layer")
    assert replace(odd.config, path=plain.config.path, notes=plain.notes) == plain.config


def test_where_tap_ids_come_from(tmp_path: Path) -> None:
    target = load_target(EAGLE_GOLDEN / "targets" / "llama")
    folder = tmp_path / "taps"
    shutil.copytree(EAGLE_GOLDEN / "drafts" / "llama_eagle3", folder)
    key = "eagle_aux_hidden_state_layer_ids"
    edit(folder, eagle_config={key: [1, 3, 4]})
    assert load_eagle3(folder, target).tap_ids == (2, 4, 5)
    assert load_eagle3(folder, target).notes == ("`rope_theta` is not given: 10000 assumed",)
    edit(folder, **{key: [1, 4, 7]})
    drafter = load_eagle3(folder, target)
    assert drafter.tap_ids == (1, 4, 7) and "(2, 4, 5)" in drafter.notes[0]
    edit(folder, **{key: [0, 3, 8]})
    assert load_eagle3(folder, target).tap_ids == (0, 3, 8)
    edit(folder, **{key: [0, 3, 9]})
    with pytest.raises(ModelError, match="9"):
        load_eagle3(folder, target)


def test_the_embedding_is_the_targets_own_memory(tmp_path: Path) -> None:
    golden = Golden("e3_llama")
    shared = golden.drafter.embed_tokens.weight
    assert shared.data_ptr() == golden.target.embed.data_ptr()
    assert "embed_tokens.weight" not in golden.drafter.published()
    folder = tmp_path / "own"
    shutil.copytree(EAGLE_GOLDEN / "drafts" / "llama_eagle3", folder)
    put("embed_tokens.weight", 2 * golden.target.embed.detach())(folder)
    drafter = load_eagle3(folder, golden.target)
    assert torch.equal(drafter.embed_tokens.weight, 2 * golden.target.embed)
    assert "embed_tokens.weight" in drafter.published()

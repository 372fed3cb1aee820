"""The decoder against transformers, for every family and option."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.decoders import CASES, LAYERS, LLAMA3, LONG, SHAPE, save
from helpers.sequences import Pooled, causal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from specsot.models.config import ROPE_KINDS, ModelError
from specsot.models.decoder import KeyRecorder
from specsot.models.families import families
from specsot.models.layers import rotate, rotate_back
from specsot.models.load.weights import load_target
from specsot.ops.attention.backends import AttentionBackend, AttentionPlan
from specsot.ops.attention.metadata import AttentionGroup, SlotRun
from specsot.ops.kv.pool import KVCache
from specsot.ops.layer_plan import LayerStatus, decode_plan

LENGTH = 24


@dataclass
class Case:
    folder: Path
    ids: Tensor
    logits: Tensor
    hidden: list[Tensor]


def reference(folder: Path, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    own: Any = {"dtype": dtype, "experts_implementation": "eager"}  # the others lack float64
    model = AutoModelForCausalLM.from_pretrained(folder, **own).eval()
    with torch.inference_mode():
        out = model(ids[None], output_hidden_states=True)
    return out.logits[0], [h[0] for h in out.hidden_states]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    save(folder, *CASES[request.param])
    ids = torch.randint(SHAPE["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(1))
    return Case(folder, ids, *reference(folder, ids, torch.float32))


def close(ours: Tensor, theirs: Tensor, limit: float) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= limit


def test_prefill_in_one_forward_and_every_tap(case: Case) -> None:
    run = Pooled(load_target(case.folder), torch.arange(LENGTH))
    out = run.forward(case.ids, 0, taps=tuple(range(LAYERS + 1)))
    close(out.logits_RV, case.logits, 1e-4)
    close(out.taps_QF, torch.cat(case.hidden, -1), 1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(set(families()) & set(CONFIG_MAPPING)))
def test_shards_as_transformers_writes_them(family: str, tied: bool, tmp_path: Path) -> None:
    save(tmp_path / "whole", family, {"tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    ids = torch.arange(LENGTH)
    with torch.inference_mode():
        theirs = model(ids[None]).logits[0]
    run = Pooled(load_target(tmp_path / "parts"), torch.arange(LENGTH))
    close(run.forward(ids, 0).logits_RV, theirs, 1e-4)


def test_any_slots_and_any_chunks(case: Case) -> None:
    slots = torch.randperm(3 * LENGTH, generator=torch.Generator().manual_seed(2))[:LENGTH]
    model = load_target(case.folder)
    close(Pooled(model, slots).chunks(case.ids, [7, 1, 11, 5]), case.logits, 1e-4)
    close(Pooled(model, slots).chunks(case.ids, [1] * LENGTH), case.logits, 1e-4)


def test_float64_equals_float64(case: Case) -> None:
    run = Pooled(load_target(case.folder, torch.float64), torch.arange(LENGTH), torch.float64)
    logits = run.chunks(case.ids, [20, 4])
    assert logits.dtype == torch.float64
    close(logits, reference(case.folder, case.ids, torch.float64)[0], 1e-9)


def test_bfloat16_is_near(case: Case) -> None:
    run = Pooled(load_target(case.folder, torch.bfloat16), torch.arange(LENGTH), torch.bfloat16)
    logits = run.forward(case.ids, 0).logits_RV
    assert logits.dtype == torch.float32
    close(logits, case.logits, 0.25 * float(case.logits.std()))


def test_the_old_spelling_of_rope_settings(tmp_path: Path) -> None:
    options = {"rope_parameters": LLAMA3 | {"rope_theta": 250000.0}}
    save(tmp_path, "llama", options)
    new = load_target(tmp_path).config.rope
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    parameters = raw.pop("rope_parameters")
    raw["rope_theta"] = parameters.pop("rope_theta")
    raw["rope_scaling"] = parameters | {"type": parameters.pop("rope_type")}
    path.write_text(json.dumps(raw))
    assert load_target(tmp_path).config.rope == new
    assert (new.kind, new.theta) == ("llama3", 250000.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pooled:
    folder = tmp_path_factory.mktemp("small")
    save(folder, "mistral", {"sliding_window": 6})
    return Pooled(load_target(folder), torch.arange(LENGTH))


IDS = torch.arange(8)


def asked(run: Pooled, **changes: Any) -> dict[str, Any]:
    positions = torch.arange(8)[None]
    return {
        "tokens_BQ": IDS[None],
        "positions_BQ": positions,
        "slots_BQ": positions,
        "attention": causal(8),
        "kv": run.kv,
        "plan": decode_plan(run.model.num_layers),
        "logit_rows_R": torch.tensor([7, 2]),
        "taps": (),
    } | changes


def ask(run: Pooled, **changes: Any) -> Any:
    with torch.inference_mode():
        return run.model(**asked(run, **changes))


def test_logits_only_for_the_asked_rows_in_their_order(small: Pooled) -> None:
    every = small.forward(IDS, 0).logits_RV
    out = ask(small)
    close(out.logits_RV, every[[7, 2]], 1e-5)
    assert out.taps_QF is None
    assert ask(small, logit_rows_R=torch.tensor([], dtype=torch.int64)).logits_RV.shape == (0, 61)


def test_taps_are_joined_in_increasing_order(small: Pooled) -> None:
    assert torch.equal(ask(small, taps=(2, 0)).taps_QF, ask(small, taps=(0, 2)).taps_QF)


def test_a_window_counts_true_positions_not_slots(small: Pooled) -> None:
    """The same rows 100 positions later give the same logits: RoPE and window are relative."""
    before = ask(small).logits_RV
    positions = torch.arange(100, 108)[None]
    attention = AttentionPlan.dense(causal(8).groups[0].mask_GqK, positions)
    late = ask(small, positions_BQ=positions, attention=attention)
    close(late.logits_RV, before, 1e-4)


def groups_of(positions_Q: Tensor, *parts: tuple[Any, list[list[int]]]) -> AttentionPlan:
    """Causal groups: slots, a run for each sequence or a list, and the rows of the sequences."""
    groups = []
    for keys, rows in parts:
        slots_GK = keys if isinstance(keys, Tensor) else torch.from_numpy(keys.slots_GK)
        places_GK, rows_Gq = positions_Q[slots_GK.long()], torch.tensor(rows)
        mask_GqK = places_GK[:, None] <= positions_Q[rows_Gq][..., None]
        groups.append(AttentionGroup(rows_Gq, keys, mask_GqK, places_GK, rows_Gq.numpy()))
    return AttentionPlan(AttentionBackend(), tuple(groups))


KINDS = ["one mask", "side by side", "two groups", "lists of slots", "unequal"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_branches_do_not_see_each_other(small: Pooled, kind: str) -> None:
    first, second, positions = list(range(8)), list(range(8, 16)), torch.arange(8).repeat(2)
    parts: list[tuple[Any, list[list[int]]]] = []
    if kind == "side by side":
        parts = [(SlotRun(0, 8, 8, 2), [first, second])]
    elif kind == "two groups":
        parts = [(SlotRun(8, 8), [second]), (SlotRun(0, 8), [first])]
    elif kind == "lists of slots":
        parts = [(torch.tensor([first]), [first]), (torch.tensor([second[::-1]]), [second])]
    elif kind == "unequal":
        parts = [(SlotRun(0, 8, 8, 2), [first[:5] + [4] * 3, second])]
    both = torch.block_diag(*[torch.ones(8, 8).tril()] * 2).bool()[None]
    dense = AttentionPlan.dense(both, positions[None])
    ids = torch.cat((IDS, IDS.flip(0)))
    out = ask(
        small,
        tokens_BQ=ids[None],
        positions_BQ=positions[None],
        slots_BQ=torch.arange(16)[None],
        attention=groups_of(positions, *parts) if parts else dense,
        logit_rows_R=torch.tensor([4, 2, 15, 10]),
    )
    one = ask(small, logit_rows_R=torch.tensor([4, 2])).logits_RV
    other = ask(small, tokens_BQ=IDS.flip(0)[None]).logits_RV
    close(out.logits_RV, torch.cat((one, other)), 1e-4)


def test_statuses_that_are_not_computed_are_refused_by_name(small: Pooled) -> None:
    full = (LayerStatus.FULL,) * LAYERS
    close(ask(small, plan=full).logits_RV, ask(small).logits_RV, 1e-6)
    for status in (LayerStatus.CHECK, LayerStatus.AFTER_CHECK, LayerStatus.REUSE):
        with pytest.raises(ValueError, match=status.name):
            ask(small, plan=(LayerStatus.FULL, status, LayerStatus.FULL))
    with pytest.raises(ValueError, match="2 entries for 3 layers"):
        ask(small, plan=full[:2])
    with pytest.raises(ValueError, match="taps"):
        ask(small, taps=(5,))


class Copies(TorchDispatchMode):
    """Notes every kernel that reads a pool and puts what it read somewhere else."""

    def __init__(self, pool: Tensor) -> None:
        super().__init__()
        self.pool = pool.untyped_storage().data_ptr()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        first = out[0] if isinstance(out, tuple) else out
        places = [x.untyped_storage().data_ptr() for x in (first, *args) if isinstance(x, Tensor)]
        if self.pool in places[1:] and places[0] != self.pool:
            self.reads.append(str(func))
        return out


def test_keys_and_values_are_read_where_they_lie(small: Pooled) -> None:
    """Only attention itself reads the pool: nothing is copied or repeated for the query heads."""
    positions = torch.arange(8)[None]
    halves = (SlotRun(0, 4, 4, 2), [[0, 1, 2, 3], [4, 5, 6, 7]])
    for attention in (causal(8), groups_of(torch.arange(8) % 4, halves)):
        # inference mode would hide its parts
        with torch.no_grad(), Copies(small.kv.data) as copies:
            small.model(**asked(small, positions_BQ=positions % 4, attention=attention))
        assert len(copies.reads) == LAYERS
        assert all("scaled_dot_product" in name for name in copies.reads)


def test_a_longer_sequence_than_the_angles_allow_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama", {"rope_parameters": LONG})
    model = load_target(tmp_path)
    assert model.max_positions == 32
    model.config.check_length(32)
    with pytest.raises(ModelError, match="33 positions requested, 32 possible; `rope_type: long"):
        model.config.check_length(33)


# -- keys before RoPE


def test_every_kind_of_angles_is_tried() -> None:
    ropes = [options.get("rope_parameters", {}) for _, options in CASES.values()]
    assert {rope.get("rope_type", "default") for rope in ropes} == set(ROPE_KINDS)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)
@torch.inference_mode()
def test_keys_come_back(case: Case, dtype: torch.dtype, limit: float) -> None:
    model = load_target(case.folder, dtype)
    positions_R = torch.tensor([0, 1, 2, 7, 30, 31])
    x_RH = torch.randn(6, model.hidden_size, dtype=dtype)
    kv = KVCache(model.num_layers, model.kv_heads, model.head_dim, 6, dtype=dtype)
    inputs = model.attention_inputs(positions_R, torch.arange(6), AttentionPlan.causal(6))
    recorder = KeyRecorder(inputs, 0)
    model.run_layers(x_RH, inputs, kv, (), recorder)
    before = torch.stack(recorder.keys)
    after = kv.data[:, 0, :, :6].transpose(1, 2)
    found = model.before_rope(after, positions_R)
    assert found.dtype == dtype
    torch.testing.assert_close(found, before, rtol=limit, atol=limit)
    assert (after - before)[:, 1:].abs().max() > 0.1, "or nothing was tested"


def test_a_factor_on_cos_and_sin_is_divided_out() -> None:
    """The angles negated and the factor kept would leave its square."""
    x, angle = torch.randn(4, 2, 8, dtype=torch.float64), torch.rand(4, 1, 4, dtype=torch.float64)
    for factor in (1.0, 0.3, 2.0):
        cos, sin = (
            factor * torch.cat(pair, -1)
            for pair in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin()))
        )
        torch.testing.assert_close(rotate_back(rotate(x, cos, sin), cos, sin), x)

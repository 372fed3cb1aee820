"""Attention backends against a loop over single queries and keys, and a backend of one file."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.attention import PlainBackend, attend
from helpers.pools import branching
from helpers.support import drive, start, tokens_of
from helpers.toy_graph import install
from torch import Tensor

from specsot.ops.attention.backends import AttentionBackend, AttentionPlan, LayerAttention, backend
from specsot.ops.attention.metadata import AttentionBatch, AttentionMetadata
from specsot.states.graph.plugins import BACKENDS, attention_backends

HEADS, KV_HEADS, DIM, QUERIES, KEYS, ROWS = 6, 2, 8, 5, 11, 2


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(ROWS, QUERIES, HEADS, DIM, generator=draw).to(dtype)
    k, v = torch.randn(2, ROWS, KV_HEADS, KEYS, DIM, generator=draw).to(dtype)
    mask = torch.rand(ROWS, QUERIES, KEYS, generator=draw) < 0.4
    mask[:, :, 3] = True
    return q, k, v, mask


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    for b in range(ROWS):
        for i in range(QUERIES):
            seen = mask[b, i]
            for h in range(HEADS):
                keys, values = k[b, h // (HEADS // KV_HEADS)][seen], v[b, h // (HEADS // KV_HEADS)]
                scores = keys @ q[b, i, h] / math.sqrt(DIM)
                out[b, i, h] = scores.softmax(0) @ values[seen]
    return out


@pytest.mark.parametrize("runner", [AttentionBackend(), PlainBackend()])
def test_equal_to_a_loop(runner: AttentionBackend) -> None:
    q, k, v, mask = tensors(torch.float64)
    out = attend(runner, q, k, v, mask)
    assert torch.allclose(out, by_hand(q, k, v, mask), atol=1e-12)


@pytest.mark.parametrize("runner", [AttentionBackend(), PlainBackend()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_sees_nothing_is_finite_and_harms_no_other(
    runner: AttentionBackend, dtype: torch.dtype
) -> None:
    q, k, v, mask = tensors(dtype)
    before = attend(runner, q, k, v, mask)
    mask[1, 4] = False
    after = attend(runner, q, k, v, mask)
    assert after.isfinite().all()
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, :4], before[1, :4])


@pytest.mark.parametrize("runner", [AttentionBackend(), PlainBackend()])
def test_what_is_hidden_has_no_influence_at_all(runner: AttentionBackend) -> None:
    q, k, v, mask = tensors()
    mask[:, :, 7] = False
    before = attend(runner, q, k, v, mask)
    k[:, :, 7], v[:, :, 7] = 50.0, -1e4
    assert torch.equal(attend(runner, q, k, v, mask), before)


class ListedBackend(AttentionBackend, name="listed"):
    """A toy: a group for each sequence, over the list of its slots; softmax query by query."""

    plans = 0
    layers = 0

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        ListedBackend.plans += 1
        indptr, indices = metadata.slot_lists()
        groups = []
        for number, sequence in enumerate(metadata.sequences):
            slots_1K = indices[None, indptr[number] : indptr[number + 1]]
            if len(sequence.rows) and slots_1K.size:
                batch = AttentionBatch(sequence.rows[None].astype(np.int64), slots_1K, slots_1K)
                groups.append(metadata.group(batch))
        return AttentionPlan(self, tuple(groups))

    def run(
        self, q_Nhd: Tensor, keys_hKd: Tensor, values_hKd: Tensor, plan: LayerAttention
    ) -> Tensor:
        ListedBackend.layers += 1
        rows, heads, dim = q_Nhd.shape
        out_Nhd = torch.zeros_like(q_Nhd)
        share = heads // len(keys_hKd)
        for group in plan.groups:
            assert isinstance(group.keys, Tensor)
            rows_M = torch.arange(rows) if group.rows_M is None else group.rows_M
            folded = group.bias_G1qK[0, 0].view(share, len(rows_M), -1)
            for place, row in enumerate(rows_M.tolist()):
                for head in range(heads):
                    keys_Kd = keys_hKd[head // share, group.keys[0]]
                    values_Kd = values_hKd[head // share, group.keys[0]]
                    scores_K = keys_Kd @ q_Nhd[row, head] / math.sqrt(dim)
                    weights_K = (scores_K + folded[head % share, place]).softmax(0)
                    out_Nhd[row, head] = weights_K @ values_Kd
        return out_Nhd.flatten(1)


@pytest.mark.parametrize("graph", ["bim_eagle", "batching_eagle", "paged_eagle"])
def test_a_backend_of_one_file_runs_a_whole_graph(
    graph: str, tiny: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "specsot.attention", f"{__name__}:ListedBackend", point="listed")
    assert "listed" in attention_backends() and isinstance(backend("listed"), ListedBackend)
    session = branching(tiny)
    runs = [
        drive(start(session(graph, sets=(f"attention={name}",)), ["hello"]))
        for name in ("grouped", "listed")
    ]
    assert ListedBackend.plans and ListedBackend.layers > ListedBackend.plans
    assert tokens_of(runs[0]) == tokens_of(runs[1])


def test_backends_have_the_names_that_graphs_give() -> None:
    assert BACKENDS == ["auto", "cascade", "dense", "grouped"]
    assert [type(backend(name)).name for name in BACKENDS] == BACKENDS
    with pytest.raises(ValueError, match="no attention backend 'sparse'"):
        backend("sparse")

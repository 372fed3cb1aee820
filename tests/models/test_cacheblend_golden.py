"""Blended prefills against vectors (tests/golden/cacheblend/README.md): one prompt, and branches in
one sequence or each in a row of its own; beside running ones: runs/test_blend_runs.py."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.blends import Sequence, Vectors, blend, near, one_prompt, read, target, wide_norm
from helpers.sequences import pool
from torch import Tensor

from specsot.models.decoder import Decoder
from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.blend import Blend, BlendReport, BlendRows, ChunkKV, RowRole, deviation, join
from specsot.ops.forward import TargetOutput
from specsot.ops.layer_plan import BlendSettings, compile_layer_plan, decode_plan

DTYPES = {"float64": torch.float64, "float32": torch.float32}
MODELS = ("llama", "qwen3")
RUNS = tuple(
    f"{mask}_{update}_{metric}.r{percent:03}"
    for mask, update, metric, percents in (
        ("exact", "full", "v", (0, 15, 50, 100)),
        ("bottom_right", "full", "v", (15, 50)),
        ("exact", "partial", "k", (0, 15, 50)),
    )
    for percent in percents
)


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "float64":
            wide_norm(patch)
        yield DTYPES[request.param]


@pytest.fixture(scope="module", params=MODELS)
def vectors(
    request: pytest.FixtureRequest, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> Vectors:
    folder = tmp_path_factory.mktemp(request.param)
    return Vectors(*read(request.param), target(request.param, folder, dtype), dtype)


def settings_of(name: str, run: dict[str, Any]) -> BlendSettings:
    if name in ("gradual", "late_check"):
        ratios = run["ratio"] if isinstance(run["ratio"], list) else [run["ratio"]]
        return blend(check_layers=tuple(run["check_layers"]), ratios=tuple(ratios))
    kind = name.split(".")[0]
    metric, update = kind.split("_")[-1], kind.split("_")[-2]
    mask = kind.removesuffix(f"_{update}_{metric}")
    return blend(ratios=(run["ratio"],), metric=metric, check_update=update, mask=mask)


def check_rows(report: BlendReport, run: dict[str, Any], context: int) -> None:
    assert list(report.live_L) == run["rows_per_layer"]
    assert [int(status) for status in report.plan] == run["status"]
    found = [[int(row) for row in rows] for rows in report.picked.values()]
    expected = [[row for row in one["rows"] if row < context] for one in run.get("selections", ())]
    assert found == (expected or [run["hkvd"]])


@pytest.mark.parametrize("name", [*RUNS, "gradual", "late_check"])
def test_a_blended_prefill(vectors: Vectors, name: str) -> None:
    run, context = vectors.meta["runs"][name], sum(vectors.meta["chunk_lens"])
    prompt = Sequence(vectors.model, vectors["ids"])
    rows = one_prompt(prompt.rows, vectors.meta["suffix_len"])
    out = prompt.blended(rows, vectors.cache, settings_of(name, run))
    assert out.blend is not None
    check_rows(out.blend, run, context)
    near(out.logits_RV[-1], vectors[f"{name}.logits_last"])
    keys, values = prompt.held()
    if name.endswith("r100"):
        near(keys, vectors["full.k"])
        near(values, vectors["full.v"])
    elif f"{name}.k" in vectors.tensors:
        near(keys, vectors[f"{name}.k"])
        near(values, vectors[f"{name}.v"])
    elif f"{name}.k_last" in vectors.tensors:
        near(keys[-1], vectors[f"{name}.k_last"])
        near(values[-1], vectors[f"{name}.v_last"])
    assert prompt.greedy(out.logits_RV[-1], 8) == run["greedy"]


@pytest.mark.parametrize("name", ["full", "reuse"])
def test_everything_or_nothing_computed(vectors: Vectors, name: str) -> None:
    prompt = Sequence(vectors.model, vectors["ids"])
    rows = one_prompt(prompt.rows, vectors.meta["suffix_len"])
    if name == "full":
        out = prompt.full()
    else:
        out = prompt.blended(rows, vectors.cache, BlendSettings(plan="reuse"))
    near(out.logits_RV[-1], vectors[f"{name}.logits_last"])
    for ours, part in zip(prompt.held(), "kv", strict=True):
        near(ours, vectors[f"{name}.{part}"])
    assert prompt.greedy(out.logits_RV[-1], 8) == vectors.meta["runs"][name]["greedy"]


def chunks(vectors: Vectors) -> list[ChunkKV]:
    meta = vectors.meta
    with torch.inference_mode():
        first = vectors.model.collect(meta["chunks"][0])
        return [first, *(vectors.model.collect(c, meta["bos"]) for c in meta["chunks"][1:])]


def test_collected_chunks_are_the_cache(vectors: Vectors) -> None:
    for rows, chunk in zip(vectors.chunk_rows, chunks(vectors), strict=True):
        near(chunk.keys_LRgd, vectors["cache.k_pre"][:, rows])
        near(chunk.values_LRgd, vectors["cache.v"][:, rows])


@pytest.mark.parametrize("metric", ["v", "k", "kv"])
def test_deviations(vectors: Vectors, metric: Any) -> None:
    with torch.inference_mode():
        new = vectors.model.collect(vectors["ids"].tolist())
    rows = slice(0, vectors.cache.rows)
    old = vectors.cache.keys_LRgd[1], vectors.cache.values_LRgd[1]
    found = deviation((new.keys_LRgd[1, rows], new.values_LRgd[1, rows]), old, metric)
    near(found / found.max(), vectors[f"dev.{metric}"] / found.max())


def moved(vectors: Vectors, order: list[int]) -> ChunkKV:
    index = torch.cat([vectors.chunk_rows[number] for number in order])
    return ChunkKV(vectors.cache.keys_LRgd[:, index], vectors.cache.values_LRgd[:, index])


def test_documents_in_another_order(vectors: Vectors) -> None:
    run, suffix = vectors.meta["runs"]["reordered"], vectors.meta["suffix_len"]
    cached = moved(vectors, run["order"])
    prompt = Sequence(vectors.model, vectors["reordered.ids"])
    rows = one_prompt(prompt.rows, suffix)
    near(prompt.full().logits_RV[-1], vectors["reordered.full.logits_last"])
    reused = prompt.blended(rows, cached, BlendSettings(plan="reuse"))
    near(reused.logits_RV[-1], vectors["reordered.reuse.logits_last"])
    out = prompt.blended(rows, cached, blend(ratios=(run["ratio"],)))
    near(out.logits_RV[-1], vectors["reordered.logits_last"])
    near(prompt.held()[0][-1], vectors["reordered.k_last"])
    near(prompt.held()[1][-1], vectors["reordered.v_last"])
    assert out.blend is not None
    assert out.blend.picked[1].tolist() == run["imp_indices"][:-suffix]


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0, None])
def test_a_prefix_alone_is_cached_exactly(vectors: Vectors, ratio: float | None) -> None:
    first, suffix = vectors.meta["chunk_lens"][0], vectors.meta["suffix_len"]
    prompt = Sequence(vectors.model, torch.cat((vectors["ids"][:first], vectors["ids"][-suffix:])))
    cached = moved(vectors, [0])
    settings = BlendSettings(plan="reuse") if ratio is None else blend(ratios=(ratio,))
    for protected in (0, first):
        rows = one_prompt(prompt.rows, suffix, protected)
        out = prompt.blended(rows, cached, settings)
        near(out.logits_RV[-1], vectors["single.logits_last"])


@pytest.fixture(scope="module")
def windowed(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Vectors:
    meta, tensors = read("qwen3")
    folder, window = tmp_path_factory.mktemp("window"), meta["runs"]["sliding"]["window"]
    return Vectors(meta, tensors, target("qwen3", folder, dtype, window), dtype)


def test_a_sliding_window(windowed: Vectors) -> None:
    cached = join(chunks(windowed))
    prompt = Sequence(windowed.model, windowed["ids"])
    rows = one_prompt(prompt.rows, windowed.meta["suffix_len"])
    near(prompt.full().logits_RV[-1], windowed["sliding.full.logits_last"])
    reused = prompt.blended(rows, cached, BlendSettings(plan="reuse"))
    near(reused.logits_RV[-1], windowed["sliding.reuse.logits_last"])
    for name, run in windowed.meta["runs"]["sliding"]["ratios"].items():
        out = prompt.blended(rows, cached, blend(ratios=(int(name[1:]) / 100,)))
        near(out.logits_RV[-1], windowed[f"sliding.{name}.logits_last"])
        assert out.blend is not None
        assert out.blend.picked[1].tolist() == run["imp_indices"][: -windowed.meta["suffix_len"]]


# -- branches


@dataclass(frozen=True)
class Branches:
    """Two branches behind a prefix, as rows of one sequence."""

    model: Decoder
    meta: dict[str, Any]
    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def cache(self, rows: Tensor) -> ChunkKV:
        kept = rows[~self["is_suffix"][rows]]
        return ChunkKV(self["cache.k_pre"][:, kept], self["cache.v"][:, kept])

    def rows(self, index_BQ: Tensor) -> BlendRows:
        bim_BQ = self["bim"][index_BQ]
        role_BQ = torch.full_like(index_BQ, RowRole.REUSED)
        role_BQ[bim_BQ == -1] = RowRole.PROTECTED
        role_BQ[self["is_suffix"][index_BQ]] = RowRole.SUFFIX
        role_BQ[index_BQ == -1] = RowRole.PADDING
        zero_BQ = np.zeros(index_BQ.shape, np.int32)
        chunk_BQ = self["doc_id"][index_BQ].numpy().astype(np.int32)
        role = role_BQ.numpy().astype(np.int32)
        return BlendRows(role, zero_BQ, bim_BQ.numpy().astype(np.int32), chunk_BQ)

    def sequence(self) -> Sequence:
        return Sequence(self.model, self["ids"], self["pos"], self["allow"])


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Branches]:
    with pytest.MonkeyPatch.context() as patch:
        wide_norm(patch)
        model = target("llama", tmp_path_factory.mktemp("bim"), torch.float64)
        yield Branches(model, *read("bim"))


@pytest.fixture(scope="module", params=["plain", "window"])
def kinds(
    request: pytest.FixtureRequest, branches: Branches, tmp_path_factory: pytest.TempPathFactory
) -> Branches:
    if request.param == "plain":
        return branches
    model = target("qwen3", tmp_path_factory.mktemp("window"), torch.float64, window=7)
    meta = branches.meta
    with torch.inference_mode():
        prefix = model.collect(meta["prefix"])
        docs = [model.collect(ids, meta["bos"]) for ids in meta["docs"]]
    parts = [prefix]
    for branch in meta["branches"]:
        parts += [docs[number] for number in branch["docs"]]
        empty = torch.zeros(model.num_layers, len(branch["suffix"]), *docs[0].keys_LRgd.shape[2:])
        parts.append(ChunkKV(empty, empty))
    cached = join(parts)
    own = {"cache.k_pre": cached.keys_LRgd, "cache.v": cached.values_LRgd}
    return Branches(model, meta, branches.tensors | own)


def in_one_sequence(branches: Branches, settings: BlendSettings) -> tuple[Sequence, TargetOutput]:
    everything = torch.arange(len(branches["ids"]))
    prompt = branches.sequence()
    rows = branches.rows(everything[None])
    return prompt, prompt.blended(rows, branches.cache(everything), settings)


@pytest.mark.parametrize(("ratio", "name"), [(0.0, "r000"), (0.25, "r025"), (1.0, "r100")])
def test_branches_in_one_sequence(branches: Branches, ratio: float, name: str) -> None:
    run = branches.meta["runs"][name]
    prompt, out = in_one_sequence(branches, blend(ratios=(ratio,)))
    near(out.logits_RV[branches.meta["tips"]], branches[f"{name}.logits_tips"])
    assert out.blend is not None
    suffix = branches["is_suffix"].nonzero().squeeze(1).tolist()
    assert sorted(out.blend.picked[1].tolist() + suffix) == run["imp_indices"]
    assert (out.blend.protected, out.blend.suffix) == (6, 9)
    if ratio == 0.25:
        for ours, part in zip(prompt.held(), "kv", strict=True):
            near(ours, branches[f"r025.{part}"])


def test_everything_computed_under_the_same_mask(branches: Branches) -> None:
    out = branches.sequence().full()
    near(out.logits_RV[branches.meta["tips"]], branches["full.logits_tips"])


def of_branch(branches: Branches, number: int) -> Tensor:
    """The rows that a branch sees: the prefix and its own."""
    bim = branches["bim"]
    return ((bim == -1) | (bim == number)).nonzero().squeeze(1)


@dataclass
class Side:
    """Branches in tensor rows of their own, each with its copy of the prefix, padded left."""

    branches: Branches

    def __post_init__(self) -> None:
        self.index = [of_branch(self.branches, number) for number in (0, 1)]
        self.prefix = int((self.branches["bim"] == -1).sum())
        self.capacity = max(len(index) for index in self.index) + 3
        model = self.branches.model
        self.kv = pool(model, self.capacity, model.embed.dtype, rows=1 + 2)
        self.done = 0

    def visible(self, last: int) -> tuple[Tensor, Tensor, AttentionPlan]:
        """Flat rows and slots of the rows from `done` on, and what they see."""
        new = [index[self.done : last] for index in self.index]
        width = max(len(rows) for rows in new)
        index_BQ = torch.full((2, width), -1)
        slots_BQ = torch.full((2, width), self.kv.scratch)
        mask_BQK = torch.zeros(2, width, self.capacity, dtype=torch.bool)
        position_BK = torch.full((2, self.capacity), 10**6)
        for row, rows in enumerate(new):
            index_BQ[row, width - len(rows) :] = rows
            end = self.done + len(rows)
            slots_BQ[row, width - len(rows) :] = torch.arange(self.done, end) + self.start(row)
            seen = self.index[row][:end]
            mask_BQK[row, width - len(rows) :, :end] = self.branches["allow"][rows][:, seen]
            position_BK[row, :end] = self.branches["pos"][seen]
        rows = (self.capacity, self.capacity)  # the pool's row 0 is another branch's
        return index_BQ, slots_BQ, AttentionPlan.dense(mask_BQK, position_BK, *rows)

    def start(self, row: int) -> int:
        return (1 + row) * self.capacity

    def forward(self, last: int, settings: BlendSettings | None) -> tuple[Tensor, TargetOutput]:
        index_BQ, slots_BQ, visible = self.visible(last)
        model, given, plan = self.branches.model, None, decode_plan(self.branches.model.num_layers)
        if settings is not None:
            plan = compile_layer_plan(settings, model.num_layers)
            cached = self.branches.cache(index_BQ[index_BQ >= 0])
            given = Blend.of(self.branches.rows(index_BQ), cached, settings)
        with torch.inference_mode():
            out = model(
                self.branches["ids"][index_BQ],
                self.branches["pos"][index_BQ].where(index_BQ >= 0, 0),
                slots_BQ,
                visible,
                self.kv,
                plan,
                torch.arange(index_BQ.numel()),
                (),
                given,
            )
        self.done += index_BQ.shape[1]
        return index_BQ, out


def check_against_one_sequence(
    side: Side, found: tuple[Tensor, TargetOutput], settings: BlendSettings
) -> tuple[BlendReport, BlendReport]:
    prompt, expected = in_one_sequence(side.branches, settings)
    index_BQ, out = found
    flat = index_BQ.flatten()
    for tip in side.branches.meta["tips"]:
        near(out.logits_RV[flat == tip], expected.logits_RV[tip : tip + 1])
    assert out.blend is not None and expected.blend is not None
    for layer, rows in out.blend.picked.items():
        assert sorted(flat[rows].tolist()) == expected.blend.picked[layer].tolist()
    for row, index in enumerate(side.index):
        slots = torch.arange(len(index)) + side.start(row)
        mine = side.kv.data[:, :, :, slots].transpose(2, 3)
        for part in (0, 1):
            near(mine[:, part], prompt.held()[part][:, index])
    return out.blend, expected.blend


SETTINGS = {
    "default": blend(ratios=(0.25,)),
    "nothing": blend(ratios=(0.0,)),
    "everything": blend(ratios=(1.0,)),
    "gradual": blend(check_layers=(1, 3), ratios=(0.5, 0.2)),
    "partial": blend(ratios=(0.3,), metric="kv", check_update="partial"),
    "of the prompt": blend(ratios=(0.25,), budget="per_prompt"),
    "of the prompt, gradual": blend(
        check_layers=(1, 2), ratios=(0.4, 0.2), budget="per_prompt", metric="k"
    ),
    "of chunks": blend(ratios=(0.25,), budget="per_chunk"),
    "reuse": BlendSettings(plan="reuse"),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rows_of_their_own_give_the_same(kinds: Branches, settings: BlendSettings) -> None:
    side = Side(kinds)
    blended, one = check_against_one_sequence(side, side.forward(99, settings), settings)
    assert blended.reused == one.reused == 44


def test_behind_a_prefix_that_is_in_the_pool_already(kinds: Branches) -> None:
    settings, side = blend(ratios=(0.25,)), Side(kinds)
    side.forward(side.prefix, None)
    index_BQ, out = side.forward(99, settings)
    assert (index_BQ == -1).sum() == 3
    blended, _ = check_against_one_sequence(side, (index_BQ, out), settings)
    assert blended.protected == 0


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_each_branch_alone_gives_the_same(branches: Branches, settings: BlendSettings) -> None:
    _, out = in_one_sequence(branches, settings)
    for number, tip in enumerate(branches.meta["tips"]):
        index = of_branch(branches, number)
        alone = Sequence(
            branches.model,
            branches["ids"][index],
            branches["pos"][index],
            branches["allow"][index][:, index],
        )
        found = alone.blended(branches.rows(index[None]), branches.cache(index), settings)
        same = torch.allclose(found.logits_RV[-1], out.logits_RV[tip], rtol=0, atol=1e-9)
        assert same or settings.budget == "per_prompt"

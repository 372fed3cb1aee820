"""Blended prefills against vectors (tests/golden/cacheblend/README.md)."""

from typing import Any

import pytest
import torch
from helpers.blends import Sequence, Vectors, blend, near, one_prompt, read, target, wide_norm

from specsot.ops.blend import BlendReport, ChunkKV, deviation
from specsot.ops.layer_plan import BlendSettings

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
    parts = chunks(windowed)
    cached = ChunkKV(
        torch.cat([part.keys_LRgd for part in parts], 1),
        torch.cat([part.values_LRgd for part in parts], 1),
    )
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

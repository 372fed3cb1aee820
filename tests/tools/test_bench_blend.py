"""The parts of tools/bench/bench_blend.py on tiny settings: what it measures is what it says."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from specsot.engine.chunks.store import ChunkStore
from specsot.engine.models import load_models
from specsot.engine.prepare.environment import embedded_folder
from tools.bench import bench_blend, blend_quality, blend_ttft
from tools.bench.blend_modes import Mode, modes_of, session_of

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(blend_ttft, "SHAPE", blend_ttft.SHAPE | SMALL)
    return blend_ttft


def test_every_mode_recomputes_its_share_and_the_last_one_everything(small: Any) -> None:
    modes = modes_of([0.5, 0.25, 1])
    said: list[str] = []
    models = small.random_models(small.SHAPE)
    found = small.measure(models, modes, 96, 16, 2, said.append)
    assert list(found) == ["reuse", "0.25", "0.5", "1"]
    assert [one["rows"] for one in found.values()] == [16, 36, 56, 96]
    assert found["1"]["relative"] == 1 and found["1"]["model"] == 1
    shares = [one["model"] for one in found.values()]
    assert shares == sorted(shares) and 0 < shares[0] < shares[1] < 1
    assert all(one["seconds"] > 0 for one in found.values())
    assert len(said) == 3 * 4


def test_times_are_compared_within_a_round(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that gets slower from round to round: ratios stay; the first is left out."""
    modes = modes_of([])
    clock = iter([9, 9, 1, 4, 3, 6, 10, 100])  # reuse and full in turn
    monkeypatch.setattr(small, "first_token", lambda *of, fill: (next(clock), 0))
    found = small.measure(small.random_models(small.SHAPE), modes, 96, 16, 3, lambda text: None)
    assert found["reuse"]["relative"] == 0.25 and found["1"]["relative"] == 1
    assert found["reuse"]["seconds"] == 3 and found["1"]["seconds"] == 6


def test_the_full_prefill_is_the_measure_of_all_others() -> None:
    modes = modes_of([0.3])
    models = load_models(embedded_folder("target"), embedded_folder("eagle3"))
    found = blend_quality.measure(models, modes, 140, 1, 0, lambda text: None)
    assert 100 < found["rows"] < 200
    for of in found["kinds"].values():
        full, reuse, blend = of["1"], of["reuse"], of["0.3"]
        assert full["n"] == 1 and full["same"] == 1 and full["kl"] == full["kl_value"] == 0
        assert set(full["error_k"]) == set(full["error_v"]) == {0.0}
        for error in ("error_k", "error_v"):
            assert reuse[error][0] < 1e-5 < 0.01 < reuse[error][1]
            assert max(blend[error][:2]) < 1e-5
            assert all(
                0.01 < b < r for b, r in zip(blend[error][2:], reuse[error][2:], strict=True)
            )
        assert reuse["kl_value"] > 1e-7 and reuse["kl"] > 1e-9


def test_what_the_pool_holds_is_looked_up_row_by_row() -> None:
    """With `reuse` V of the documents' rows is what the store has, number by number."""
    models = load_models(embedded_folder("target"), embedded_folder("eagle3"))
    store = ChunkStore(1 << 28)
    session = session_of(Mode("reuse"), models, store)
    (asked, *_) = blend_quality.questions(models, 140, 1, 0)
    with blend_quality.prefilled(session, asked) as run:
        (request,) = run.board["branches"].requests
        rows = [at for c in request.tail.chunks for at in range(c.at, c.at + len(c.ids))]
        kv_L2x = blend_quality.held(run, rows)
    kept = [store.get(session.maker.key(chunk.ids)).values_LRgd for chunk in request.tail.chunks]
    there_Lgrd = kv_L2x[:, 1].view(models.target.num_layers, -1, len(rows), models.target.head_dim)
    assert torch.equal(there_Lgrd.transpose(1, 2), torch.cat(kept, 1))


def test_what_was_asked_for_comes_next() -> None:
    models = load_models(embedded_folder("target"), embedded_folder("eagle3"))
    session = session_of(Mode("1"), models, ChunkStore(1))
    for asked in blend_quality.questions(models, 140, 4, 1):
        begun = session.prompts.decode(blend_quality.up_to_value(session, asked))
        rest = asked.answers[0].removeprefix(begun)
        assert begun and rest.strip().startswith(asked.values[0])


def test_intervals_and_divergences() -> None:
    assert blend_quality.interval(50, 50) == pytest.approx((0.92865, 1.0), abs=1e-4)
    assert blend_quality.interval(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-4)
    half, third = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert blend_quality.divergence(half, third) == pytest.approx(0.14384, abs=1e-4)
    assert blend_quality.divergence(half, half) == 0


def test_one_command_fills_the_page_and_another_resumes(small: Any, tmp_path: Path) -> None:
    page, figures = tmp_path / PAGE.name, tmp_path / "figures.json"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    given = ["--tokens=96", "--suffix=16", "--repeats=1", "--ratios=0,0.5", f"--docs={tmp_path}"]
    given += ["--threads=1", f"--json={figures}", "--sizes=60", "--prompts=1"]
    bench_blend.main(["--part=ttft", *given])
    first = json.loads(figures.read_text())
    bench_blend.main(["--plot", "--resume", *given])
    both = json.loads(figures.read_text())
    assert both["ttft"] == first["ttft"] and both["quality"]["sizes"].keys() == {"60"}
    for name, lines in (("blend_ttft.svg", 2), ("blend_quality.svg", 4)):
        svg = ElementTree.fromstring((tmp_path / name).read_text())
        assert len(svg.findall(".//{*}polyline")) == lines
        assert f"]({name})" in page.read_text(encoding="utf-8")
    filled = page.read_text(encoding="utf-8")
    assert emptied(filled) == emptied(PAGE.read_text(encoding="utf-8"))
    assert f"{first['ttft']['tokens']['96']['0.5']['relative']:.2f} / " in filled
    bench_blend.main(["--part=none", "--plot", *given])
    assert page.read_text(encoding="utf-8") == filled


def emptied(page: str) -> str:
    return re.sub(
        r"(<!-- bench_blend: \w+ -->).*?(<!-- /bench_blend -->)", r"\1\2", page, flags=re.S
    )

"""`specsot run` over documents: cached or not, from memory and from a folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from specsot.engine.errors import Code
from specsot.engine.prepare.repeat import FILE

OUTLINE = "PLAN\n1|60|Search|-|Honey of bees\n2|70|Search|-|Rain\n3|70|-|-|Third\nEND\n"


@pytest.fixture
def reading(shell: Any) -> Any:
    """Runs bim_blend_eagle over two documents; two of three parts search."""
    (shell.folder / "bees.txt").write_text("Bees make honey. " * 20)
    (shell.folder / "rain.txt").write_text("Rain falls on hills. " * 18)
    (shell.folder / "outline.txt").write_text(OUTLINE)
    shell.defaults |= {
        "graph": "bim_blend_eagle",
        "documents": (Path("bees.txt"), Path("rain.txt")),
        "quiet": True,
    }
    return shell


def blend_of(shell: Any) -> Any:
    return json.loads((shell.latest / "metrics.json").read_text())["blend"]


def rounds_of(shell: Any) -> list[dict[str, Any]]:
    lines = (shell.latest / "trace.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "round"]


def test_a_run_tells_what_it_reused(reading: Any) -> None:
    assert reading.run() == Code.OK
    told = blend_of(reading)
    assert told["plan"] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert told["chunks"]["collected"] == 2 and told["chunks"]["missed"] == 0
    assert told["reused_rows"] == told["chunks"]["collected_rows"] > 64
    (blend,) = [one["blend"] for one in rounds_of(reading) if one["blend"]]
    assert blend["plan"] == told["plan"] and blend["picked"] == [told["picked_rows"]]
    assert blend["live"][0] > blend["live"][1 + 1] == blend["suffix"] + told["picked_rows"]
    summary = (reading.latest / "summary.md").read_text()
    assert f"| blend.reused_rows | {told['reused_rows']} |" in summary
    assert "| blend.chunks.collected | 2 |" in summary


def test_a_folder_of_chunks_serves_later_runs(reading: Any) -> None:
    """The digest is that of a run without it, and a repeated run reaches it again."""
    assert reading.run() == Code.OK
    first = reading.digest
    for collected in (2, 0):
        assert reading.run(cache_dir=Path("chunks"), expect_digest=first) == Code.OK
        told = blend_of(reading)["chunks"]
        assert told["collected"] == collected and told["hits"] == 2 - collected
    assert len(list((reading.folder / "chunks").iterdir())) == 2
    given = {"graph": str(reading.latest / FILE), "prompt": None, "outline": None, "documents": ()}
    assert reading.run(**given) == Code.OK
    assert reading.digest == first


def test_the_block_is_all_that_differs(reading: Any) -> None:
    """With every row recomputed the graph says what the one without the block says."""
    sets = ("skeleton.documents=branches",)
    assert reading.run(graph="bim_eagle", sets=sets, cache_dir=Path("chunks")) == Code.OK
    assert blend_of(reading) is None and not (reading.folder / "chunks").exists()
    digest = reading.digest
    for more in ("blend.ratios=[1]", "blend.min_tokens=9999"):
        assert reading.run(sets=(more,), expect_digest=digest) == Code.OK


def test_a_layer_that_the_model_does_not_have(reading: Any) -> None:
    assert reading.run(sets=("blend.check_layers=[8]",)) == Code.GRAPH
    assert reading.err == (
        "specsot: --set blend.check_layers=[8]: blend.check_layers: "
        "no layer 8: the model's layers are 0 to 7 [G703]\n"
    )
    assert not (reading.folder / "runs").exists()

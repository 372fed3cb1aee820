"""`specsot run` over documents: cached or not, from memory and from a folder; `--probe-blend`
compares blended prompts with full prefills, in a run that stays as it is."""

from pathlib import Path
from typing import Any

import pytest

from specsot.engine.errors import Code
from specsot.engine.prepare.repeat import FILE

OUTLINE = "PLAN\n1|60|-|-|First\n2|70|Search|-|Rain\n3|70|Search|-|Honey of bees\nEND\n"
LAYOUTS = ("layout.kind=bim", "layout.kind=batching")


@pytest.fixture
def reading(shell: Any) -> Any:
    (shell.folder / "bees.txt").write_text("Bees make honey. " * 20)
    (shell.folder / "rain.txt").write_text("Rain falls on hills. " * 18)
    (shell.folder / "outline.txt").write_text(OUTLINE)
    shell.defaults |= {
        "graph": "bim_blend_eagle",
        "documents": (Path("bees.txt"), Path("rain.txt")),
        "quiet": True,
    }
    return shell


def blended(shell: Any) -> list[Any]:
    rounds = (line for line in shell.lines("trace.jsonl") if line["kind"] == "round")
    return [one for one in rounds if one["blend"]]


def test_a_run_tells_what_it_reused(reading: Any) -> None:
    assert reading.run() == Code.OK
    told = reading.read("metrics.json")["blend"]
    assert told["plan"] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert told["chunks"]["collected"] == 2 and told["chunks"]["missed"] == 0
    assert told["reused_rows"] == told["chunks"]["collected_rows"] > 64
    (blend,) = [one["blend"] for one in blended(reading)]
    assert blend["plan"] == told["plan"] and blend["picked"] == [told["picked_rows"]]
    assert blend["live"][0] > blend["live"][1 + 1] == blend["suffix"] + told["picked_rows"]
    summary = (reading.latest / "summary.md").read_text()
    assert f"| blend.reused_rows | {told['reused_rows']} |" in summary
    assert "| blend.chunks.collected | 2 |" in summary


def test_a_folder_of_chunks_serves_later_runs(reading: Any) -> None:
    assert reading.run() == Code.OK
    first = reading.digest
    for collected in (2, 0):
        assert reading.run(cache_dir=Path("chunks"), expect_digest=first) == Code.OK
        told = reading.read("metrics.json")["blend"]["chunks"]
        assert told["collected"] == collected and told["hits"] == 2 - collected
    assert len(list((reading.folder / "chunks").iterdir())) == 2
    given = {"graph": str(reading.latest / FILE), "prompt": None, "outline": None, "documents": ()}
    assert reading.run(**given) == Code.OK
    assert reading.digest == first


def test_the_block_is_all_that_differs(reading: Any) -> None:
    sets = ("skeleton.documents=branches",)
    assert reading.run(graph="bim_eagle", sets=sets, cache_dir=Path("chunks")) == Code.OK
    assert (
        reading.read("metrics.json")["blend"] is None and not (reading.folder / "chunks").exists()
    )
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


# -- the probe ------------------------------------------------------------------------------------


@pytest.fixture
def probing(reading: Any) -> Any:
    reading.defaults["probe_blend"] = True
    return reading


def probed(shell: Any, *sets: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the probe found, all of what was blended) of one run."""
    assert shell.run(sets=sets, **options) == Code.OK
    blend = shell.read("metrics.json")["blend"]
    return blend["probe"], blend


def test_a_probe_changes_nothing_but_the_figures(probing: Any) -> None:
    assert probing.run(probe_blend=False) == Code.OK
    alone = probing.read("metrics.json")["blend"]
    found, blend = probed(probing, expect_digest=probing.digest)
    assert "probe" not in alone and "blend.probe" not in str(alone)
    del alone["chunks"], blend["chunks"], blend["probe"]  # times
    assert blend == alone
    summary = (probing.latest / "summary.md").read_text()
    assert f"| blend.probe.rows | {found['rows']} |" in summary
    (line,) = [x for x in summary.splitlines() if x.startswith("| blend.probe.error_k |")]
    assert len(line.split("|")[2].split()) == len(found["error_k"])


def test_errors_begin_where_rows_are_reused(probing: Any) -> None:
    """K and V of layer 0 depend on the token alone, and a check layer keeps what it computes."""
    for plan, exact in (("reuse", 1), ("blend", 2)):
        found, blend = probed(probing, f"blend.plan={plan}")
        assert found["rows"] == blend["reused_rows"] > 64
        assert found["prompts"] == found["draws"] == 2 and found["kl"] > 1e-9
        for errors in (found["error_k"], found["error_v"]):
            assert len(errors) == len(blend["plan"])
            assert max(errors[:exact]) < 1e-5 < 1e-3 < min(errors[exact:])


def test_the_more_rows_are_recomputed_the_less_is_wrong(probing: Any) -> None:
    behind = [
        probed(probing, f"blend.ratios=[{ratio}]")[0]["error_v"][-1] for ratio in (0, 0.5, 0.99)
    ]
    assert behind[0] > behind[1] > behind[2] > 0


@pytest.mark.parametrize("setting", ["ratios=[1]", "plan=plain", "min_tokens=9999"])
def test_nothing_is_probed_where_everything_is_computed(probing: Any, setting: str) -> None:
    found, _ = probed(probing, f"blend.{setting}")
    nothing = {"rows": 0, "prompts": 0, "draws": 0, "kl": None, "error_k": [], "error_v": []}
    assert found == nothing


def alike(found: dict[str, Any], other: dict[str, Any]) -> None:
    assert all(found[key] == other[key] for key in ("rows", "prompts", "draws"))
    assert found["kl"] == pytest.approx(other["kl"], rel=1e-2)
    for key in ("error_k", "error_v"):
        assert found[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_running_branches_and_behind_short_answers(probing: Any, layout: str) -> None:
    together, _ = probed(probing)
    joined, _ = probed(probing, layout, "layout.max_num_branches=2")
    rounds = blended(probing)
    assert len(rounds) == 2 and max(rounds[1]["accepted"]) >= 0
    alike(joined, together)
    alike(probed(probing, layout, max_new_tokens=1)[0], together)


@pytest.mark.parametrize(("layout", "copies"), list(zip(LAYOUTS, (1, 3), strict=True)))
def test_documents_that_all_branches_share(probing: Any, layout: str, copies: int) -> None:
    text = OUTLINE.replace("|-|-|First", "|Search|-|Bees").replace("Rain", "Bees and honey")
    (probing.folder / "outline.txt").write_text(text)
    found, blend = probed(probing, layout)
    assert (found["prompts"], found["draws"]) == (1, 3)
    assert found["rows"] > 64 and blend["reused_rows"] == copies * found["rows"]
    assert max(found["error_v"][:2]) < 1e-5 < 1e-3 < min(found["error_v"][2:])

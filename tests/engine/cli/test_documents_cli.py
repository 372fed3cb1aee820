"""`specsot run` over documents: cached or not, from memory and from a folder; `--probe-blend`
compares blended prompts with full prefills, in a run that stays as it is. `specsot cache`: the
chunks of documents are added, listed and dropped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import CommandLine

from specsot.engine.chunks.store import ChunkLibrary, ChunkStore
from specsot.engine.errors import Code
from specsot.engine.prepare.inputs import read_documents
from specsot.engine.run.api import open_session
from specsot.models.load.weights import model_hash
from specsot.states.prompt_builder import chunks_of

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
    assert reading.repeat() == Code.OK and reading.digest == first


def test_the_block_is_all_that_differs(reading: Any) -> None:
    sets = ("skeleton.documents=branches",)
    assert reading.run(graph="bim_eagle", sets=sets, cache_dir=Path("chunks")) == Code.OK
    assert reading.read("metrics.json")["blend"] is None
    assert not (reading.folder / "chunks").exists()
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


# -- the cache -------------------------------------------------------------------------------------

PLAIN = ["--graph", "bim_plain"]
TEXTS = {"bees.txt": "Bees make honey. " * 12, "rain.txt": "Rain falls."}


class Cache(CommandLine):
    """The command line in a folder of its own, with the tiny models."""

    models: list[str]

    def add(self, *words: str) -> int:
        return self("add", *words, "--graph", "bim_eagle", *self.models)

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.json("list")["chunks"]
        return found


@pytest.fixture
def cache(tiny: tuple[Path, Path], here: Path, capsys: pytest.CaptureFixture[str]) -> Cache:
    for name, text in TEXTS.items():
        (here / name).write_text(text)
    made = Cache(capsys, "cache")
    made.models = ["--model", str(tiny[0]), "--drafter-model", str(tiny[1]), "--threads", "1"]
    return made


def test_add_makes_what_is_not_there(cache: Cache, tiny: tuple[Path, Path]) -> None:
    assert cache.add("bees.txt", "rain.txt", "--chunk-tokens", "40", "--json") == 0
    first = json.loads(cache.out)["chunks"]
    assert all(one["made"] for one in first) and len(first) >= 3
    names = [one["name"] for one in first]
    assert names == [*(f"bees.txt {n}/{len(names) - 1}" for n in range(1, len(names))), "rain.txt"]
    assert all(0 < one["tokens"] <= 40 for one in first)
    assert {one["model_hash"] for one in first} == {model_hash(tiny[0])}
    assert cache.add("rain.txt", "bees.txt", "--chunk-tokens", "40", "--json") == 0
    again = json.loads(cache.out)["chunks"]
    assert not any(one["made"] for one in again)
    assert {one["key"] for one in again} == {one["key"] for one in first}
    assert [one["name"] for one in cache.listed()] == [one["name"] for one in again]


def test_a_session_finds_what_was_added(cache: Cache, tiny: tuple[Path, Path]) -> None:
    assert cache.add("bees.txt") == 0
    target, drafter = map(str, tiny)
    session = open_session("bim_eagle", model=target, drafter_model=drafter, threads=1)
    maker = ChunkLibrary.of(
        ChunkStore(1 << 30, Path("chunks")), session.models, model_hash(tiny[0])
    )
    fresh = ChunkLibrary.of(ChunkStore(1 << 30), session.models, model_hash(tiny[0]))
    assert maker.taps == session.models.drafter.tap_ids
    (document,) = read_documents([Path("bees.txt")])
    ((name, ids),) = chunks_of(document, session.prompts, 512)
    assert name == "bees.txt" and session.prompts.decode(ids).startswith("Document: Bees make")
    found, made = maker.chunk(ids)
    assert not made and found.rows == len(ids)
    again, made = fresh.chunk(ids)
    assert made and torch.equal(again.keys_LRgd, found.keys_LRgd)
    assert found.features_RF is not None and again.features_RF is not None
    assert torch.equal(again.features_RF, found.features_RF)
    assert found.features_RF.shape[1] == len(maker.taps) * session.models.target.hidden_size
    assert not found.keys_LRgd.requires_grad
    behind, made = replace(fresh, bos=7).chunk(ids)
    with torch.no_grad():
        wanted = session.models.target.collect(ids, 7)
    assert made and torch.equal(behind.values_LRgd, wanted.values_LRgd), "behind its token"
    assert not torch.equal(behind.values_LRgd, found.values_LRgd)


def test_other_settings_are_other_chunks(cache: Cache) -> None:
    assert cache.add("rain.txt") == 0 and cache.add("rain.txt", "--dtype", "float64") == 0
    assert cache("add", "rain.txt", "--graph", "bim_plain", *cache.models) == 0
    facts = [(one["dtype"], bool(one["taps"])) for one in cache.listed()]
    assert facts == [("float32", True), ("float64", True), ("float32", False)]


def test_the_limit_drops_what_was_used_longest_ago(cache: Cache) -> None:
    assert cache.add("bees.txt", "--json") == 0
    size = json.loads(cache.out)["chunks"][0]["bytes"]
    assert cache.add("rain.txt", "--max-bytes", str(size)) == 0
    assert [one["name"] for one in cache.listed()] == ["rain.txt"]
    assert cache.add("bees.txt", "--max-bytes", "99") == Code.USAGE
    assert "--max-bytes 99: bees.txt needs" in cache.err


def test_list_names_damaged_files_and_drop_removes_them(cache: Cache) -> None:
    assert cache("list") == 0 and cache.out == "0 chunks, 0 bytes\n"
    assert cache.add("bees.txt", "rain.txt") == 0
    bees, rain = (one["key"] for one in cache.listed())
    Path(f"chunks/{bees}.safetensors").write_text("hello, hello, hello")
    assert cache("list") == 0
    assert "rain.txt" in cache.out and "\n1 chunk," in cache.out
    assert "not a valid safetensors" in cache.err and bees in cache.err
    assert cache("drop", bees[:8]) == 0 and cache.out == "1 chunk dropped\n"
    assert [one["key"] for one in cache.listed()] == [rain]
    assert cache("drop", "--all", "--json") == 0
    assert json.loads(cache.out)["dropped"] == [rain] and cache.listed() == []


@pytest.mark.parametrize(
    "words, code, says",
    [
        (["drop"], Code.USAGE, "give KEYs"),
        (["drop", "--all", "abcd"], Code.USAGE, "give KEYs"),
        (["drop", "zzzz"], Code.USAGE, "KEY zzzz: no chunk has"),
        (["list", "--cache-dir", "rain.txt"], Code.USAGE, "rain.txt: cannot be read"),
        (["add"], Code.USAGE, "Missing argument"),
        (["add", "missing.txt"], Code.USAGE, "missing.txt: cannot be read"),
        (["add", "rain.txt", "--graph", "eagel"], Code.GRAPH, "did you mean 'eagle'"),
        (["add", "rain.txt", "--model", "/nowhere"], Code.MODEL, "/nowhere: is not a folder"),
        (["add", "rain.txt", *PLAIN, "--model", "/nowhere"], Code.MODEL, "/nowhere"),
        (["add", "rain.txt", *PLAIN, "--cache-dir", "bees.txt"], Code.USAGE, "cannot be stored"),
        (["add", "long.txt", *PLAIN, "--chunk-tokens", "100000"], Code.MODEL, "positions"),
    ],
)
def test_mistakes_are_one_line(cache: Cache, words: list[str], code: int, says: str) -> None:
    Path("long.txt").write_text("Rain falls. " * 3000)
    assert cache(*words) == code
    assert says in cache.err and "Traceback" not in cache.err

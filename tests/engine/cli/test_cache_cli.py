"""`specsot cache`: documents become chunks in a folder, are listed and dropped."""

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
    assert not made and maker.store.hits == 1 and found.rows == len(ids)
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
    assert "rain.txt" in cache.out and "\n1 chunks" in cache.out
    assert "not a valid safetensors" in cache.err and bees in cache.err
    assert cache("drop", bees[:8]) == 0 and cache.out == "1 chunks dropped\n"
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
        (["add", "rain.txt", "--model", "/nowhere"], Code.USAGE, "give --drafter-model"),
        (["add", "rain.txt", *PLAIN, "--model", "/nowhere"], Code.MODEL, "/nowhere"),
        (["add", "rain.txt", *PLAIN, "--cache-dir", "bees.txt"], Code.USAGE, "no chunks can be ke"),
        (["add", "long.txt", *PLAIN, "--chunk-tokens", "100000"], Code.MODEL, "positions"),
    ],
)
def test_mistakes_are_one_line(cache: Cache, words: list[str], code: int, says: str) -> None:
    Path("long.txt").write_text("Rain falls. " * 3000)
    assert cache(*words) == code
    assert says in cache.err and "Traceback" not in cache.err

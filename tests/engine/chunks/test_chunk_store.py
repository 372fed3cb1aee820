"""The chunk store: by content, never changed, least recently used goes, files never believed."""

import hashlib
import multiprocessing
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsot.engine.chunks.files import ABANDONED_SECONDS, ChunkFiles, ChunkKey, DamagedChunk
from specsot.engine.chunks.store import ChunkStore
from specsot.ops.blend import ChunkKV

Patch = pytest.MonkeyPatch
ROOM = 1 << 20


def key(*ids: int, **changed: object) -> ChunkKey:
    return replace(ChunkKey("m" * 64, "float32", 1, (1, 3), ids or (5, 6, 7)), **changed)  # type: ignore[arg-type]


def chunk(rows: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> ChunkKV:
    numbers = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, 4, rows, 2, 64, generator=numbers).to(dtype)
    return ChunkKV(kv[0], kv[1], torch.randn(rows, 16, generator=numbers).to(dtype))


SIZE = chunk().bytes


def content(one: ChunkKV) -> str:
    assert one.features_RF is not None
    parts = (one.keys_LRgd, one.values_LRgd, one.features_RF)
    raw = (p.contiguous().flatten().view(torch.uint8).numpy().tobytes() for p in parts)
    return hashlib.sha256(b"".join(raw)).hexdigest()


def stored(store: ChunkStore, *ids: int, **changed: object) -> str | None:
    """The content that the store has for a key."""
    found = store.get(key(*ids, **changed))
    return None if found is None else content(found)


SAME = content(chunk())


def listed(store: ChunkStore) -> list[str]:
    """Least recently used first: what is in the folder, or without one in memory."""
    if store.files is None:
        return [*store._entries]
    chunks, problems = store.files.list()
    assert not problems
    return [info.digest for info in chunks]


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkStore:
    return ChunkStore(ROOM, tmp_path / "chunks" if request.param == "folder" else None)


def test_what_is_put_is_got(store: ChunkStore) -> None:
    assert store.get(key()) is None
    assert store.put(key(), chunk(), "bees.txt")
    assert stored(store) == SAME
    assert store.bytes == SIZE
    assert listed(store) == [key().digest]
    if store.files is not None:
        info = store.files.read_info(key().digest)
        assert (info.digest, info.name, info.tokens) == (key().digest, "bees.txt", 3)
        assert (info.dtype, info.bos, info.taps) == ("float32", 1, (1, 3))


@pytest.mark.parametrize(
    "other",
    [
        *(key(*ids) for ids in ((5, 6), (5, 67), (56, 7), (7, 6, 5))),
        *(key(bos=bos) for bos in (None, 0)),
        *(key(taps=taps) for taps in ((1,), ())),
        *(key(model_hash="n" * 64), key(dtype="float64")),
    ],
)
def test_everything_a_chunk_depends_on_is_in_its_key(store: ChunkStore, other: ChunkKey) -> None:
    store.put(key(), chunk())
    assert store.get(other) is None


def test_the_order_of_taps_means_nothing() -> None:
    assert key(taps=(3, 1)).digest == key(taps=(1, 3)).digest


def test_later_changes_of_the_given_tensors_do_not_reach_the_store(store: ChunkStore) -> None:
    mine = chunk()
    store.put(key(), mine)
    mine.keys_LRgd.zero_()
    assert stored(store) == SAME


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["keys_LRgd", "values_LRgd", "features_RF"])
def test_a_write_into_a_chunk_is_found(store: ChunkStore, mode: type, name: str) -> None:
    with mode():
        store.put(key(), chunk())
        found = store.get(key())
        getattr(found, name)[0].view(-1)[0] = 9.0
        with pytest.raises(RuntimeError, match="was written to"):
            store.get(key())
    assert stored(store) == (None if store.files is None else SAME)


def test_the_least_recently_used_go_first(store: ChunkStore) -> None:
    store.max_bytes = 2 * SIZE + 4000  # a file has a header too
    for name in (1, 2):
        store.put(key(name, 0, 0), chunk(seed=name))
    store.get(key(1, 0, 0))
    store.put(key(3, 0, 0), chunk(seed=3))
    there = [n for n in (1, 2, 3) if store.get(key(n, 0, 0)) is not None]
    assert there == [1, 3] and store.bytes == 2 * SIZE
    assert listed(store) == [key(n, 0, 0).digest for n in (1, 3)]


def test_a_chunk_larger_than_the_store_is_not_kept(store: ChunkStore) -> None:
    store.max_bytes = 2 * SIZE
    store.put(key(), chunk())
    assert not store.put(key(*range(9)), chunk(9))
    assert store.get(key()) is not None, "it has driven nothing out"


@pytest.mark.parametrize(
    "wrong, says",
    [
        (chunk(4), "K and V of 3 tokens"),
        (chunk(dtype=torch.float16), "in float16, not in float32"),
        (replace(chunk(), features_RF=None), "no features for taps"),
        (replace(chunk(), features_RF=torch.zeros(2, 16)), "features of 2 rows"),
        (replace(chunk(), values_LRgd=torch.zeros(4, 3, 2, 32)), "cannot have the shapes"),
    ],
)
def test_a_chunk_that_is_not_one_of_its_key(store: ChunkStore, wrong: ChunkKV, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        store.put(key(), wrong)


def test_a_key_needs_ids() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        ChunkKey("m", "float32", None, (), ())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_another_process_finds_the_file_to_the_last_bit(tmp_path: Path, dtype: str) -> None:
    made = chunk(dtype=getattr(torch, dtype))
    ChunkStore(ROOM, tmp_path).put(key(dtype=dtype), made)
    later = ChunkStore(ROOM, tmp_path)
    assert stored(later, dtype=dtype) == content(made)
    assert {p.suffix for p in tmp_path.iterdir()} == {".safetensors"}, "and no part is left"


def test_files_are_mapped_and_not_written_through(tmp_path: Path) -> None:
    store = ChunkStore(ROOM, tmp_path)
    store.put(key(), chunk())
    found = store.get(key())
    assert found is not None
    file = str(store.files.path(key().digest)) if store.files else ""
    if os.path.exists("/proc/self/maps"):
        assert file in Path("/proc/self/maps").read_text()
    found.keys_LRgd.zero_()
    assert stored(ChunkStore(ROOM, tmp_path)) == SAME


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def other_name(file: Path) -> None:
    twin = ChunkStore(ROOM, file.parent)
    twin.put(key(1, 2, 3), chunk(seed=1))
    (file.parent / f"{key(1, 2, 3).digest}.safetensors").replace(file)


def with_header(file: Path, **header: str) -> None:
    save_file(load_file(file), file, header)


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda file: file.write_bytes(b""), "not a valid safetensors"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "not a valid safetensors"),
        (lambda file: file.write_text("hello, this is no such file"), "not a valid safetensors"),
        (flip, "damaged, its digest"),
        (other_name, "chunk of another key"),
        (partial(with_header, format="pt"), "not a chunk of format 1"),
        (partial(with_header, specsot_chunk="2"), "not a chunk of format 1"),
    ],
)
def test_a_damaged_or_foreign_file_is_a_named_miss(tmp_path: Path, damage, says: str) -> None:  # type: ignore[no-untyped-def]
    ChunkStore(ROOM, tmp_path).put(key(), chunk())
    damage(ChunkFiles(tmp_path).path(key().digest))
    store = ChunkStore(ROOM, tmp_path)
    assert store.get(key()) is None
    assert says in store.notes[0] and key().digest in store.notes[0]
    store.put(key(), chunk())
    assert stored(ChunkStore(ROOM, tmp_path)) == SAME


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "model.safetensors", "0.safetensors"):
        (tmp_path / name).write_text("mine")
    store = ChunkStore(SIZE + 4000, tmp_path)
    for number in range(3):
        store.put(key(number, 0, 0), chunk(seed=number))
    assert listed(store) == [key(2, 0, 0).digest] and not store.notes
    assert {"notes.txt", "model.safetensors", "0.safetensors"} <= set(os.listdir(tmp_path))


def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    old, new = tmp_path / ".x-1.part", tmp_path / ".x-2.part"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (0, time.time() - ABANDONED_SECONDS - 9))
    ChunkStore(ROOM, tmp_path).put(key(), chunk())
    assert not old.exists() and new.exists()


def test_a_folder_that_cannot_be_written_to_costs_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ChunkStore(ROOM, tmp_path / "file")
    store.put(key(), chunk())
    assert store.get(key()) is not None and "chunks cannot be stored there" in store.notes[0]


def test_nobody_sees_a_file_before_it_is_whole(tmp_path: Path, monkeypatch: Patch) -> None:
    seen: list[list[str]] = []

    def halfway(tensors: dict[str, torch.Tensor], path: Path, header: dict[str, str]) -> None:
        save_file(tensors, path, header)
        seen.append(ChunkFiles(tmp_path).digests())
        path.write_bytes(path.read_bytes()[:99])
        raise OSError("disk full")

    monkeypatch.setattr("specsot.engine.chunks.store.save_file", halfway)
    store = ChunkStore(ROOM, tmp_path)
    store.put(key(), chunk())
    assert seen == [[]] and os.listdir(tmp_path) == [], "nor afterwards"
    assert store.get(key()) is not None and "cannot be written: disk full" in store.notes[0]


def test_a_missing_header_field_is_damage(tmp_path: Path) -> None:
    files = ChunkFiles(tmp_path)
    save_file({"keys": torch.zeros(1)}, files.path("a" * 64), {"specsot_chunk": "1"})
    with pytest.raises(DamagedChunk, match="not that of a chunk"):
        files.read_info("a" * 64)
    assert files.list()[0] == [] and len(files.list()[1]) == 1


def test_a_file_that_goes_when_it_is_opened_is_none(tmp_path: Path, monkeypatch: Patch) -> None:
    ChunkStore(4 * SIZE, tmp_path).put(key(), chunk())

    def gone(path: Path, framework: str) -> None:
        path.unlink()
        raise RuntimeError(f"unable to open file <{path}> in read-only mode")

    monkeypatch.setattr("specsot.engine.chunks.store.safe_open", gone)
    store = ChunkStore(4 * SIZE, tmp_path)
    assert store.get(key()) is None and not store.notes


def many_writes(folder: Path) -> None:
    torch.set_num_threads(1)
    store = ChunkStore(4 * SIZE, folder)
    for turn in range(12):
        number = turn % 6
        assert stored(store, number, 0, 0) in (None, content(chunk(seed=number)))
        store.put(key(number, 0, 0), chunk(seed=number))
    assert not store.notes, store.notes


def test_processes_that_write_at_once_never_see_half_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=many_writes, args=(tmp_path,)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]

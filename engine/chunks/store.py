"""The chunk store of CacheBlend (arXiv 2405.16444): K before RoPE, V and features by content."""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...models.decoder import Decoder
from ...models.files import ModelError
from ...models.load.weights import model_hash
from ...ops.blend import ChunkKV
from ...ops.layer_plan import compile_layer_plan
from ...states.graph.graph import Program
from ...states.text.tokens import Chunk, leading_id
from ...states.yaml.source import GraphError, ProblemCode
from ..errors import UsageError
from .files import FORMAT, ChunkFiles, ChunkKey, DamagedChunk

if TYPE_CHECKING:
    from ..models import Models

CHUNK_BYTES = 8 << 30  # default limit of chunks in memory and in a folder


class _Entry(NamedTuple):
    """A chunk in memory; `versions` are torch's counts of what was done to its tensors in place."""

    name: str
    chunk: ChunkKV
    versions: tuple[int, ...]


class ChunkStore:
    """Chunks by key; the least recently used ones are dropped beyond `max_bytes`, of the tensors in
    memory, and of the files in the folder. Not thread-safe. notes: problems of files.

    Chunks never change: `put` stores a copy, and `get` returns the stored tensors themselves. torch
    has no read-only tensors, so the next `get` detects a write by the version counters.

    With a folder every chunk is a file as well (see `ChunkFiles`), mapped into memory and verified
    in full when a process first reads it, against the header's digest and the key; an invalid file
    is a miss, and written again. This detects damage, not malice: a writer can change answers."""

    def __init__(self, max_bytes: int, folder: Path | None = None, device: str = "cpu") -> None:
        self.max_bytes = max_bytes
        self.device = torch.device(device)
        self.files = None if folder is None else ChunkFiles(folder)
        self.bytes = 0
        self.notes: list[str] = []
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The chunk of a key, now the latest, or None; raises RuntimeError if it was written to."""
        digest = key.digest
        entry = self._entries.get(digest) or self._load(key)
        if entry is None:
            return None
        if _versions(entry.chunk) != entry.versions:
            self._forget(digest)
            raise RuntimeError(f"the cached chunk {digest[:12]} ({entry.name}) was written to")
        self._store(digest, entry)
        if self.files is not None:
            self.files.touch(digest)
        return entry.chunk

    def put(self, key: ChunkKey, chunk: ChunkKV, name: str = "") -> bool:
        """Store a copy; False if it is larger than the store; ValueError if it is not the key's."""
        _check(key, chunk)
        if chunk.bytes > self.max_bytes:
            return False
        copy = _on(chunk, self.device, copy=True)
        entry = _Entry(name, copy, _versions(copy))
        filed = self.files is not None and self._write(self.files, key, entry)
        if filed and self.device.type == "cpu":
            entry = self._load(key) or entry  # the mapped file: memory that can be reclaimed
        self._store(key.digest, entry)
        return True

    def _store(self, digest: str, entry: _Entry) -> None:
        self._forget(digest)
        self._entries[digest] = entry
        self.bytes += entry.chunk.bytes
        while self.bytes > self.max_bytes:
            self._forget(next(iter(self._entries)))

    def _forget(self, digest: str) -> None:
        entry = self._entries.pop(digest, None)
        self.bytes -= 0 if entry is None else entry.chunk.bytes

    def _load(self, key: ChunkKey) -> _Entry | None:
        """The chunk of a key's file, mapped into memory; None without a file that is valid."""
        if self.files is None:
            return None
        path = self.files.path(key.digest)
        try:
            info = self.files.read_info(key.digest)
            with torch.inference_mode(False), safe_open(path, framework="pt") as file:
                expected = (file.metadata() or {}).get("sha256")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if set(tensors) - {"features"} != {"keys", "values"}:
                raise ValueError(f"holds {', '.join(sorted(tensors))}, not keys and values")
            if _checksum(tensors) != expected:
                raise ValueError("damaged, its digest differs from its header")
            chunk = ChunkKV(tensors["keys"], tensors["values"], tensors.get("features"))
            _check(key, chunk)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            place = "" if isinstance(error, DamagedChunk) else f"{path}: "
            what = "" if isinstance(error, ValueError) else "cannot be read: "
            if path.exists():  # another process may have dropped it
                self.notes.append(f"{place}{what}{error}")
            return None
        chunk = _on(chunk, self.device)
        return None if chunk.bytes > self.max_bytes else _Entry(info.name, chunk, _versions(chunk))

    def _write(self, files: ChunkFiles, key: ChunkKey, entry: _Entry) -> bool:
        """Write a chunk's file; an error is noted and leaves the cache in memory."""
        path = files.path(key.digest)
        tensors = _named(_on(entry.chunk, torch.device("cpu")))
        header = {  # safetensors accepts strings only
            "specsot_chunk": str(FORMAT),
            "key": key.digest,
            "facts": json.dumps(key.facts),
            "tokens": str(entry.chunk.rows),
            "name": entry.name,
            "sha256": _checksum(tensors),
        }
        try:
            part = files.new_part(key.digest)
            try:
                save_file(tensors, part, header)
                part.replace(path)
                files.touch(key.digest)
            finally:
                part.unlink(missing_ok=True)
            files.trim(self.max_bytes)
        except (OSError, SafetensorError, UsageError) as error:
            place = "" if isinstance(error, UsageError) else f"{path}: cannot be written: "
            self.notes.append(f"{place}{error}")
            return False
        return True


def _check(key: ChunkKey, chunk: ChunkKV) -> None:
    tensors = _named(chunk).values()
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    if dtypes != [key.dtype]:
        raise ValueError(f"the chunk is in {' and '.join(dtypes)}, not in {key.dtype}")
    keys_LRgd = chunk.keys_LRgd
    values_LRgd = chunk.values_LRgd
    tokens = len(key.token_ids)
    if keys_LRgd.dim() != 4 or keys_LRgd.shape != values_LRgd.shape or chunk.rows != tokens:
        shapes = f"{tuple(keys_LRgd.shape)} and {tuple(values_LRgd.shape)}"
        raise ValueError(f"K and V of {tokens} tokens cannot have the shapes {shapes}")
    if (chunk.features_RF is None) != (not key.taps):
        raise ValueError(f"the chunk has {'no ' if key.taps else ''}features for taps {key.taps}")
    if chunk.features_RF is not None and len(chunk.features_RF) != tokens:
        raise ValueError(f"features of {len(chunk.features_RF)} rows for {tokens} tokens")


def _named(chunk: ChunkKV) -> dict[str, Tensor]:
    tensors = {"keys": chunk.keys_LRgd, "values": chunk.values_LRgd}
    if chunk.features_RF is not None:
        tensors["features"] = chunk.features_RF
    return tensors


def _on(chunk: ChunkKV, device: torch.device, *, copy: bool = False) -> ChunkKV:
    layout = torch.contiguous_format if copy else torch.preserve_format
    with torch.inference_mode(False):  # its tensors have no version counters
        tensors = _named(chunk).values()
        return ChunkKV(*(t.detach().to(device, copy=copy, memory_format=layout) for t in tensors))


def _versions(chunk: ChunkKV) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in _named(chunk).values())


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(slots=True)
class ChunkLibrary:
    """The chunks of one target, and a run's look-ups. taps: layers whose features the drafter
    reads. collect: compute and store missing chunks. hits, missed: of cached ones, and of ones to
    compute in place. made_nanos, made_sizes: time of all computed chunks, and tokens of each."""

    store: ChunkStore
    target: Decoder
    model_hash: str
    bos: int | None
    taps: tuple[int, ...]
    collect: bool = False
    hits: int = field(default=0, init=False)
    missed: int = field(default=0, init=False)
    made_nanos: int = field(default=0, init=False)
    made_sizes: list[int] = field(default_factory=list, init=False)

    @classmethod
    def of(
        cls, store: ChunkStore, models: "Models", model_hash: str, *, collect: bool = False
    ) -> "ChunkLibrary":
        taps = tuple(getattr(models.drafter, "tap_ids", ()))
        bos = None if models.tokenizer is None else leading_id(models.tokenizer)
        return cls(store, models.target, model_hash, bos, taps=taps, collect=collect)

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        dtype = str(self.target.embed.dtype).removeprefix("torch.")
        if self.target.weights != "full":
            dtype = f"{dtype}/{self.target.weights}"
        return ChunkKey(self.model_hash, dtype, self.bos, self.taps, token_ids=tuple(token_ids))

    def chunk(self, token_ids: Sequence[int], name: str = "") -> tuple[ChunkKV, bool]:
        """The chunk of these ids, and whether it had to be computed."""
        key = self.key(token_ids)
        if (chunk := self.store.get(key)) is not None:
            return chunk, False
        with torch.no_grad():
            chunk = self.target.collect(token_ids, self.bos, self.taps)
        self.store.put(key, chunk, name)
        return chunk, True

    def find(self, chunk: Chunk) -> ChunkKV | None:
        """Read-only K, V and features of a chunk; None if they must be computed in place."""
        if not self.collect:
            cached = self.store.get(self.key(chunk.ids))
            self.hits += cached is not None
            self.missed += cached is None
            return cached
        start = time.perf_counter_ns()
        try:
            cached, is_new = self.chunk(chunk.ids, chunk.name)
        except ModelError:  # longer than the model's sequences, as is the prompt: it is refused
            self.missed += 1
            return None
        self.hits += not is_new
        if is_new:
            self.made_nanos += time.perf_counter_ns() - start
            self.made_sizes.append(len(chunk.ids))
        return cached


def chunks_for(program: Program, models: "Models", store: ChunkStore | None) -> ChunkLibrary:
    """The chunks of a graph that blends; raises GraphError if the model's layers cannot be used."""
    blend = program.graph.blend
    target = models.target
    assert blend is not None

    def wrong(message: str, *where: str | int) -> GraphError:
        problem = program.source.problem(("blend", *where), message, ProblemCode.MODEL_LAYERS)
        return GraphError([problem])

    try:
        compile_layer_plan(blend.settings, target.num_layers)
    except ValueError:
        *others, last = blend.check_layers
        message = f"no layer {last}: the model's layers are 0 to {target.num_layers - 1}"
        raise wrong(message, "check_layers", len(others)) from None
    if blend.mask == "bottom_right" and any(target.config.sliding):
        message = "bottom_right cannot be used: layers of this model have a sliding window"
        raise wrong(message, "mask")
    drafter = models.drafter if program.graph.drafter.has_model else None
    store = store or ChunkStore(CHUNK_BYTES, device=str(models.device))
    weights = "" if store.files is None else model_hash(target.config.path.parent)
    models = replace(models, drafter=drafter)
    return ChunkLibrary.of(store, models, weights, collect=blend.collect)

"""The chunk store of CacheBlend (arXiv 2405.16444) and how a run uses it."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...models.decoder import Decoder
from ...models.files import ModelError
from ...models.load.checkpoint import model_hash
from ...ops.blend import ChunkKV
from ...ops.layer_plan import compile_layer_plan
from ...states.graph.graph import BlendBlock
from ...states.graph.program import Program
from ...states.text.tokens import Chunk, leading_id
from ...states.yaml.source import GraphError, ProblemCode
from ..errors import UsageError
from .files import ChunkFiles, ChunkInfo, ChunkKey, DamagedChunk


@dataclass(frozen=True, slots=True)
class _Entry:
    """A chunk in memory; `versions` are torch's counts of what was done to its tensors in place."""

    info: ChunkInfo
    chunk: ChunkKV
    versions: tuple[int, ...]


class ChunkStore:
    """Chunks under their keys, the least recently used ones dropped beyond so many bytes.

    Chunks never change: `put` keeps a copy, and `get` gives the stored tensors themselves, without
    copying, for reading alone. torch has no tensors that cannot be written to, so a write into one
    is found at the next `get` by its version counter and raised there as RuntimeError.

    With a folder every chunk is a file as well (see `ChunkFiles`), mapped into memory when it is
    read; the limit holds for memory and for the files each. Files are checked in full the first
    time that a process reads them, against the header's digest and against the key; one that does
    not pass is a miss, told in `notes` and written anew. That finds damage, not malice: whoever can
    write into the folder can change answers. Not for several threads at once.

    Args:
        max_bytes: of the tensors in memory, and of the files in the folder.
        device: where chunks are kept.

    Attributes:
        hits, misses: how often `get` found a chunk, and how often not.
        bytes: of the chunks in memory.
        notes: what was wrong with files, a line each.
    """

    def __init__(
        self, max_bytes: int, folder: Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.max_bytes = max_bytes
        self.device = torch.device(device)
        self.files = None if folder is None else ChunkFiles(folder)
        self.hits = self.misses = self.bytes = 0
        self.notes: list[str] = []
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The chunk of this key, now the most recently used one; None if it has to be made.

        Raises:
            RuntimeError: somebody wrote into the chunk.
        """
        digest = key.digest
        entry = self._entries.get(digest) or self._load(key)
        if entry is None:
            self.misses += 1
            return None
        if _versions(entry.chunk) != entry.versions:
            self._forget(digest)
            raise RuntimeError(f"the cached chunk {digest[:12]} ({entry.info.name}) was written to")
        self.hits += 1
        self._keep(digest, entry)
        if self.files is not None:
            self.files.touch(digest)
        return entry.chunk

    def put(self, key: ChunkKey, chunk: ChunkKV, name: str = "") -> bool:
        """Keep a copy of a chunk; False if it alone is larger than the store.

        Args:
            name: what to call it in lists.

        Raises:
            ValueError: the chunk is not one of this key.
        """
        _check(key, chunk)
        if chunk.bytes > self.max_bytes:
            return False
        size = (chunk.rows, chunk.bytes)
        now = time.time()
        info = ChunkInfo(key.digest, name, *size, key.model_hash, key.dtype, key.bos, key.taps, now)
        copy = _on(chunk, self.device, copy=True)
        entry = _Entry(info, copy, _versions(copy))
        filed = self.files is not None and self._write(self.files, info, copy)
        if filed and self.device.type == "cpu":
            entry = self._load(key) or entry  # the mapped file: memory that can be reclaimed
        self._keep(info.digest, entry)
        return True

    def _keep(self, digest: str, entry: _Entry) -> None:
        """As the most recently used one; others go until the bytes fit."""
        self._forget(digest)
        self._entries[digest] = entry
        self.bytes += entry.chunk.bytes
        while self.bytes > self.max_bytes:
            self._forget(next(iter(self._entries)))

    def _forget(self, digest: str) -> None:
        entry = self._entries.pop(digest, None)
        self.bytes -= 0 if entry is None else entry.chunk.bytes

    def _load(self, key: ChunkKey) -> _Entry | None:
        """From the folder, if it is there and intact."""
        if self.files is None:
            return None
        try:
            info = self.files.read_info(key.digest)
            chunk = _read(self.files.path(key.digest))
            _check(key, chunk)
        except FileNotFoundError:
            return None
        except DamagedChunk as problem:
            self.notes.append(str(problem))
            return None
        except ValueError as error:
            self.notes.append(f"{self.files.path(key.digest)}: {error}")
            return None
        chunk = _on(chunk, self.device)
        return None if chunk.bytes > self.max_bytes else _Entry(info, chunk, _versions(chunk))

    def _write(self, files: ChunkFiles, info: ChunkInfo, chunk: ChunkKV) -> bool:
        """A folder that cannot be written to costs the cache on disk and nothing else."""
        try:
            part = files.new_part(info.digest)
            try:
                tensors = _named(_on(chunk, torch.device("cpu")))
                save_file(tensors, part, info.header(_checksum(tensors)))
                part.replace(files.path(info.digest))
                files.touch(info.digest)
            finally:
                part.unlink(missing_ok=True)
            files.trim(self.max_bytes)
            return True
        except (OSError, SafetensorError) as error:
            self.notes.append(f"{files.path(info.digest)}: cannot be written: {error}")
        except UsageError as error:
            self.notes.append(str(error))
        return False


def _check(key: ChunkKey, chunk: ChunkKV) -> None:
    """Raise ValueError unless the tensors can be those of the key."""
    tensors = _named(chunk)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
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
    """A chunk's tensors as they are called in a file."""
    tensors = {"keys": chunk.keys_LRgd, "values": chunk.values_LRgd}
    if chunk.features_RF is not None:
        tensors["features"] = chunk.features_RF
    return tensors


def _on(chunk: ChunkKV, device: torch.device, *, copy: bool = False) -> ChunkKV:
    """A chunk on a device; copies are the store's own, and contiguous.

    Tensors of inference mode have no version counters.
    """
    layout = torch.contiguous_format if copy else torch.preserve_format
    with torch.inference_mode(False):
        tensors = _named(chunk).values()
        return ChunkKV(
            *(one.detach().to(device, copy=copy, memory_format=layout) for one in tensors)
        )


def _versions(chunk: ChunkKV) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in _named(chunk).values())


def _read(path: Path) -> ChunkKV:
    """A chunk's tensors, mapped into memory.

    Raises:
        FileNotFoundError: there is no such file (any more).
        DamagedChunk: it cannot be read, or its digest is not that of its header.
    """
    try:
        with torch.inference_mode(False), safe_open(path, framework="pt") as file:
            wanted = (file.metadata() or {}).get("sha256")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, RuntimeError) as error:
        if not path.exists():  # torch maps it once more by its name, and another process took it
            raise FileNotFoundError(path) from None
        raise DamagedChunk(f"{path}: cannot be read: {error}") from None
    if set(tensors) - {"features"} != {"keys", "values"}:
        raise DamagedChunk(f"{path}: holds {', '.join(sorted(tensors))}, not keys and values")
    if _checksum(tensors) != wanted:
        raise DamagedChunk(f"{path}: is damaged, its digest is not that of its header")
    return ChunkKV(tensors["keys"], tensors["values"], tensors.get("features"))


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes of tensors on the CPU."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


if TYPE_CHECKING:
    from ..models import Models

CHUNK_BYTES = 8 << 30  # of chunks in memory and in a folder, if nobody says otherwise


@dataclass(frozen=True, slots=True)
class ChunkMaker:
    """Keys and makes chunks.

    model_hash: of the target's weights. bos: what stands before every chunk that is made.
    taps: whose features the drafter reads; empty for drafters that read text.
    """

    store: ChunkStore
    target: Decoder
    model_hash: str
    bos: int | None
    taps: tuple[int, ...]

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        dtype = str(self.target.embed.dtype).removeprefix("torch.")
        if self.target.weights != "full":
            dtype = f"{dtype}/{self.target.weights}"
        return ChunkKey(self.model_hash, dtype, self.bos, self.taps, tuple(token_ids))

    def chunk(self, token_ids: Sequence[int], name: str = "") -> tuple[ChunkKV, bool]:
        """The chunk of these ids, not to be written to, and whether it was made just now.

        Raises:
            ModelError: it is longer than the model's sequences.
        """
        key = self.key(token_ids)
        if (chunk := self.store.get(key)) is not None:
            return chunk, False
        with torch.no_grad():
            chunk = self.target.collect(token_ids, self.bos, self.taps)
        self.store.put(key, chunk, name)
        return chunk, True


def chunk_maker(store: ChunkStore, models: "Models", model_hash: str) -> ChunkMaker:
    """For the models of a session."""
    taps = tuple(getattr(models.drafter, "tap_ids", ()))
    bos = None if models.tokenizer is None else leading_id(models.tokenizer)
    return ChunkMaker(store, models.target, model_hash, bos, taps)


@dataclass(slots=True)
class ChunkLibrary:
    """A store as a run uses it, with what became of its look-ups.

    collect: whether missing chunks are read alone and kept; None is found for them otherwise.

    Attributes:
        hits, missed: look-ups of chunks that were cached, and that had to be computed in place.
        made, made_rows, made_nanos: chunks that were read alone, their tokens, and the time of it.
        made_sizes: tokens of each.
    """

    maker: ChunkMaker
    collect: bool
    hits: int = 0
    missed: int = 0
    made_nanos: int = 0
    made_sizes: list[int] = field(default_factory=list)

    def find(self, chunk: Chunk) -> ChunkKV | None:
        """K, V and features of these ids, not to be written to; None if they must be computed."""
        if not self.collect:
            cached = self.maker.store.get(self.maker.key(chunk.ids))
            self.hits += cached is not None
            self.missed += cached is None
            return cached
        begun = time.perf_counter_ns()
        try:
            cached, is_new = self.maker.chunk(chunk.ids, chunk.name)
        except ModelError:  # longer than the model's sequences: so is the prompt, which is refused
            self.missed += 1
            return None
        self.hits += not is_new
        if is_new:
            self.made_nanos += time.perf_counter_ns() - begun
            self.made_sizes.append(len(chunk.ids))
        return cached


def chunks_for(program: Program, models: "Models", store: ChunkStore | None) -> ChunkMaker | None:
    """What reads chunks of documents for a graph, by default into memory; None if it reuses none.

    Raises:
        GraphError: a check layer that the model does not have, a mask that its layers cannot use.
    """
    blend = program.graph.blend
    target = models.target
    if blend is None:
        return None
    _check_model(program, blend, target)
    drafter = models.drafter if program.graph.drafter.has_model else None
    if store is None:
        store = ChunkStore(CHUNK_BYTES, device=models.device)
    weights = "" if store.files is None else model_hash(target.config.path.parent)
    return chunk_maker(store, replace(models, drafter=drafter), weights)


def _check_model(program: Program, blend: BlendBlock, target: Any) -> None:
    source = program.source
    try:
        compile_layer_plan(blend.settings, target.num_layers)
    except ValueError:
        last = blend.check_layers[-1]
        at = ("blend", "check_layers", len(blend.check_layers) - 1)
        message = f"no layer {last}: the model's layers are 0 to {target.num_layers - 1}"
        raise GraphError([source.problem(at, message, ProblemCode.MODEL_LAYERS)]) from None
    if blend.mask == "bottom_right" and any(target.config.sliding):
        message = "bottom_right cannot be used: layers of this model have a sliding window"
        wrong = source.problem(("blend", "mask"), message, ProblemCode.MODEL_LAYERS)
        raise GraphError([wrong])

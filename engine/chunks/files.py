"""Cached chunks as files: one safetensors file each, written whole, verified before use. A file's
name is the digest of its chunk's key. Without torch: lists need headers alone."""

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import UsageError

FORMAT = 1
SUFFIX = ".safetensors"
PART = ".part"
ABANDONED_SECONDS = 3600  # age of a part file whose writer no longer exists
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The inputs of a chunk's tensors; equal keys mean equal chunks. bos: the token before the
    chunk, not part of it. taps: layers whose features are stored. token_ids: at least one."""

    model_hash: str
    dtype: str
    bos: int | None
    taps: tuple[int, ...]
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a chunk needs at least one token, not 0")

    @property
    def digest(self) -> str:
        values = json.dumps([FORMAT, *self.facts, self.token_ids])
        return hashlib.sha256(values.encode()).hexdigest()

    @property
    def facts(self) -> list[Any]:
        return [self.model_hash, self.dtype, self.bos, sorted(set(self.taps))]


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A cached chunk. digest: of its key. bytes: of its file. used: seconds since 1970."""

    digest: str
    name: str
    tokens: int
    bytes: int
    model_hash: str
    dtype: str
    bos: int | None
    taps: tuple[int, ...]
    used: float


class DamagedChunk(ValueError):
    """A cached file is not a valid chunk; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """The folder of a chunk store. Processes may share it: files appear complete."""

    folder: Path

    def path(self, digest: str) -> Path:
        return self.folder / f"{digest}{SUFFIX}"

    def new_part(self, digest: str) -> Path:
        """A unique name for a part file, which readers ignore; makes the folder (UsageError)."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{self.folder}: chunks cannot be stored there: {reason}") from None
        return self.folder / f".{digest}-{secrets.token_hex(4)}{PART}"

    def digests(self) -> list[str]:
        digests = filter(DIGEST.fullmatch, (path.stem for path in self._files(SUFFIX)))
        return sorted(digests, key=lambda digest: (_stat(self.path(digest))[0], digest))

    def list(self) -> tuple[list[ChunkInfo], list[str]]:
        """The chunks, least recently used first, and the problems of damaged files."""
        chunks: list[ChunkInfo] = []
        problems: list[str] = []
        for digest in self.digests():
            try:
                chunks.append(self.read_info(digest))
            except DamagedChunk as problem:
                problems.append(str(problem))
            except FileNotFoundError:
                continue  # another process dropped it
        return chunks, problems

    def read_info(self, digest: str) -> ChunkInfo:
        """The header of a chunk's file, not the tensors; raises FileNotFoundError, DamagedChunk."""
        path = self.path(digest)
        try:
            with safe_open(path, framework="np") as file:
                header: Mapping[str, str] = file.metadata() or {}
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedChunk(f"{path}: not a valid safetensors file: {error}") from None
        if header.get("specsot_chunk") != str(FORMAT):
            raise DamagedChunk(f"{path}: not a chunk of format {FORMAT}")
        try:
            model_hash, dtype, bos, taps = json.loads(header["facts"])
            used, size = _stat(path)
            info = ChunkInfo(
                digest=digest,
                name=header["name"],
                tokens=int(header["tokens"]),
                bytes=size,
                model_hash=model_hash,
                dtype=dtype,
                bos=bos,
                taps=tuple(taps),
                used=used / 1e9,
            )
        except (KeyError, ValueError, TypeError):
            raise DamagedChunk(f"{path}: its header is not that of a chunk") from None
        if header.get("key") != digest:
            raise DamagedChunk(f"{path}: the chunk of another key, {header.get('key')}")
        return info

    def touch(self, digest: str) -> None:
        with suppress(OSError):
            # The kernel's own "now" is some milliseconds late, which would change the order.
            os.utime(self.path(digest), ns=(time.time_ns(),) * 2)

    def drop(self, digest: str) -> bool:
        """Remove a file; memory maps stay valid. False if it does not exist; raises UsageError."""
        try:
            self.path(digest).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{self.path(digest)}: cannot be removed: {reason}") from None
        return True

    def trim(self, max_bytes: int) -> None:
        """Remove what killed writers left, and the least recently used files above `max_bytes`."""
        for path in self._files(PART):
            if time.time_ns() - _stat(path)[0] > ABANDONED_SECONDS * 1e9:
                path.unlink(missing_ok=True)
        sizes = {digest: _stat(self.path(digest))[1] for digest in self.digests()}
        total = sum(sizes.values())
        for digest, size in sizes.items():
            if total <= max_bytes:
                return
            self.drop(digest)
            total -= size

    def _files(self, ending: str) -> Iterator[Path]:
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{self.folder}: cannot be read: {error.strerror or error}") from None
        yield from (self.folder / name for name in names if name.endswith(ending))


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size

"""Cached chunks as files: one safetensors file each, replaced whole, looked at before it is used.

What a chunk is cached under is in the file's name and, written out, in its header; the header also
has a digest of the tensors. Needs no torch: headers and file times are all that a list shows.
"""

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
ABANDONED = 3600  # seconds after which a half-written file has no writer any more
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """What the numbers of a chunk depend on; equal keys mean equal chunks.

    model_hash: of the weights (`models.checkpoint.model_hash`). dtype: as `float32`.
    bos: the token that stood in front of the chunk, which is not one of its own; None for none.
    taps: whose features are kept, as in `Target.forward`. token_ids: the chunk's own, at least one.
    """

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
        """sha256 over all of it, and over the version of the format."""
        return hashlib.sha256(
            json.dumps([FORMAT, *self.facts, self.token_ids]).encode()
        ).hexdigest()

    @property
    def facts(self) -> tuple[Any, ...]:
        """All but the ids. The order of taps means nothing: features are joined in increasing."""
        return (self.model_hash, self.dtype, self.bos, sorted(set(self.taps)))


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A cached chunk in a list; most as in `ChunkKey`.

    digest: that of its key. name: what it was called when it was stored. bytes: of its tensors, or
    of its file. used: seconds since 1970.
    """

    digest: str
    name: str
    tokens: int
    bytes: int
    model_hash: str
    dtype: str
    bos: int | None
    taps: tuple[int, ...]
    used: float

    def header(self, checksum: str) -> dict[str, str]:
        """What stands in the file beside the tensors; safetensors takes texts alone."""
        facts = [self.model_hash, self.dtype, self.bos, list(self.taps)]
        return {
            "specsot_chunk": str(FORMAT),
            "key": self.digest,
            "facts": json.dumps(facts),
            "tokens": str(self.tokens),
            "name": self.name,
            "sha256": checksum,
        }


class DamagedChunk(ValueError):
    """A file in the cache that is no intact chunk; the message names it and says why."""


class ChunkFiles:
    """The folder of a chunk store. Processes may share it: files only ever appear whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        return self.folder / f"{digest}{SUFFIX}"

    def new_part(self, digest: str) -> Path:
        """A name to write under, which no other writer has and no reader looks at.

        Raises:
            UsageError: the folder cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{self.folder}: no chunks can be kept there: {reason}") from None
        return self.folder / f".{digest}-{secrets.token_hex(4)}{PART}"

    def digests(self) -> list[str]:
        """Of all files that are named as chunks, least recently used first; others are ignored."""
        names = [path.name.removesuffix(SUFFIX) for path in self._files(SUFFIX)]
        digests = [name for name in names if DIGEST.fullmatch(name)]
        return sorted(digests, key=lambda digest: (_stat(self.path(digest))[0], digest))

    def list(self) -> tuple[list[ChunkInfo], list[str]]:
        """What the headers say, least recently used first; and what is wrong with other files."""
        good: list[ChunkInfo] = []
        problems: list[str] = []
        for digest in self.digests():
            try:
                good.append(self.read_info(digest))
            except DamagedChunk as problem:
                problems.append(str(problem))
            except FileNotFoundError:  # another process dropped it
                continue
        return good, problems

    def read_info(self, digest: str) -> ChunkInfo:
        """What the header of a chunk's file says; of the tensors nothing is read.

        Raises:
            FileNotFoundError: there is no such file.
            DamagedChunk: it is not what its name says.
        """
        path = self.path(digest)
        try:
            with safe_open(path, framework="np") as file:
                header: Mapping[str, str] = file.metadata() or {}
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedChunk(f"{path}: is no intact safetensors file: {error}") from None
        if header.get("specsot_chunk") != str(FORMAT):
            raise DamagedChunk(f"{path}: is no chunk of format {FORMAT}")
        try:
            model_hash, dtype, bos, taps = json.loads(header["facts"])
            tokens = int(header["tokens"])
            name = header["name"]
            used, size = _stat(path)
            facts = (model_hash, dtype, bos, tuple(taps))
            info = ChunkInfo(digest, name, tokens, size, *facts, used / 1e9)
        except (KeyError, ValueError, TypeError):
            raise DamagedChunk(f"{path}: its header is not that of a chunk") from None
        if header.get("key") != digest:
            raise DamagedChunk(f"{path}: is the chunk of another name, {header.get('key')}")
        return info

    def touch(self, digest: str) -> None:
        """Note that a chunk was used now, if the folder can be written to."""
        with suppress(OSError):
            # The kernel's own "now" is some milliseconds behind, and would mix up the order.
            os.utime(self.path(digest), ns=(time.time_ns(),) * 2)

    def drop(self, digest: str) -> bool:
        """Remove a chunk's file; whoever has it mapped keeps it. False if there was none.

        Raises:
            UsageError: it cannot be removed.
        """
        try:
            self.path(digest).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{self.path(digest)}: cannot be removed: {reason}") from None
        return True

    def trim(self, max_bytes: int) -> None:
        """Drop the least recently used files until the rest have at most so many bytes.

        What writers left that were killed goes first.
        """
        for path in self._files(PART):
            if time.time_ns() - _stat(path)[0] > ABANDONED * 1e9:
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
    """When it was used, in nanoseconds since 1970, and its bytes; zeros if it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size

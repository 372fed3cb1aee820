"""Text files of a user: read whole up to a limit, in UTF-8, and the JSON of their lines."""

import json
from pathlib import Path
from typing import Any

from ..errors import UsageError

MAX_BYTES = 64 << 20


def read_text(file: Path) -> str:
    """A file's text without a byte-order mark.

    Raises:
        UsageError: it cannot be read, is too long or not UTF-8; with the line where there is one.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{file}: cannot be read: {reason}") from None
    return decode_text(data, str(file))


def is_jsonl(file: Path) -> bool:
    """Whether a file's name says that each of its lines is a JSON value."""
    return file.suffix.lower() in (".jsonl", ".ndjson")


def lines_of(text: str) -> list[tuple[int, str]]:
    """The lines that say something, with their numbers from 1."""
    return [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def decode_text(data: bytes, name: str) -> str:
    """Bytes from ``name`` as text; raises UsageError as `read_text` does."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name}: more than {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}:{line}: not UTF-8") from None


def json_value(line: str, place: str) -> Any:
    """What one line of a JSONL file holds.

    Raises:
        UsageError: no JSON.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}:{error.colno}: {error.msg}") from None
    except (RecursionError, ValueError):
        raise UsageError(f"{place}: no JSON that can be read") from None


def redact(text: str) -> str:
    """Home directories do not belong into files that people pass on."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text

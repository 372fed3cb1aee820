"""Files of a checkpoint folder: what is wrong with one, and which may be opened at all."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

MAX_SIZE = 1 << 24  # of any size in a config.json
# Of a repository of the Hub.
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt")


class ModelError(ValueError):
    """A checkpoint that cannot be used: which file, and why."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = Path(path)
        self.reason = reason


def cause_of(error: BaseException) -> str:
    """An error of a library in one line."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


@contextmanager
def panics_as(failed: Callable[[str], Exception]) -> Iterator[None]:
    """Raise an error where the library `tokenizers` panics: its exception is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise failed(f"the library panics: {str(error).splitlines()[0][:200]}") from None


@dataclass(frozen=True, slots=True)
class Fields:
    """The members of one JSON object, read with their types checked."""

    path: Path
    values: Mapping[str, Any]

    def wrong(self, reason: str) -> ModelError:
        return ModelError(self.path, reason)

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer up to MAX_SIZE: no file asks for sizes that overflow or never end."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(f"`{key}` is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(f"`{key}` must be a positive integer, not {value!r}")
        if value > MAX_SIZE:
            raise self.wrong(f"`{key}` is {value}, more than {MAX_SIZE}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive finite number."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(f"`{key}` must be a number, not {value!r}")
        if not math.isfinite(value) or value <= 0:
            raise self.wrong(f"`{key}` must be positive and finite, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(f"`{key}` must be true or false, not {value!r}")
        return value

    def section(self, key: str) -> "Fields":
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(f"`{key}` must be an object, not {value!r}")
        return Fields(self.path, value or {})

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.wrong(f"`{key}` must hold token ids, not {value!r}")
        return tuple(ids)


def inside(folder: Path, name: str) -> Path:
    """The path of one of the folder's own files: an index file or a link could otherwise name any
    file at all. Links into `blobs/` of the same Hugging Face cache entry
    (snapshots/<revision>/x -> ../../blobs/...) are how that cache stores files."""
    if name in ("", ".", "..") or {PurePosixPath(name).name, PureWindowsPath(name).name} != {name}:
        raise ModelError(folder, f"names the file {name!r}, which is not a plain file name")
    try:
        root = folder.resolve()
        real = (folder / name).resolve()
    except (RuntimeError, OSError) as error:
        raise ModelError(folder / name, f"is a link that leads nowhere: {error}") from None
    allowed = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(real.is_relative_to(place) for place in allowed):
        raise ModelError(folder / name, f"is a link that leaves its folder, to {real}")
    return folder / name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError with line and column where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ModelError(path, f"invalid JSON at {place}: {error.msg}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(path, f"cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(path, f"must hold an object, not a {type(value).__name__}")
    return value


def read_fields(folder: Path) -> Fields:
    if not folder.is_dir():
        raise ModelError(folder, "is not a folder")
    if not (folder / "config.json").is_file():
        reason = "holds no config.json"
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".gguf", ".onnx", ".nemo"))
        if (folder / "adapter_config.json").exists():
            reason += ": it is a LoRA adapter; merge it into its base model and give that"
        elif others:
            which = "give that file itself" if others[0].endswith(".gguf") else "not read"
            reason += f", but {others[0]}: {which}"
        raise ModelError(folder, reason)
    path = inside(folder, "config.json")
    return Fields(path, read_json(path))

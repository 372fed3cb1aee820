"""Finding and reading graphs: an existing file wins over a graph that ships with the package."""

import errno
import stat
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from ...ops.registry import OpTable
from ...states.graph.load import load_program, op_table
from ...states.graph.program import Program
from ...states.graph.source import GraphError, Problem, Source, decode, hint
from ...states.graph.yaml12 import MAX_BYTES

PACKAGE = __name__.split(".")[0]
FOLDER = "graphs"


def graph_names() -> list[str]:
    """Names of the shipped graphs."""
    names = (p.name for p in (files(PACKAGE) / FOLDER).iterdir() if p.is_file())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def open_graph(ref: str, sets: Iterable[str] = (), table: OpTable | None = None) -> Program:
    """Read, check and resolve a graph.

    Args:
        ref: a path, or the name of a shipped graph (`x`, `x.yaml` or `graphs/x.yaml`).
        sets: `path=value` changes.
        table: ops and guards, if they were read already.

    Raises:
        GraphError: there is no such graph, or it has problems.
    """
    return load_program(open_source(ref), table or op_table(), sets=sets)


def open_source(ref: str) -> Source:
    """The parsed graph file; raises GraphError."""
    name = _short(ref)
    if _is_there(ref) or name not in graph_names():
        return read_source(ref)
    shown = f"{FOLDER}/{name}.yaml"
    data = (files(PACKAGE) / FOLDER / f"{name}.yaml").read_bytes()
    return Source(decode(data, shown), shown)


def is_graph(ref: str) -> bool:
    """Whether there is a file, or a shipped graph, of this name."""
    return _is_there(ref) or _short(ref) in graph_names()


def _short(ref: str) -> str:
    """The name under which a graph may be shipped."""
    return ref.removeprefix(f"{FOLDER}/").removesuffix(".yaml")


def _is_there(ref: str) -> bool:
    """Anything but a directory: also what cannot be read, so that nothing else is read instead."""
    try:
        return not stat.S_ISDIR(Path(ref).lstat().st_mode)
    except (OSError, ValueError):
        return False


def read_source(ref: str) -> Source:
    """A YAML file of a user; anything that is no readable regular file is a GraphError."""
    try:
        path = Path(ref)
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise GraphError([_wrong(ref, _odd(mode))])
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise GraphError([_wrong(ref, _why(ref, error))]) from None
    except ValueError as error:
        if isinstance(error, GraphError):
            raise
        raise GraphError([_wrong(repr(ref), "a path cannot hold a NUL character")]) from None
    return Source(decode(data, ref), ref)


def _wrong(ref: str, message: str) -> Problem:
    return Problem(ref or "''", 0, 0, "file", message)


def _odd(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "this is a directory, not a file"
    return f"this is a {'pipe' if stat.S_ISFIFO(mode) else 'device or socket'}, not a file"


def _why(ref: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        names = graph_names()
        known = f"shipped are: {', '.join(names)}"
        return f"no such file or shipped graph{hint(_short(ref), names)}; {known}"
    if error.errno == errno.ELOOP:
        return "the symbolic link leads back to itself"
    return (error.strerror or str(error)).lower()

"""Finding and reading graphs: an existing file wins over a graph that ships with the package."""

import errno
import os
import stat
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...ops.registry import OpTable
from ...states.graph.graph import EXTENDS
from ...states.graph.load import base_of, extend, load_program, op_table
from ...states.graph.program import Program
from ...states.yaml.source import (
    MAX_BYTES,
    GraphError,
    Problem,
    ProblemCode,
    Source,
    decode,
    hint,
    quoted,
)

PACKAGE = __name__.split(".")[0]
FOLDER = "graphs"
SHIPPED = Path(__file__).parents[2] / FOLDER
LONGEST_CHAIN = 8  # files that extend one another


class GraphFile(NamedTuple):
    """A file to read, and how messages call it."""

    path: str
    shown: str


def graph_names() -> list[str]:
    """Names of the shipped graphs."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def _machine_names() -> list[str]:
    """What the shipped graphs extend."""
    return sorted(f"machines/{path.stem}" for path in SHIPPED.glob("machines/*.yaml"))


def open_graph(ref: str, sets: Iterable[str] = (), table: OpTable | None = None) -> Program:
    """Read, check and resolve a graph.

    Args:
        ref: a path, or the name of a shipped graph (`x`, `x.yaml` or `graphs/x.yaml`).
        sets: `path=value` changes.
        table: the ops and guards; None reads them.

    Raises:
        GraphError: the graph is missing or has problems.
    """
    return load_program(open_source(ref), table or op_table(), sets=sets)


def open_source(ref: str) -> Source:
    """The parsed graph file with all that it extends; raises GraphError."""
    file = _find(ref, GraphFile(ref, ref))
    return _extended(read_source(file.path, file.shown), (file,))


def _extended(source: Source, chain: tuple[GraphFile, ...]) -> Source:
    """A file merged with its base: a shipped file, or one in the same folder.

    chain: the files from the first graph to this one, each extended by the next.
    """
    name = base_of(source)
    if name is None:
        return source
    base_paths = (str(Path(place).parent / name) for place in chain[-1])
    base = _find(name, GraphFile(*base_paths))

    wrong = partial(source.problem, (EXTENDS,), code=ProblemCode.EXTENDS)
    names = " > ".join(file.shown for file in (*chain, base))
    if any(os.path.realpath(base.path) == os.path.realpath(file.path) for file in chain):
        raise GraphError([wrong(f"a graph cannot extend itself: {names}")])
    if len(chain) == LONGEST_CHAIN:
        raise GraphError([wrong(f"more than {LONGEST_CHAIN} files extend one another: {names}")])
    whole = read_source(*base, lambda message: wrong(f"{quoted(name)}: {message}"))
    return extend(source, _extended(whole, (*chain, base)))


def _find(ref: str, file: GraphFile) -> GraphFile:
    """That file if there is one, else the shipped graph or machine of that name."""
    name = _name(ref)
    if _is_there(file.path) or name not in (*graph_names(), *_machine_names()):
        return file
    return GraphFile(str(SHIPPED / f"{name}.yaml"), f"{FOLDER}/{name}.yaml")


def _name(ref: str) -> str:
    return ref.removeprefix(f"{FOLDER}/").removesuffix(".yaml")


def is_graph(ref: str) -> bool:
    """Whether there is a file, or a shipped graph, of this name."""
    return _is_there(ref) or _name(ref) in graph_names()


def _is_there(ref: str) -> bool:
    """Anything but a directory: also what cannot be read, so that nothing else is read instead."""
    try:
        return not stat.S_ISDIR(Path(ref).lstat().st_mode)
    except (OSError, ValueError):
        return False


def read_source(ref: str, shown: str = "", wrong: Callable[[str], Problem] | None = None) -> Source:
    """Read a YAML file; raises GraphError for anything but a readable regular file.

    Args:
        shown: how messages call the file, if not by its path.
        wrong: the problem to raise when it cannot be read; by default one of that file.
    """
    name = shown or ref or "''"
    problem = wrong or (lambda message: Problem(name, 0, 0, "file", message, ProblemCode.FILE))
    data = None
    try:
        mode = Path(ref).stat().st_mode
        if stat.S_ISREG(mode):
            with Path(ref).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise GraphError([problem(_why(ref, error))]) from None
    except ValueError:
        raise GraphError([problem("a path cannot hold a NUL character")]) from None
    if data is None:
        pipe = "pipe" if stat.S_ISFIFO(mode) else "device or socket"
        what = "directory" if stat.S_ISDIR(mode) else pipe
        raise GraphError([problem(f"this is a {what}, not a file")])
    return Source(decode(data, shown or ref), shown or ref)


def _why(ref: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        names = graph_names()
        return f"no such file or shipped graph{_close(ref)}; shipped are: {', '.join(names)}"
    if error.errno == errno.ELOOP:
        return "the symbolic link leads back to itself"
    return (error.strerror or str(error)).lower()


def _close(ref: str) -> str:
    """A shipped graph, a machine or a file of the same folder that may have been meant."""
    path = Path(_name(ref))
    near = [file.name for file in Path(ref).parent.glob("*.yaml") if hint(path.name, [file.stem])]
    machine = hint(f"{path.parent.name}/{path.name}", _machine_names())
    return hint(path.name, graph_names()) or machine or hint(f"{path.name}.yaml", near)

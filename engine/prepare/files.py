"""Finding and reading graphs: an existing file wins over a graph that ships with the package."""

import errno
import os
import stat
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from ...ops.registry import OpTable
from ...states.graph.graph import EXTENDS, Program
from ...states.graph.load import base_of, extend, load_program, op_table
from ...states.yaml.source import GraphError, Problem, ProblemCode, Source, hint, quoted, read

PACKAGE = __name__.split(".")[0]
FOLDER = "graphs"
SHIPPED = Path(__file__).parents[2] / FOLDER
RUN_MARK = "specsot_run"  # the key of a run.yaml that no graph has
LONGEST_CHAIN = 8  # files that extend one another
GraphFile = tuple[str, str]  # a file to read, and how messages call it


def is_run_file(source: Source) -> bool:
    return isinstance(source.data, dict) and RUN_MARK in source.data


def graph_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def _machine_names() -> list[str]:
    return sorted(f"machines/{path.stem}" for path in SHIPPED.glob("machines/*.yaml"))


def open_graph(ref: str, sets: Iterable[str] = (), table: OpTable | None = None) -> Program:
    """Read, check and resolve a graph; raises GraphError. ref: a path, or the name of a shipped
    graph (`x`, `x.yaml`, `graphs/x.yaml`). sets: `path=value` changes. table: None reads it."""
    return load_program(open_source(ref), table or op_table(), sets=sets)


def open_source(ref: str) -> Source:
    """The parsed graph file with all that it extends; raises GraphError."""
    file = _find(ref, (ref, ref))
    return _extended(read_source(*file), (file,))


def _extended(source: Source, chain: tuple[GraphFile, ...]) -> Source:
    """A file merged with its base; chain: the files from the first graph to this one."""
    name = base_of(source)
    if name is None:
        return source
    path, shown = (str(Path(place).parent / name) for place in chain[-1])
    base = _find(name, (path, shown))
    wrong = partial(source.problem, (EXTENDS,), code=ProblemCode.EXTENDS)
    names = " > ".join(shown for _, shown in (*chain, base))
    if any(os.path.realpath(base[0]) == os.path.realpath(path) for path, _ in chain):
        raise GraphError([wrong(f"a graph cannot extend itself: {names}")])
    if len(chain) == LONGEST_CHAIN:
        raise GraphError([wrong(f"more than {LONGEST_CHAIN} files extend one another: {names}")])
    whole = read_source(*base, lambda message: wrong(f"{quoted(name)}: {message}"))
    return extend(source, _extended(whole, (*chain, base)))


def _find(ref: str, file: GraphFile) -> GraphFile:
    """That file if there is one, else the shipped graph or machine of that name."""
    name = _name(ref)
    if _is_there(file[0]) or name not in (*graph_names(), *_machine_names()):
        return file
    return str(SHIPPED / f"{name}.yaml"), f"{FOLDER}/{name}.yaml"


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
    """Read a YAML file; raises GraphError for anything but a readable regular file. shown: how
    messages call the file, if not by its path; wrong: the problem to raise."""
    name = shown or ref or "''"
    problem = wrong or (lambda message: Problem(name, "file", message, ProblemCode.FILE))
    try:
        mode = Path(ref).stat().st_mode
        if stat.S_ISREG(mode):
            return Source(read(Path(ref), shown or ref), shown or ref)
        pipe = "pipe" if stat.S_ISFIFO(mode) else "device or socket"
        message = f"this is a {'directory' if stat.S_ISDIR(mode) else pipe}, not a file"
    except GraphError:
        raise
    except ValueError:
        message = "a path cannot hold a NUL character"
    except OSError as error:
        message = (error.strerror or str(error)).lower()
        if error.errno == errno.ELOOP:
            message = "the symbolic link leads back to itself"
        if error.errno == errno.ENOENT:  # name a graph, machine or file that may have been meant
            path = Path(_name(ref))
            files = Path(ref).parent.glob("*.yaml")
            near = [file.name for file in files if hint(path.name, [file.stem])]
            close = hint(path.name, graph_names())
            close = close or hint(f"{path.parent.name}/{path.name}", _machine_names())
            close = close or hint(f"{path.name}.yaml", near)
            shipped = f"shipped are: {', '.join(graph_names())}"
            message = f"no such file or shipped graph{close}; {shipped}"
    raise GraphError([problem(message)])

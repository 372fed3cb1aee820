"""`extends: NAME`: a graph file that is the difference from another one."""

import copy

from ..yaml.source import GraphError, Source
from .graph import EXTENDS, MACHINE
from .schema import check_mapping, check_version, kind_of


def base_of(source: Source) -> str | None:
    """What a file extends; None if it stands alone.

    Raises:
        GraphError: `extends` is no name, or stands beside states.
    """
    if not isinstance(source.data, dict) or EXTENDS not in source.data:
        return None
    name = source.data[EXTENDS]
    why = "a graph that extends another replaces blocks only: states stand in machine files"
    problems = [source.problem((k,), why, key=True) for k in MACHINE if k in source.data]
    if not isinstance(name, str) or not name:
        message = f"must be the name of a graph or the path of a file, not {kind_of(name)}"
        problems.append(source.problem((EXTENDS,), message))
    if problems:
        raise GraphError(problems)
    return str(name)


def extend(own: Source, base: Source) -> Source:
    """The keys of a file, and those of its base that it does not give; each keeps its place.

    Keys are taken as they are: a block of `own` has the defaults of the schema, not the base's.

    Raises:
        GraphError: the base is no mapping, or needs a later version.
    """
    check_mapping(base, "graph")
    check_version(base)
    whole, rest = copy.copy(own), base.data.keys() - own.data.keys()
    whole.data = {k: v for k, v in {**base.data, **own.data}.items() if k != EXTENDS}
    whole.files = {key: base.files.get(key, base.file) for key in rest} | own.files
    whole.keys = {p: at for p, at in base.keys.items() if p[0] in rest} | own.keys
    whole.values = {p: at for p, at in base.values.items() if p[:1] and p[0] in rest} | own.values
    return whole

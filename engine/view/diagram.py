"""Pictures of a graph in text: a Mermaid state diagram, and plain tables."""

import textwrap
from collections.abc import Iterator
from typing import Any

from ...ops.registry import OpEntry, OpTable
from ...states.graph.graph import VOCABULARY, BlendBlock, Graph, Program
from ..shell import aligned

# Mermaid's keywords at the place of a state's name.
KEYWORDS = {"state", "note", "end", "direction", "class", "style", "default", "as", "click"}
MAX_INLINE_LENGTH = 60  # characters of a setting that shares a line with others
WIDTH = 88
PACKAGE = __name__.partition(".")[0] + "."


def mermaid(graph: Graph) -> str:
    """The graph as a Mermaid state diagram; guards are the labels of arrows."""

    def label(name: str) -> str:
        return f"{name}_" if name in KEYWORDS else name

    lines = ["stateDiagram-v2"]
    lines += [f'  state "{n}" as {label(n)}' for n in graph.states if n in KEYWORDS]
    lines += [f"  [*] --> {label(graph.initial)}"]
    for edge in graph.transitions:
        guard = f": {edge.when.replace(':', '.')}" if edge.when else ""  # a colon ends a label
        lines.append(f"  {label(edge.from_)} --> {label(edge.to)}{guard}")
    lines += [f"  {label(n)} --> [*]" for n, state in graph.states.items() if state.final]
    return "\n".join(lines)


def describe_graph(program: Program, *, layers: int = 0) -> str:
    """A graph in words: its blocks, its states, their ops with functions and settings, its
    transitions; if it reuses cached rows, the status of each of `layers` layers (0: unknown)."""
    graph = program.graph
    parts = [f"{graph.name}: {graph.doc.strip()}" if graph.doc else graph.name]
    parts += ["", *aligned(_blocks(graph))]
    if graph.blend is not None:
        parts += ["", *_plans(graph.blend, layers)]
    parts += ["", "states"]
    for name, state in graph.states.items():
        mark = "  (initial)" if name == graph.initial else "  (final)" if state.final else ""
        parts.append(f"  {name}{mark}")
        parts += [f"    {line}" for line in state.doc.split("\n") if line]
        ops = []
        for step in program.steps[name]:
            entry = step.entry
            settings = ", ".join(f"{key}={_brief(value)}" for key, value in step.settings.items())
            module = entry.module.removeprefix(PACKAGE)
            ops.append((entry.name, f"{module}.{entry.function}({settings})", _flow(entry)))
        parts += [f"      {line}" for line in aligned(ops)]
    parts += ["", "transitions (the first whose guard holds)"]
    rows = [(e.from_, f"> {e.to}", f"when {e.when}" if e.when else "") for e in graph.transitions]
    parts += [f"  {line}" for line in aligned(rows)]
    return "\n".join(parts)


def describe_words(table: OpTable) -> str:
    """The vocabulary of graphs: ops, guards, and blackboard keys."""
    lines = ["ops: what they read -> what they write (settings)"]
    for name, entry in sorted(table.ops.items()):
        settings = " ".join(setting.name for setting in entry.settings)
        lines += [f"  {name}: {entry.doc}", f"      {_flow(entry)} ({settings or '-'})"]
    guards = [(f"  {name}", " ".join(e.reads), e.doc) for name, e in sorted(table.guards.items())]
    values = [(f"  {key.name}", str(key.lifetime), key.holds) for key in VOCABULARY]
    lines += ["", *aligned([("guards", "reads", ""), *guards])]
    lines += ["", *aligned([("values", "lives for", ""), *values])]
    if table.faults:
        lines += ["", "not in this list:", *(f"  {fault}" for fault in table.faults)]
    return "\n".join(lines)


def _blocks(graph: Graph) -> Iterator[tuple[str, str]]:
    fold = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    for name in ("layout", "drafter", "skeleton", "blend", "beam", "sampling", "limits"):
        spec = getattr(graph, name)
        if spec is not None:
            shown = [f"{k}={_show(v)}" for k, v in spec.model_dump(exclude_none=True).items()]
            yield name, "  ".join(text for text in shown if len(text) <= MAX_INLINE_LENGTH)
            long = (text for text in shown if len(text) > MAX_INLINE_LENGTH)
            # Folded at blanks; the text after `=` is YAML.
            yield from (("", line) for text in long for line in fold.wrap(text))
    yield "attention", graph.attention


def _plans(blend: BlendBlock, layers: int) -> Iterator[str]:
    if not layers:
        yield "layer plans: as many statuses as the model has layers"
        return
    yield f"layer plans of a model of {layers} layers"
    try:
        plans = blend.plans(layers)
    except ValueError as error:
        yield f"  none: {error}"
        return
    rows = [(name, *(status.name for status in plan)) for name, plan in plans.items()]
    yield from (f"  {line}" for line in aligned(rows))


def _brief(value: Any) -> str:
    """A value that shares a line with others; a long one is shown in full with its block."""
    text = _show(value)
    long = len(text) > MAX_INLINE_LENGTH and isinstance(value, dict | tuple | list)
    return f"[{len(value)} of them]" if long else text


def _flow(entry: OpEntry) -> str:
    flow = f"{' '.join(entry.reads)} -> {' '.join(entry.declared.writes) or '-'}"
    return flow + (f", drops {' '.join(entry.declared.drops)}" if entry.declared.drops else "")


def _show(value: Any, comma: str = ", ") -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + comma.join(_show(v, ",") for v in value) + "]"
    return str(value)

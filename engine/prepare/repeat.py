"""run.yaml: everything that is needed to repeat a run, written and read back."""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter

from ...states.graph.graph import KINDS, Graph
from ...states.text.outline import Outline, render_outline
from ...states.yaml.source import Source, plain_scalar
from ...states.yaml.spec import Int, Spec
from .files import RUN_MARK
from .inputs import Prompt, read_file
from .options import SETTINGS, RunOptions

FILE = "run.yaml"
PROMPTS_FILE = "prompts.jsonl"
TEMPLATE_FILE = "template.yaml"
PROMPT = TypeAdapter(Prompt)
CHANGES: Any = {"by_alias": True, "exclude_defaults": True}


class Provenance(Spec):
    """With what a run was made; a repetition names what is different."""

    model_hash: str = ""
    drafter_hash: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    dtype: str = ""
    weights: str = ""
    device: str = ""
    threads: Int = 0


class RunResult(Spec):
    """How the run ended, and the digest that a repetition must reach."""

    status: str
    digest: str


class RunFile(Spec):
    """The whole file; `graph` is checked as any other graph."""

    specsot_run: Literal[1]
    graph_file: str
    graph: dict[str, Any]
    options: dict[str, Any]
    prompts: Annotated[list[Prompt], Field(min_length=1)] | Literal["prompts.jsonl"]
    outline: str | None = None
    made_with: Provenance = Provenance()
    result: RunResult | None = None


def graph_source(source: Source) -> Source:
    """The graph inside a run.yaml as a source of its own; positions stay those of the file."""
    inner = copy.copy(source)
    inner.data = source.data["graph"]
    inner.marks = {path[1:]: mark for path, mark in source.marks.items() if path[:1] == ("graph",)}
    skeleton = inner.data.get("skeleton") if isinstance(inner.data, dict) else None
    if isinstance(skeleton, dict) and skeleton.get("template") == TEMPLATE_FILE:
        # The run folder holds a copy of the prompt template.
        skeleton["template"] = str(Path(source.file).parent / TEMPLATE_FILE)
    return inner


def prompts_of(run: RunFile, source: Source) -> tuple[Prompt, ...]:
    """Those of the file next to it; a run.yaml of an earlier version holds its prompts itself."""
    if isinstance(run.prompts, str):
        return read_file(Path(source.file).parent / run.prompts).items
    return tuple(run.prompts)


def differences(then: Provenance, now: Provenance) -> Iterator[str]:
    """What is not as it was; one line each."""
    for name in ("model_hash", "drafter_hash", "dtype", "weights", "device", "threads"):
        old, new = (getattr(made, name) for made in (then, now))
        if old and old != new:
            texts = (str(value) for value in (old, new))
            before, after = (f"{t[:12]}..." if len(t) == 64 else t for t in texts)
            yield f"{name.replace('_hash', ' weights')} changed: {before} then, {after} now"
    for name, old in then.versions.items():
        if (new := now.versions.get(name)) != old:
            yield f"version of {name} changed: {old} then, {new} now"


def run_document(
    options: RunOptions, graph: Graph, prompts: Sequence[Prompt], outline: Outline | None
) -> dict[str, Any]:
    """The plain data of a run.yaml, without what is only known later; options: those of a job. The
    writer moves `prompts` into a file of their own: YAML files are read up to a limit."""
    names = [name for name in SETTINGS if name not in ("graph", "prompt")]
    saved = {name: getattr(options, name) for name in names}
    document: dict[str, Any] = {
        RUN_MARK: 1,
        "graph_file": options.graph,
        "options": {name: value for name, value in saved.items() if value is not None},
        "prompts": [_plain(PROMPT.dump_python(p, **CHANGES)) for p in prompts],
        "graph": _plain(graph.model_dump(by_alias=True, exclude_none=True)),
    }
    if outline is not None:
        document["outline"] = render_outline(outline.points) + "\n"
    return document


def _plain(value: Any) -> Any:
    """Tuples to lists, and no empty `with`, all the way down."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v or k != "with"}
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


class _Dumper(yaml.SafeDumper):
    """PyYAML writes YAML 1.1; texts that YAML 1.2 reads as other values get quotes."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = text.isprintable() and isinstance(plain_scalar(text), str)
    block = "\n" in text and text.replace("\n", "").isprintable()
    style = "|" if block else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(document: Mapping[str, Any]) -> str:
    return f"# Repeat this run: specsot run {FILE}\n{_dump(document, flow=False)}"


def graph_yaml(graph: Graph) -> str:
    """A graph file that says everything and extends nothing."""
    document = _plain(graph.model_dump(by_alias=True, exclude_none=True))
    for name, state in graph.states.items():
        state_fields = _plain(state.model_dump(by_alias=True, exclude_defaults=True))
        ops = [call["op"] if len(call) == 1 else call for call in state_fields.get("ops", ())]
        document["states"][name] = {**state_fields, "ops": ops} if ops else state_fields
    for block in KINDS:
        document[block] = {"kind": document[block]["kind"], **document[block]}
    return re.sub(r"^(\w+:)$", r"\n\1", _dump(document, flow=None), flags=re.MULTILINE)


def _dump(document: Mapping[str, Any], flow: bool | None) -> str:
    """flow: None writes collections of scalars in one line, False nothing."""
    style: Any = {"sort_keys": False, "allow_unicode": True, "width": 100}
    return str(yaml.dump(dict(document), Dumper=_Dumper, default_flow_style=flow, **style))


def graph_hash(graph: Graph) -> str:
    """sha256 of the resolved graph, which does not depend on how its file was written."""
    document = _plain(graph.model_dump(by_alias=True))
    return sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

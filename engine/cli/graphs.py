"""`specsot check | show | list | schema | init | explain`: everything about graphs that needs no
model and no torch. Output goes to stdout, problems to stderr."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from textwrap import fill, indent

import typer
from typer import BadParameter

from ...states.graph.graph import Program, json_schema
from ...states.graph.load import op_table
from ...states.yaml.source import GraphError, Problem, Source, hint, number_of
from ..errors import Code, UsageError
from ..prepare.files import FOLDER, PACKAGE, graph_names, open_graph
from ..prepare.job import CONFIG, embedded_folder
from ..prepare.repeat import graph_yaml
from ..shell import aligned, print_json, put, tell_problems
from ..view.diagram import describe_graph, describe_words, mermaid
from .options import JSON as MIRRORED_JSON
from .options import SETS, argument, flag, graph_argument, show_result

JSON = flag("One JSON document instead of text.", "--json")
SCHEMA = "graph.schema.json"
SCHEMAS = {FOLDER: SCHEMA, "machines": f"../{SCHEMA}"}  # by the folder of a graph
EXPLAINED = Path(__file__).with_name("explained.yaml")
WIDTH = 90  # of an explanation


def check(
    graphs: list[str] | None = graph_argument("Paths or shipped names; default: all shipped."),
    sets: list[str] | None = SETS,
    as_json: bool = JSON,
) -> int:
    """Check graphs: every problem with file, line and column."""
    table = op_table()
    good: list[Program] = []
    problems: list[Problem] = []
    for ref in graphs or graph_names():
        try:
            good.append(open_graph(ref, sets or (), table))
        except GraphError as error:
            problems += error.problems
    if as_json:
        print_json(graphs=[p.source.file for p in good], problems=list(map(asdict, problems)))
    else:
        for program in good:
            counts = (
                f"{number_of(len(program.graph.states), 'state')}, {len(program.graph.transitions)}"
            )
            typer.echo(f"{program.source.file}: good ({counts} transitions)")
        tell_problems(problems)
    return Code.GRAPH if problems else Code.OK


def show(
    graph: str = graph_argument("A path or a shipped name.", ..., metavar="GRAPH"),
    full: bool = flag("Instead: the whole graph in one file, without `extends`.", "--full"),
    resolved: bool = flag("Instead: each op with its function and settings.", "--resolved"),
    draw: bool = flag("Instead: a Mermaid state diagram.", "--mermaid"),
    sets: list[str] | None = SETS,
) -> None:
    """Print a graph: its file, or its resolved form."""
    if full + resolved + draw > 1:
        raise BadParameter("--full, --resolved and --mermaid are three ways to print a graph")
    if sets and not (full or resolved or draw):
        raise BadParameter("--set changes no file: with --full, --resolved or --mermaid")
    program = open_graph(graph, sets or ())
    if full:
        text = graph_yaml(program.graph)
    elif resolved:
        config = embedded_folder("target") / "config.json"  # some installations have none
        values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        text = describe_graph(program, layers=values.get("num_hidden_layers", 0))
    else:
        text = mermaid(program.graph) if draw else program.source.text
    print(text.rstrip())


def list_graphs(
    ops: bool = flag("Instead: the ops, guards and values a graph can use.", "--ops"),
    as_json: bool = JSON,
) -> None:
    """List the shipped graphs and their purpose, or the ops for graphs."""
    table = op_table()
    if ops:
        print(describe_words(table))
        return
    docs = {name: open_graph(name, table=table).graph.doc.strip() for name in graph_names()}
    lines = aligned((name, doc.partition("\n")[0]) for name, doc in docs.items())
    show_result(as_json, lines, graphs=docs)


def schema() -> None:
    """The JSON schema of graph files, for editors."""
    print(json.dumps(json_schema(), indent=2))


def init(
    folder: Path = argument("The folder; created if it does not exist.", Path(), metavar="DIR"),
) -> None:
    """Copy the shipped graphs, prompts and settings into a folder, to be changed.

    Editors with a YAML language server complete and check the graphs with the copied schema.
    A graph or a specsot.yaml in the working directory replaces the shipped one. Existing files are
    not overwritten."""
    package = Path(str(files(PACKAGE)))
    sources = sorted(
        p for p in (package / FOLDER).rglob("*") if p.suffix in (".yaml", ".txt", ".jsonl")
    )
    targets = {path: folder / path.relative_to(package) for path in (*sources, package / CONFIG)}
    schema = json.dumps(json_schema(), indent=2) + "\n"
    if there := next(filter(Path.exists, targets.values()), None):
        raise UsageError(f"{there}: is there already; nothing was written")
    try:
        for source, path in targets.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8")
            if source.parent.name in SCHEMAS and source.suffix == ".yaml":
                text = f"# yaml-language-server: $schema={SCHEMAS[source.parent.name]}\n{text}"
            path.write_text(text, encoding="utf-8")
        (folder / FOLDER / SCHEMA).write_text(schema, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror}") from None
    print(f"{len(targets)} files in {folder}: graphs, prompts, {CONFIG}")
    print("try: specsot run graphs/bim_eagle.yaml, then change a word of it")


def explanations() -> dict[str, dict[str, str]]:
    """By code: problems, then exits; explained.yaml describes the keys."""
    pages = Source(EXPLAINED.read_text(encoding="utf-8"), EXPLAINED.name).data
    return {str(code): page for code, page in (pages["problems"] | pages["exits"]).items()}


def explain(
    code: str | None = argument("G202, or an exit code; default: a list.", metavar="CODE"),
    as_json: bool = MIRRORED_JSON,
) -> None:
    """Explain a problem code or an exit code: cause, example, correction.

    Examples: `specsot explain G202`, `specsot explain 4`, `specsot explain`."""
    pages = explanations()
    if code is None:
        titles = {code: page["title"] for code, page in pages.items()}
        show_result(as_json, aligned(titles.items()), codes=titles)
        return
    name = code.upper().strip("[]")
    if name not in pages:
        raise UsageError(f"no code {code!r}{hint(name, pages)}; `specsot explain` lists them")
    if as_json:
        print_json(code=name, **pages[name])
    else:
        put(_page(name, pages[name]))


def _page(code: str, page: Mapping[str, str]) -> str:
    base = page.get("base", "")
    places = {
        "block": f"In a graph with `extends: {base}`",
        "machine": f"In a copy of graphs/machines/{base}.yaml",
        "file": "A whole graph file",
        "own": "As an op of a state, with own_ops.py in the same folder",
        "name": "specsot check",
        "set": f"specsot check {base} --set",
        "template": f"In a copy of the template `{base}`",
        "experiment": "In an experiment's file, `specsot bench`",
    }
    parts = [f"{code}: {page['title']}", fill(page["means"], WIDTH)]
    if page.get("command"):
        parts.append(f"For example:\n{_shown(page['command'])}")
    if "kind" in page:
        wrong = _shown(page["wrong"], page.get("module", ""))
        parts.append(f"{places[page['kind']]}, wrong:\n{wrong}")
        if page["right"] != page["wrong"]:
            parts.append(f"Right:\n{_shown(page['right'])}")
        if page.get("when") == "run":
            parts.append("`specsot check` cannot find it; it appears when a run begins.")
    return "\n\n".join([*parts, fill(page["mend"], WIDTH)]) + "\n"


def _shown(text: str, module: str = "") -> str:
    """An example, and the module of its own ops if it has one."""
    shown = indent(text.rstrip("\n"), "    ")
    return f"{shown}\n\nown_ops.py:\n{_shown(module)}" if module else shown

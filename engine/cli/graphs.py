"""`specsot check | show | list | schema`: everything about graphs that needs no model and no torch.

The functions are typer commands; `main.py` mounts them. Output goes to stdout, problems to stderr.
Exit codes: 0 good, 3 a graph has problems.
"""

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from ...states.graph.graph import json_schema
from ...states.graph.load import op_table
from ...states.graph.program import Program
from ...states.yaml.source import GraphError, Problem
from ..errors import Code, UsageError
from ..prepare.environment import embedded_layers
from ..prepare.files import FOLDER, PACKAGE, graph_names, open_graph
from ..prepare.job import CONFIG
from ..prepare.repeat import graph_yaml
from ..shell import print_json, tell_problems, user_errors
from ..view.diagram import describe_graph, describe_words, lifecycles, mermaid
from .completing import graph_names_of
from .options import Sets

Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]


def check(
    graphs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Paths or shipped names; default: all shipped.", autocompletion=graph_names_of
        ),
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
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
            states = len(program.graph.states)
            ways = len(program.graph.transitions)
            typer.echo(f"{program.source.file}: good ({states} states, {ways} transitions)")
        tell_problems(problems)
    raise typer.Exit(Code.GRAPH if problems else Code.OK)


def show(
    graph: Annotated[
        str | None, typer.Argument(help="A path or a shipped name.", autocompletion=graph_names_of)
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Instead: the whole graph, with all that it extends.")
    ] = False,
    resolved: Annotated[
        bool,
        typer.Option("--resolved", help="Instead: what each op became, with its settings."),
    ] = False,
    draw: Annotated[
        bool, typer.Option("--mermaid", help="Instead: a Mermaid state diagram.")
    ] = False,
    lives: Annotated[
        bool, typer.Option("--lifecycle", help="Instead: the lives of requests and branches.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Print a graph: its file as it is, or what it means."""
    if lives:
        if graph is not None or full or resolved or draw or sets:
            raise typer.BadParameter(
                "--lifecycle is the same for all graphs and takes no other option"
            )
        print(lifecycles())
        return
    if graph is None:
        raise typer.BadParameter("Missing argument 'GRAPH'.")
    if full + resolved + draw > 1:
        raise typer.BadParameter("--full, --resolved and --mermaid are three ways to print a graph")
    if sets and not (full or resolved or draw):
        raise typer.BadParameter("--set changes no file: with --full, --resolved or --mermaid")
    program = _open(graph, sets)
    if full:
        text = graph_yaml(program.graph)
    elif resolved:
        text = describe_graph(program, layers=embedded_layers())
    else:
        text = mermaid(program.graph) if draw else program.source.text
    print(text.rstrip())


def list_graphs(
    ops: Annotated[
        bool, typer.Option("--ops", help="Instead: the ops, guards and values a graph can use.")
    ] = False,
    as_json: Json = False,
) -> None:
    """The shipped graphs and what each is for, or the words that a graph can use."""
    table = op_table()
    if ops:
        print(describe_words(table))
        return
    docs = {name: open_graph(name, table=table).graph.doc.strip() for name in graph_names()}
    if as_json:
        print_json(graphs=docs)
        return
    width = max(map(len, docs))
    for name, doc in docs.items():
        print(f"{name.ljust(width)}  {doc.partition(chr(10))[0]}")


def schema() -> None:
    """The JSON schema of graph files, for editors."""
    print(json.dumps(json_schema(), indent=2))


def _open(ref: str, sets: list[str] | None) -> Program:
    try:
        return open_graph(ref, sets or ())
    except GraphError as error:
        tell_problems(error.problems)
        raise typer.Exit(Code.GRAPH) from None


SCHEMA = "graph.schema.json"
SCHEMAS = {FOLDER: SCHEMA, "machines": f"../{SCHEMA}"}  # by the folder of a graph


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to; made if it is not there.")
    ] = Path(),
) -> None:
    """Copy the shipped graphs, prompts and settings into a folder, to be changed.

    Editors with a YAML language server complete and check the graphs with the copied schema.
    A graph or a specsot.yaml in the working directory replaces the shipped one. Existing files are
    not overwritten.
    """
    with user_errors():
        package = Path(str(files(PACKAGE)))
        sources = sorted(
            p for p in (package / FOLDER).rglob("*") if p.suffix in (".yaml", ".txt", ".jsonl")
        )
        targets = {
            path: folder / path.relative_to(package) for path in (*sources, package / CONFIG)
        }
        schema = json.dumps(json_schema(), indent=2) + "\n"
        there = [path for path in targets.values() if path.exists()]
        if there:
            raise UsageError(f"{there[0]}: is there already; nothing was written")
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

"""`specsot init`: what one changes to make an experiment of one's own, in a folder."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from ...states.graph.graph import json_schema
from ..errors import UsageError
from ..prepare.files import FOLDER, PACKAGE
from ..prepare.job import CONFIG
from ..shell import user_errors

SCHEMA = "graph.schema.json"
SCHEMAS = {FOLDER: SCHEMA, "machines": f"../{SCHEMA}"}  # by the folder of a graph


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to; made if it is not there.")
    ] = Path(),
) -> None:
    """Copy the shipped graphs, prompts and settings into a folder, to be changed.

    Editors with a YAML language server complete and check the graphs by the schema beside them.
    A graph or a specsot.yaml that lies in the working directory wins over the shipped one. Nothing
    that is there already is written over.
    """
    with user_errors():
        package = Path(str(files(PACKAGE)))
        found = sorted(
            p for p in (package / FOLDER).rglob("*") if p.suffix in (".yaml", ".txt", ".jsonl")
        )
        wanted = {path: folder / path.relative_to(package) for path in (*found, package / CONFIG)}
        schema = json.dumps(json_schema(), indent=2) + "\n"
        there = [path for path in wanted.values() if path.exists()]
        if there:
            raise UsageError(f"{there[0]}: is there already; nothing was written")
        try:
            for source, path in wanted.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                text = source.read_text(encoding="utf-8")
                if source.parent.name in SCHEMAS and source.suffix == ".yaml":
                    text = f"# yaml-language-server: $schema={SCHEMAS[source.parent.name]}\n{text}"
                path.write_text(text, encoding="utf-8")
            (folder / FOLDER / SCHEMA).write_text(schema, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{error.filename}: cannot be written: {error.strerror}") from None
    print(f"{len(wanted)} files in {folder}: graphs, prompts, {CONFIG}")
    print("try: specsot run graphs/bim_eagle.yaml, then change a word of it")

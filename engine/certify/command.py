"""`specsot certify`: whether a graph's text is its target's own, and the proof."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...models.files import ModelError
from ..bench.command import ten_prompts
from ..errors import Code, UsageError
from ..prepare.files import graph_names
from ..prepare.inputs import read_file
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..record.run_folder import RunFolder
from ..shell import complain, ended, writer

if TYPE_CHECKING:
    from .report import Certificate

PROMISED = ("float32", "float64")


def certify_command(
    graphs: tuple[str, ...],
    options: RunOptions,
    *,
    quick: bool = False,
    out: Path | None = None,
    every: bool = False,
) -> int:
    """Certify graphs one after another and return the exit code; errors end as one message.

    Args:
        options: of every graph, as of `specsot run`.
        out: where `<graph>.md` and `<graph>.json` go; None prints the page.
        every: all shipped graphs; one whose models are not there is named and left out.
    """
    try:
        return _certify(graphs, options, quick, out, every)
    except (Exception, KeyboardInterrupt) as error:
        return ended(error)


def _certify(
    graphs: tuple[str, ...], options: RunOptions, quick: bool, out: Path | None, every: bool
) -> int:
    if bool(graphs) == every:
        raise UsageError("name the graphs to certify, or give --all")
    jobs = [_prepared(name, options) for name in (graph_names() if every else graphs)]
    folder = None if out is None else _folder(out)
    # Here and not above: a mistyped graph is an error at once, torch takes seconds to import.
    from .certificate import certificate

    certificates: list[Certificate] = []
    code = Code.OK
    for job in jobs:
        try:
            made = certificate(job, options, quick)
        except ModelError as error:
            if not every:
                raise
            complain(f"{job.program.graph.name} is not certified: {error}")
            code = Code.MODEL
            continue
        certificates.append(made)
        _show(made, folder, options.as_json)
    if not all(made.passed for made in certificates):
        code = Code.UNEQUAL
    if options.as_json:
        _print_json(certificates)
    return code


def _prepared(graph: str, options: RunOptions) -> Job:
    """A graph checked, without torch."""
    prompts = read_file(options.prompts or ten_prompts())
    job = prepare(replace(options, graph=graph), prompts=prompts)
    if job.options.dtype not in PROMISED:
        raise UsageError(
            f"--dtype {job.options.dtype}: tokens are promised in {' and '.join(PROMISED)} only"
        )
    own = job.program.graph
    searched = own.skeleton is not None and own.skeleton.documents == "branches"
    if any(prompt.documents for prompt in job.prompts) and (own.blend is not None or searched):
        raise UsageError(
            f"{own.name} reads documents in a way of its own: certify it with prompts without any"
        )
    return job


def _folder(out: Path) -> RunFolder:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: no folder can be made there: {error.strerror or error}") from None
    return RunFolder(out)


def _show(made: "Certificate", folder: RunFolder | None, as_json: bool) -> None:
    from .report import document, page

    if folder is not None:
        folder.write_text(f"{made.graph}.md", page(made))
        folder.write_json(f"{made.graph}.json", document(made))
    elif not as_json:
        writer(sys.stdout)(page(made))
    complain(f"{made.graph}: {made.verdict}")


def _print_json(certificates: "list[Certificate]") -> None:
    from .report import SCHEMA, document

    code = Code.OK if all(made.passed for made in certificates) else Code.UNEQUAL
    documents = [document(made) for made in certificates]
    made = {"schema_version": SCHEMA, "exit_code": int(code), "certificates": documents}
    writer(sys.stdout)(json.dumps(made, indent=2, ensure_ascii=False) + "\n")

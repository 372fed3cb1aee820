"""`specsot certify`: whether a graph's text is its target's own, and the proof."""

from dataclasses import replace
from pathlib import Path

from ...models.files import ModelError
from ..bench.command import ten_prompts
from ..cluster.on_workers import checked
from ..errors import Code, UsageError
from ..prepare.files import graph_names
from ..prepare.inputs import read_file
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..record.run_folder import RunFolder
from ..shell import complain, exit_code, json_text, put

PROMISED = ("float32", "float64")


@exit_code
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
    if bool(graphs) == every:
        raise UsageError("name the graphs to certify, or give --all")
    jobs = [_prepared(name, options) for name in (graph_names() if every else graphs)]
    folder = None if out is None else RunFolder.at(out)
    # Here and not above: a mistyped graph is an error at once, torch takes seconds to import.
    from .certificate import SCHEMA, Certificate, certificate

    certificates: list[Certificate] = []
    for job in jobs:
        name = job.program.graph.name
        try:
            one = certificate(job, options, quick)
        except ModelError as error:
            if not every:
                raise
            complain(f"{name} is not certified: {error}")
            continue
        certificates.append(one)
        if folder is not None:
            folder.write_text(f"{name}.md", one.page())
            folder.write_json(f"{name}.json", one.document())
        elif not options.as_json:
            put(one.page())
        complain(f"{name}: {one.verdict}")
    code = Code.OK if all(one.passed for one in certificates) else Code.UNEQUAL
    if options.as_json:
        documents = [one.document() for one in certificates]
        document = {"schema_version": SCHEMA, "exit_code": code, "certificates": documents}
        put(json_text(document))
    return Code.MODEL if code is Code.OK and len(certificates) < len(jobs) else code


def _prepared(graph: str, options: RunOptions) -> Job:
    """A graph checked, without torch."""
    prompts = read_file(options.prompts or ten_prompts())
    job = prepare(replace(options, graph=graph), prompts=prompts)
    if job.options.dtype not in PROMISED:
        which = " and ".join(PROMISED)
        raise UsageError(f"--dtype {job.options.dtype}: tokens are promised in {which} only")
    own = job.program.graph
    searched = own.skeleton is not None and own.skeleton.documents == "branches"
    if any(prompt.documents for prompt in job.prompts) and (own.blend is not None or searched):
        reason = "reads documents in a way of its own: certify it with prompts without any"
        raise UsageError(f"{own.name} {reason}")
    if job.options.workers is not None:
        checked(job)
    return job

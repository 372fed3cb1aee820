"""`specsot certify`: whether the text of a graph is its target's own, and the proof."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.codes import EXACT, is_exact
from ...models.files import ModelError
from ...states.yaml.source import number_of
from ..errors import Code, UsageError
from ..prepare.files import SHIPPED, graph_names
from ..prepare.inputs import read_file
from ..prepare.job import Job, model_folders, prepare, redact
from ..prepare.options import SESSION, RunOptions, flag_of
from ..prepare.repeat import graph_hash
from ..record.run_folder import RunFolder, write_whole
from ..shell import complain, json_text, markdown_table, print_json, put, working
from ..workers.start import checked_block

if TYPE_CHECKING:
    from .reference import Bench, Check

    Checks = Callable[[Bench], Iterator[Check]]


def certificate(job: Job, options: RunOptions, quick: bool) -> dict[str, Any]:
    """A graph's document (docs/cli.md); raises UsageError, ModelError, GraphError, PromptError."""
    name = job.program.graph.name
    with working(f"{name}: loading models ...") as tell:
        bench = bench_of(job, quick, lambda text: tell(f"{name}: {text}"))
        parts = list(_parts(bench))
        facts = _facts(job, options, quick, len(bench.prompts))
    checks = [check for part in parts for check in part["checks"]]
    ties = sum(int(check["figures"].get("ties", 0)) for check in checks)
    where = " on its blended cache" if any(part["name"] == "blended" for part in parts) else ""
    verdict = f"lossless{where}: all {len(checks)} checks passed, {ties or 'no'} numeric ties"
    if failed := sum(not check["passed"] for check in checks):
        verdict = f"NOT lossless: {failed} of {len(checks)} checks failed"
    graph = job.program.graph
    folded = graph.skeleton is not None and graph.skeleton.merge == "blend"
    notes = {
        "The rules by which drafts are accepted have the target's law, exactly: held by the "
        f"project's tests (tests/laws), specsot {version('specsot')}.": graph.drafter.drafts,
        "The graph accepts drafts by rejection: its text has the target's distribution, and "
        "one seed gives another text with another drafter. For the sampled runs above it "
        "accepted by match.": not graph.sampling.exact,
        "A graph with skip_sample_adjustment is never lossless.": not graph.sampling.lossless,
        "Combined answers follow parts that were computed again (skeleton.merge=plain), "
        "except where a check says that they were folded.": folded,
        "With reused rows the text is compared with plain decoding on the same "
        "blended cache, which is an approximation of the prompt (docs/cacheblend.md); "
        "in all other cases with transformers.": graph.blend is not None,
    }
    return {
        "schema_version": 1,
        "graph": name,
        "passed": not failed,
        "exit_code": int(Code.UNEQUAL if failed else Code.OK),
        "verdict": verdict,
        "quick": quick,
        "numeric_ties": ties,
        **facts,
        "parts": parts,
        "notes": [note for note, holds in notes.items() if holds],
    }


def page(document: Mapping[str, Any]) -> str:
    facts = {"graph": document["resolved"], **document["models"], "versions": document["versions"]}
    lines = [f"# Certificate: {document['graph']}", "", f"**{document['verdict']}**", ""]
    for name in ("command", "dtype", "weights", "device", "threads", "prompts"):
        lines.append(f"- {name}: {document[name]}")
    for name, fact in facts.items():
        lines.append(f"- {name}: {', '.join(f'{key} {value}' for key, value in fact.items())}")
    for part in document["parts"]:
        why = part["not_applicable"]
        lines += ["", f"## {part['title']}", "", *([f"Does not apply: {why}."] if why else [])]
        for check in part["checks"]:
            mark = "passed" if check["passed"] else "**FAILED**"
            lines.append(f"- {mark}: {check['name'].partition('/')[2]}: {check['text']}")
    lines += ["", "## Notes", "", *(f"- {note}" for note in document["notes"] or ["none"])]
    return "\n".join(lines) + "\n"


def with_table(folder: Path) -> str:
    """The README of a folder, which ends with a table of the certificates in it."""
    kinds = ("layout", "drafter", "sampling")
    heads = ("graph", *kinds, "passed", "ties", "tokens", "sampled", "hash", "specsot")
    rows = []
    for file in sorted(folder.glob("*.json")):
        with suppress(ValueError, LookupError, TypeError):  # another kind of file
            document = json.loads(file.read_text(encoding="utf-8"))
            graph = document["resolved"]
            checks = [check for part in document["parts"] for check in part["checks"]]
            row = [f"[{graph['name']}]({file.name})", *(graph[name] for name in kinds)]
            row += [f"{sum(check['passed'] for check in checks)} of {len(checks)}"]
            row += [document["numeric_ties"], checks[0]["figures"]["tokens"]]
            row += [sum(c["figures"]["tokens"] for c in checks if c["name"].endswith("/own"))]
            rows.append([*row, f"`{graph['hash'][:8]}`", document["versions"]["specsot"]])
    lines = markdown_table(heads, rows)
    file = folder / "README.md"
    above = file.read_text("utf-8").partition("| graph |")[0] if file.exists() else "# Certificates"
    return "\n".join([above.rstrip(), "", *lines, ""])


def bench_of(job: Job, quick: bool, tell: Callable[[str], None]) -> "Bench":
    # Local, so that a wrong graph is an error before torch is imported.
    from . import reference

    target, drafter = model_folders(job)
    extent = reference.QUICK if quick else reference.FULL
    transformers = reference.Transformers(target, job.options.device, job.options.weights)
    bench = reference.Bench(job, transformers, drafter, extent, tell=tell)
    bench.side(bench.changed())  # says at once what cannot be loaded
    bench.reference.model(job.options.dtype)
    return bench


def _groups(bench: "Bench") -> "Iterator[tuple[str, str, str | Checks]]":
    from . import texts
    from .gates import gate_checks

    graph = bench.graph
    if graph.beam is not None:
        nothing = "beam search draws nothing and drafts nothing"
        yield "beam", "Beam search", texts.beam_checks
        yield "sampled", "Sampled text", nothing
        yield "rejection", "Accepting drafts", nothing
    else:
        yield "greedy", "Greedy decoding", texts.greedy_checks
        yield "sampled", "Sampled text, one seed and one text", texts.sampled_checks
        why = "drafts are accepted where they match what the target draws, as the text above"
        why = why if graph.drafter.drafts else "nothing is drafted"
        matched = graph.sampling.exact and graph.sampling.lossless
        yield "rejection", "Accepting drafts", why if matched else texts.acceptance_checks
    if graph.blend is not None:
        yield "blended", "Keys and values that are reused", texts.blended_checks
    yield "gates", "Structural gates", gate_checks
    if (workers := bench.job.options.workers) is not None:
        yield "workers", f"On {number_of(workers, 'worker')}", texts.worker_checks


def _parts(bench: "Bench") -> Iterator[dict[str, Any]]:
    name = bench.graph.name
    for group, title, checks_of in _groups(bench):
        why = checks_of if isinstance(checks_of, str) else ""
        part: dict[str, Any] = {"name": group, "title": title, "not_applicable": why, "checks": []}
        for check in () if isinstance(checks_of, str) else checks_of(bench):
            figures = {k: v if abs(v) != inf else "infinite" for k, v in check.figures.items()}
            part["checks"].append({**asdict(check), "figures": figures})  # JSON has no infinity
            if not check.passed:
                complain(f"{name}: {check.name} FAILED: {check.text}")
        complain(f"{name}: {title}: {why or 'done'}")
        yield part


def _facts(job: Job, options: RunOptions, quick: bool, prompts: int) -> dict[str, Any]:
    """What is certified: nothing in it depends on when or where it was made."""
    from ..run.writer import made_with

    graph = job.program.graph
    provenance = made_with(job)
    models = {"target": {"name": redact(job.options.model), "hash": provenance.model_hash}}
    if provenance.drafter_hash is not None:
        name = redact(job.options.drafter_model)
        models["drafter"] = {"name": name, "hash": provenance.drafter_hash}
    # The command that makes this certificate again.
    words = ["specsot", "certify", redact(job.options.graph), *(["--quick"] if quick else [])]
    for name in ("prompts", *SESSION):
        value = getattr(options, name)
        if name != "sets" and value is not None:
            words.append(f"{flag_of(name)} {redact(str(value))}")
    return {
        "command": " ".join([*words, *(f"--set {setting}" for setting in options.sets)]),
        "models": models,
        "dtype": job.options.dtype,
        "weights": job.options.weights,
        "device": job.options.device,
        "threads": provenance.threads,
        "prompts": prompts,
        "versions": provenance.versions,
        "resolved": {
            "name": graph.name,
            "file": redact(job.options.graph),
            "hash": graph_hash(graph),
            "layout": graph.layout.kind,
            "drafter": graph.drafter.kind,
            "sampling": graph.sampling.words(),
            "lossless": graph.sampling.lossless,
        },
    }


def certify_command(
    graphs: tuple[str, ...],
    options: RunOptions,
    *,
    quick: bool = False,
    out: Path | None = None,
    every: bool = False,
) -> int:
    """Certify graphs. out: where `<graph>.json` goes, next to a table of all that are there.
    every: all shipped graphs; one whose models are not there is named and left out."""
    if bool(graphs) == every:
        raise UsageError("name the graphs to certify, or give --all")
    jobs = [prepared_job(name, options) for name in (graph_names() if every else graphs)]
    folder = None if out is None else RunFolder.at(out).path
    documents: list[dict[str, Any]] = []
    for job in jobs:
        name = job.program.graph.name
        try:
            document = certificate(job, options, quick)
        except ModelError as error:
            if not every:
                raise
            complain(f"{name} is not certified: {error}")
            continue
        documents.append(document)
        if folder is not None:
            write_whole(folder / f"{name}.json", json_text(document))
            write_whole(folder / "README.md", with_table(folder))
        if not options.as_json:
            put(page(document))
        complain(f"{name}: {document['verdict']}")
    code = Code.OK if all(document["passed"] for document in documents) else Code.UNEQUAL
    if options.as_json:
        print_json(exit_code=code, certificates=documents)
    return Code.MODEL if code is Code.OK and len(documents) < len(jobs) else code


def prepared_job(graph: str, options: RunOptions) -> Job:
    prompts = read_file(options.prompts or SHIPPED / "prompts" / "ten.txt")
    job = prepare(replace(options, graph=graph), prompts=prompts)
    if not is_exact(job.options.dtype, job.options.weights):
        reason = f"tokens of full weights are promised in {' and '.join(EXACT)} only"
        raise UsageError(f"--dtype {job.options.dtype}: {reason}")
    resolved = job.program.graph
    searched = resolved.skeleton is not None and resolved.skeleton.documents == "branches"
    if any(prompt.documents for prompt in job.prompts) and (resolved.blend is not None or searched):
        reason = "reads documents in a way of its own: certify it with prompts without any"
        raise UsageError(f"{resolved.name} {reason}")
    if job.options.workers is not None:
        checked_block(job)
    return job

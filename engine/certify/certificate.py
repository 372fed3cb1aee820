"""`specsot certify`: whether the text of a graph is its target's own, and the proof."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ...models.files import ModelError
from ...states.graph.graph import Graph
from ..bench.command import ten_prompts
from ..errors import Code, UsageError
from ..prepare.environment import model_folders, redact
from ..prepare.files import graph_names
from ..prepare.inputs import read_file
from ..prepare.job import Job, prepare
from ..prepare.options import SESSION, RunOptions, flag_of
from ..prepare.repeat import graph_hash
from ..record.run_folder import RunFolder
from ..shell import complain, exit_code, json_text, put
from ..terminal import working
from ..workers.start import checked_block

if TYPE_CHECKING:
    from .reference import Bench, Check

SCHEMA = 1
MARKS = {True: "passed", False: "**FAILED**"}


@dataclass(frozen=True, slots=True)
class Part:
    """One group of checks. not_applicable: why there is none; empty if there are some."""

    name: str
    title: str
    not_applicable: str = ""
    checks: "tuple[Check, ...]" = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    """The findings of one graph; `facts` say about what exactly."""

    graph: str
    quick: bool
    facts: dict[str, Any]
    parts: tuple[Part, ...]
    notes: tuple[str, ...]

    @property
    def checks(self) -> "list[Check]":
        return [check for part in self.parts for check in part.checks]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def ties(self) -> int:
        return sum(int(check.figures.get("ties", 0)) for check in self.checks)

    @property
    def verdict(self) -> str:
        count = len(self.checks)
        failed = sum(not check.passed for check in self.checks)
        if failed:
            return f"NOT lossless: {failed} of {count} checks failed"
        where = " on its blended cache" if any(p.name == "blended" for p in self.parts) else ""
        return f"lossless{where}: all {count} checks passed, {self.ties or 'no'} numeric ties"

    def document(self) -> dict[str, Any]:
        """The JSON of a certificate; its keys are documented in docs/cli.md."""
        parts = [asdict(part) for part in self.parts]
        for check in (check for part in parts for check in part["checks"]):
            values = check["figures"].items()  # JSON has no infinity
            check["figures"] = {k: v if abs(v) != inf else "infinite" for k, v in values}
        return {
            "schema_version": SCHEMA,
            "graph": self.graph,
            "passed": self.passed,
            "exit_code": int(Code.OK if self.passed else Code.UNEQUAL),
            "verdict": self.verdict,
            "quick": self.quick,
            "numeric_ties": self.ties,
            **self.facts,
            "parts": parts,
            "notes": list(self.notes),
        }

    def page(self) -> str:
        """The certificate in Markdown."""
        facts = self.facts
        graph = facts["resolved"]
        models = facts["models"]
        verdict = f"**{self.verdict[0].upper()}{self.verdict[1:]}.**"
        lines = [f"# Certificate: {self.graph}", "", verdict]
        if self.quick:
            lines += ["", "Made with `--quick`: the checks of a full certificate, on less."]
        rows = {
            "command": f"`{facts['command']}`",
            "graph": f"{graph['file']} (layout {graph['layout']}, drafter {graph['drafter']}, "
            f"sampling: {graph['sampling']})",
            "graph hash": f"`{graph['hash']}`",
            **{name: f"{one['name']} `{one['hash']}`" for name, one in models.items()},
            "dtype, device, threads": f"{facts['dtype']}, {facts['device']}, {facts['threads']}",
            "prompts": str(facts["prompts"]),
            "versions": ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
        }
        lines += ["", "| | |", "|---|---|", *(f"| {key} | {_cell(rows[key])} |" for key in rows)]
        for part in self.parts:
            lines += ["", f"## {part.title}", ""]
            if part.not_applicable:
                lines += [f"Does not apply: {part.not_applicable}."]
                continue
            lines += ["| check | | found |", "|---|---|---|"]
            for check in part.checks:
                name = check.name.partition("/")[2]
                mark = MARKS[check.passed]
                lines.append(f"| {_cell(name)} | {mark} | {_cell(check.text)} |")
        if self.notes:
            lines += ["", "## Notes", "", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def certificate(job: Job, options: RunOptions, quick: bool) -> Certificate:
    """Everything that was seen of one graph.

    Raises:
        UsageError, ModelError, GraphError, PromptError: as `specsot run` does.
    """
    name = job.program.graph.name
    with working(f"{name}: loading models ...") as tell:
        bench = bench_of(job, quick, lambda text: tell(f"{name}: {text}"))
        parts = tuple(_parts(bench))
        facts = _facts(job, options, quick, len(bench.prompts))
        return Certificate(name, quick, facts, parts, notes=tuple(_notes(job.program.graph)))


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


def _parts(bench: "Bench") -> Iterator[Part]:
    """Each group of checks, or why there is none."""
    from . import texts
    from .drawn import acceptance_checks
    from .gates import gate_checks

    graph = bench.graph
    groups: dict[str, tuple[str, str | Callable[[Bench], Iterator[Check]]]] = {}
    if graph.beam is not None:
        nothing = "beam search draws nothing and drafts nothing"
        groups["beam"] = ("Beam search", texts.beam_checks)
        groups["sampled"] = ("Sampled text", nothing)
        groups["rejection"] = ("Accepting drafts", nothing)
    else:
        groups["greedy"] = ("Greedy decoding", texts.greedy_checks)
        groups["sampled"] = ("Sampled text, one seed and one text", texts.sampled_checks)
        groups["rejection"] = ("Accepting drafts", acceptance_checks)
        if graph.sampling.exact and graph.sampling.lossless:
            why = "drafts are accepted where they match what the target draws, as the text above"
            why = why if graph.drafter.drafts else "nothing is drafted"
            groups["rejection"] = ("Accepting drafts", why)
    if graph.blend is not None:
        groups["blended"] = ("Keys and values that are reused", texts.blended_checks)
    groups["gates"] = ("Structural gates", gate_checks)
    if (workers := bench.job.options.workers) is not None:
        groups["workers"] = (f"On {workers} workers", texts.worker_checks)
    for name, (title, checks_of) in groups.items():
        if isinstance(checks_of, str):
            yield Part(name, title, not_applicable=checks_of)
            continue
        start_time = perf_counter()
        checks = tuple(checks_of(bench))
        failed = [check for check in checks if not check.passed]
        good = f"{len(checks) - len(failed)} of {len(checks)} checks passed"
        complain(f"{graph.name}: {title}: {good} ({perf_counter() - start_time:.0f} s)")
        for check in failed:
            complain(f"{graph.name}: {check.name} FAILED: {check.text}")
        yield Part(name, title, checks=checks)


def _notes(graph: Graph) -> Iterator[str]:
    """Notes on the findings for the reader."""
    if graph.drafter.drafts:
        yield (
            "The rules by which drafts are accepted have the target's law, exactly: held by the "
            f"project's tests (tests/laws), specsot {version('specsot')}."
        )
    if not graph.sampling.exact:
        yield (
            "The graph accepts drafts by rejection: its text has the target's distribution, and "
            "one seed gives another text with another drafter. For the sampled runs above it "
            "accepted by match."
        )
    if not graph.sampling.lossless:
        yield "skip_sample_adjustment is there to be looked at: such a graph is never lossless."
    if graph.skeleton is not None and graph.skeleton.merge == "blend":
        yield (
            "Combined answers stand behind parts that were computed anew (skeleton.merge=plain), "
            "except where a check says that they were folded."
        )
    if graph.blend is not None:
        yield (
            "Where rows are reused, the text is held to plain decoding on the same "
            "blended cache, which is an approximation of the prompt (docs/cacheblend.md); "
            "everywhere else, to transformers."
        )


def _facts(job: Job, options: RunOptions, quick: bool, prompts: int) -> dict[str, Any]:
    """About what a certificate speaks: nothing in it depends on when or where it was made."""
    from ..run.writer import made_with

    graph = job.program.graph
    provenance = made_with(job)
    hashes = {"target": provenance.model_hash, "drafter": provenance.drafter_hash}
    names = {"target": job.options.model, "drafter": job.options.drafter_model}
    # The command that makes this certificate again.
    words = ["specsot", "certify", redact(job.options.graph), *(["--quick"] if quick else [])]
    for name in ("prompts", *SESSION):
        value = getattr(options, name)
        if name != "sets" and value is not None:
            words.append(f"{flag_of(name)} {redact(str(value))}")
    return {
        "command": " ".join([*words, *(f"--set {setting}" for setting in options.sets)]),
        "models": {
            kind: {"name": redact(names[kind]), "hash": value}
            for kind, value in hashes.items()
            if value is not None
        },
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
    jobs = [prepared_job(name, options) for name in (graph_names() if every else graphs)]
    folder = None if out is None else RunFolder.at(out)
    certificates: list[Certificate] = []
    for job in jobs:
        name = job.program.graph.name
        try:
            finding = certificate(job, options, quick)
        except ModelError as error:
            if not every:
                raise
            complain(f"{name} is not certified: {error}")
            continue
        certificates.append(finding)
        if folder is not None:
            folder.write_text(f"{name}.md", finding.page())
            folder.write_json(f"{name}.json", finding.document())
        elif not options.as_json:
            put(finding.page())
        complain(f"{name}: {finding.verdict}")
    code = Code.OK if all(finding.passed for finding in certificates) else Code.UNEQUAL
    if options.as_json:
        documents = [finding.document() for finding in certificates]
        document = {"schema_version": SCHEMA, "exit_code": code, "certificates": documents}
        put(json_text(document))
    return Code.MODEL if code is Code.OK and len(certificates) < len(jobs) else code


def prepared_job(graph: str, options: RunOptions) -> Job:
    """A graph checked, without torch."""
    prompts = read_file(options.prompts or ten_prompts())
    job = prepare(replace(options, graph=graph), prompts=prompts)
    if job.options.dtype not in PROMISED:
        which = " and ".join(PROMISED)
        raise UsageError(f"--dtype {job.options.dtype}: tokens are promised in {which} only")
    resolved = job.program.graph
    searched = resolved.skeleton is not None and resolved.skeleton.documents == "branches"
    if any(prompt.documents for prompt in job.prompts) and (resolved.blend is not None or searched):
        reason = "reads documents in a way of its own: certify it with prompts without any"
        raise UsageError(f"{resolved.name} {reason}")
    if job.options.workers is not None:
        checked_block(job)
    return job

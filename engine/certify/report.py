"""A certificate: everything that was seen of one graph, as data and as a page."""

import hashlib
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from ..errors import Code
from ..prepare.repeat import canonical
from ..prepare.texts import redact
from ..run.writer import made_with
from .workbench import Bench, Check

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One group of checks. not_applicable: why there is none; empty if there are some."""

    name: str
    title: str
    not_applicable: str = ""
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    """The findings of one graph; `facts` say about what exactly."""

    graph: str
    quick: bool
    facts: dict[str, Any]
    parts: tuple[Part, ...]
    notes: tuple[str, ...]

    @property
    def checks(self) -> list[Check]:
        return [check for part in self.parts for check in part.checks]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and not self.failed

    @property
    def code(self) -> Code:
        return Code.OK if self.passed else Code.UNEQUAL

    @property
    def ties(self) -> int:
        return sum(int(check.figures.get("ties", 0)) for check in self.checks)

    @property
    def verdict(self) -> str:
        count = len(self.checks)
        if self.passed:
            ties = "no numeric ties" if not self.ties else f"{self.ties} numeric ties"
            return f"lossless: all {count} checks passed, {ties}"
        return f"NOT lossless: {len(self.failed)} of {count} checks failed"


def facts_of(bench: Bench, command: str) -> dict[str, Any]:
    """About what a certificate speaks: nothing in it depends on when or where it was made."""
    job, graph = bench.job, bench.job.program.graph
    made = made_with(job)
    models = {"target": {"name": redact(job.options.model), "hash": made.model_hash}}
    if made.drafter_hash is not None:
        models["drafter"] = {"name": redact(job.options.drafter_model), "hash": made.drafter_hash}
    return {
        "command": command,
        "graph": {
            "name": graph.name,
            "file": redact(job.options.graph),
            "hash": hashlib.sha256(canonical(graph).encode()).hexdigest(),
            "layout": graph.layout.kind,
            "drafter": graph.drafter.kind,
            "sampling": graph.sampling.words(),
            "lossless": graph.sampling.lossless,
        },
        "models": models,
        "dtype": job.options.dtype,
        "device": job.options.device,
        "threads": job.threads,
        "prompts": len(bench.prompts),
        "versions": made.versions,
    }


def document(certificate: Certificate) -> dict[str, Any]:
    """The JSON of a certificate; its keys are documented in docs/cli.md."""
    parts = [asdict(part) for part in certificate.parts]
    for check in (check for part in parts for check in part["checks"]):
        values = check["figures"].items()  # JSON has no infinity
        check["figures"] = {k: v if abs(v) != inf else "infinite" for k, v in values}
    return {
        "schema_version": SCHEMA,
        "graph": certificate.graph,
        "passed": certificate.passed,
        "exit_code": int(certificate.code),
        "verdict": certificate.verdict,
        "quick": certificate.quick,
        "numeric_ties": certificate.ties,
        **{key: value for key, value in certificate.facts.items() if key != "graph"},
        "resolved": certificate.facts["graph"],
        "parts": parts,
        "notes": list(certificate.notes),
    }


def page(certificate: Certificate) -> str:
    """The certificate in Markdown."""
    facts = certificate.facts
    graph, models = facts["graph"], facts["models"]
    lines = [
        f"# Certificate: {certificate.graph}",
        "",
        f"**{certificate.verdict[0].upper()}{certificate.verdict[1:]}.**",
    ]
    if certificate.quick:
        lines += [
            "",
            "Made with `--quick`: the checks of a full certificate, on less.",
        ]
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
    for part in certificate.parts:
        lines += ["", f"## {part.title}", ""]
        if part.not_applicable:
            lines += [f"Does not apply: {part.not_applicable}."]
            continue
        lines += ["| check | | found |", "|---|---|---|", *map(_row, part.checks)]
    if certificate.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in certificate.notes)]
    return "\n".join(lines) + "\n"


def _row(check: Check) -> str:
    mark = "passed" if check.passed else "**FAILED**"
    return f"| {_cell(check.name.partition('/')[2])} | {mark} | {_cell(check.text)} |"


def _cell(text: str) -> str:
    """A cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")

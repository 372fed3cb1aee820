"""The files of a run folder, written at the start and at the end of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...models.load.weights import model_hash
from ...states.phases.merge import Answer
from ..prepare.job import Job, machine, model_folders, redact, threads_of, versions
from ..prepare.repeat import (
    FILE,
    PROMPTS_FILE,
    TEMPLATE_FILE,
    Provenance,
    graph_hash,
    run_document,
    to_yaml,
    too_long,
)
from ..record.recorder import Recorder
from ..record.report import answers_of, output_digest, outputs, summary_page
from ..record.run_folder import OUTPUTS, RunFolder
from .core import EngineCore, Status
from .scoring import context_segments, contexts

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunOutcome:
    status: Status
    answers: tuple[Answer, ...]
    metrics: dict[str, Any]
    digest: str
    outputs: list[dict[str, Any]]


def made_with(job: Job) -> Provenance:
    """Hashes, versions and settings that can change a run's tokens; raises ModelError."""
    target, drafter = model_folders(job)
    return Provenance(
        model_hash=model_hash(target),
        drafter_hash=model_hash(drafter) if drafter is not None else None,
        versions=versions(),
        dtype=job.options.dtype,
        weights=job.options.weights,
        device=job.options.device,
        threads=threads_of(job),
    )


class RunWriter:
    def __init__(self, folder: RunFolder, job: Job, provenance: Provenance) -> None:
        self.folder = folder
        self.job = job
        self.provenance = provenance
        names = ("graph", "model", "drafter_model")
        shown: dict[str, Any] = {name: redact(getattr(job.options, name)) for name in names}
        self.options = replace(job.options, threads=provenance.threads, **shown)
        self._manifest: dict[str, Any] = {}
        self._document: dict[str, Any] = {}

    def begin(self, environ: Mapping[str, str], stop_ids: Sequence[int]) -> None:
        """manifest.json and run.yaml, before the first step; long prompts and the user's template
        go into files of their own. stop_ids: all token ids that end an answer."""
        job = self.job
        graph = job.program.graph
        options = self.options
        provenance = self.provenance
        # Only the variables of specsot: others can hold secrets.
        variables = {k: redact(v) for k, v in sorted(environ.items()) if k.startswith("SPECSOT_")}
        drafter = {"name": options.drafter_model, "hash": provenance.drafter_hash}
        settings = ["profile", "seed", "dtype", "weights", "device", "threads"]
        settings += ["max_new_tokens", "stop_ids"]
        self._manifest = {
            "schema_version": SCHEMA,
            "status": Status.RUNNING,
            "argv": [redact(word) for word in options.argv],
            "environment": variables,
            "started": _now(),
            "graph": {
                "name": graph.name,
                "file": options.graph,
                "hash": graph_hash(graph),
                "resolved": graph.model_dump(by_alias=True, exclude_none=True),
            },
            "models": {
                "target": {
                    "name": options.model,
                    "hash": provenance.model_hash,
                    "stop_ids": list(stop_ids),
                },
                "drafter": drafter if provenance.drafter_hash else None,
            },
            "versions": provenance.versions,
            **{name: getattr(options, name) for name in settings},
            "requests": len(job.prompts),
            "machine": machine(),
        }
        document = run_document(options, graph, job.prompts, job.outline)
        skeleton = document["graph"].get("skeleton")
        if skeleton is not None and Path(skeleton["template"]).is_file():  # a file of the user
            text = Path(skeleton["template"]).read_text(encoding="utf-8")
            self.folder.write_text(TEMPLATE_FILE, text)
            skeleton["template"] = TEMPLATE_FILE
        if too_long(document):
            self.folder.write_lines(PROMPTS_FILE, document["prompts"])
            document["prompts"] = PROMPTS_FILE
        self._document = {**document, "made_with": provenance.model_dump(exclude_none=True)}
        self._write()

    def _write(self) -> None:
        self.folder.write_json("manifest.json", self._manifest)
        self.folder.write_text(FILE, to_yaml(self._document))

    def end(
        self, core: EngineCore, recorder: Recorder, status: Status, error: BaseException | None
    ) -> RunOutcome:
        recorder.close()
        prompts = core.board["prompts"]
        answers = answers_of(core.requests, prompts)
        metrics = recorder.figures(core.board)
        digest = output_digest(answers)
        context_ids = {
            request.key: {branch.index: ids for branch, ids in contexts(request, prompts)}
            for request in core.requests
        }
        segments = {
            request.key: {b.index: context_segments(b) or None for b in request.branches}
            for request in core.requests
        }
        lines = outputs(answers, recorder.meter, context_ids, segments)
        self.folder.write_lines(OUTPUTS, lines)
        self.folder.write_json("metrics.json", {"status": status, **metrics})
        self._manifest |= {"status": status, "ended": _now(), "digest": digest}
        if error is not None:
            self._manifest["error"] = redact(f"{type(error).__name__}: {error}")
        self._document["result"] = {"status": str(status), "digest": digest}
        self._write()
        graph = self.job.program.graph
        options = self.options
        facts = {
            "status": str(status),
            "graph": f"{graph.name} (layout {graph.layout.kind}, drafter {graph.drafter.kind})",
            "model": options.model,
            "dtype, device, threads": f"{options.dtype}, {options.device}, {options.threads}",
            "seed": str(options.seed),
            "sampling": graph.sampling.words(),
            "digest": digest,
        }
        self.folder.write_text(
            "summary.md", summary_page(f"Run {graph.name}", answers, metrics, facts)
        )
        return RunOutcome(status, answers, metrics, digest, lines)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")

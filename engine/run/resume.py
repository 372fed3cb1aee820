"""`specsot run --resume`: a run that did not reach its end goes on in its own folder, with the
answers that are finished."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...states.phases.merge import ANSWER, Answer
from ..errors import UsageError
from ..prepare.job import Job
from ..prepare.options import RunOptions
from ..prepare.repeat import FILE, TEMPLATE_FILE, Provenance, differences
from ..record.run_folder import MANIFEST, MANIFEST_SETTINGS, OUTPUTS, RunFolder, SavedRun, valid
from .core import Status

UNFINISHED = "unfinished"  # a key of the line of an answer that is not finished
ENDS = ("ended", "digest", "error")  # keys of a manifest that a run gets at its end
RESUMED = (Status.RUNNING, Status.FAILED, Status.INTERRUPTED, Status.TERMINATED)


def reopened(options: RunOptions) -> tuple[RunOptions, RunFolder]:
    """The folder `options.resume`, locked, and the options that repeat its run; raises UsageError
    unless it is the folder of an unfinished run, and nothing is given that changes the run."""
    assert options.resume is not None
    folder = options.resume.resolve() if options.resume.is_symlink() else options.resume
    if options.changes_a_run or options.graph is not None:
        what = "no graph, prompt, model or setting can be given with it"
        raise UsageError(f"--resume continues a run as it was started: {what}")
    for name in (MANIFEST, FILE):
        if not (folder / name).is_file():
            raise UsageError(f"--resume {options.resume}: not a run folder: it has no {name}")
    status = SavedRun(folder).manifest.get("status")
    if status not in RESUMED:
        ended = f"the run is finished ({status})" if status in [*Status] else "not a run folder"
        raise UsageError(f"--resume {options.resume}: {ended}")
    files = RunFolder(folder)
    files.lock()
    return replace(options, graph=str(folder / FILE)), files


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """What an unfinished run has left. lines: of outputs.jsonl, those of finished answers."""

    manifest: Mapping[str, Any]
    lines: Sequence[dict[str, Any]]
    answers: Sequence[Answer]

    @classmethod
    def of(cls, job: Job, folder: Path) -> "EarlierRun":
        """The run of a folder, as `job` repeats it; raises UsageError if its files were changed."""
        run = SavedRun(folder)
        manifest = run.manifest
        questions = {prompt.key: prompt.text for prompt in job.prompts}
        with valid(run):
            described = {
                "graph": job.program.graph.model_dump(by_alias=True, exclude_none=True),
                "requests": len(job.prompts),
                **{n: getattr(job.options, n) for n in MANIFEST_SETTINGS if n != "threads"},
            }
            saved = json.loads(json.dumps(described))
            before = {**manifest, "graph": manifest["graph"]["resolved"]}
            if (folder / TEMPLATE_FILE).is_file():  # a copy, which has another name
                before["graph"]["skeleton"]["template"] = str(folder / TEMPLATE_FILE)
            if changed := [name for name in saved if saved[name] != before.get(name)]:
                what = f"{FILE} and {MANIFEST} have another {', '.join(changed)}"
                raise UsageError(f"--resume {folder}: it was changed: {what}")
            lines = [line for line in run.outputs.values() if not line.get(UNFINISHED)]
            for line in lines:
                if questions.get(line["id"]) != line["question"]:
                    why = f"{OUTPUTS} answers another question {line['id']} than {FILE} has"
                    raise UsageError(f"--resume {folder}: it was changed: {why}")
            return cls(manifest, lines, [answer_from(line) for line in lines])

    def check_weights(self, then: Provenance | None, now: Provenance) -> None:
        """Raise UsageError if the models are not those of the run."""
        assert then is not None
        weights = Provenance(model_hash=then.model_hash, drafter_hash=then.drafter_hash)
        if changed := [*differences(weights, now)]:
            raise UsageError(f"--resume: {'; '.join(changed)}")

    def continued(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Its manifest while it goes on. manifest: of a run that starts now."""
        again = {name: manifest[name] for name in ("started", "argv")} | {"kept": len(self.lines)}
        before = {name: value for name, value in self.manifest.items() if name not in ENDS}
        return {**before, "status": Status.RUNNING, "resumed": [*before.get("resumed", ()), again]}


def answer_from(line: Mapping[str, Any]) -> Answer:
    """The answer of a line of outputs.jsonl; raises KeyError, ValueError."""
    try:
        finish = line["outline_finish_reason"] or ""
        return ANSWER.validate_python({**line, "outline_finish_reason": finish})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

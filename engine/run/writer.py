"""The results of a run: answers as JSON and as text, the digest, the summary page; and the files of
its folder, written at the start, with each answer that is finished, and at the end."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from ...models.load.weights import model_hash
from ...states.machine import Event, Moved
from ...states.phases.merge import Answer, Section, answer
from ...states.request import Request
from ...states.text.prompts import PromptBook
from ...states.yaml.source import number_of
from ..events import OUTLINE, finish_of
from ..prepare import repeat
from ..prepare.job import Job, machine, model_folders, redact, threads_of, versions
from ..record.metrics import NS, Marks, Meter
from ..record.recorder import Recorder
from ..record.run_folder import MANIFEST_SETTINGS, OUTPUTS, RunFolder
from ..shell import markdown_table, printable, shortened
from .core import EngineCore, Status
from .resume import UNFINISHED, EarlierRun
from .scoring import context_segments, contexts

SCHEMA = 1
PROMPT_LENGTH = 80  # characters of the first prompt in the manifest


class RunOutcome(NamedTuple):
    status: Status
    answers: tuple[Answer, ...]
    metrics: dict[str, Any]
    digest: str
    outputs: list[dict[str, Any]]


def made_with(job: Job) -> repeat.Provenance:
    """Hashes, versions and settings that can change a run's tokens; raises ModelError."""
    target, drafter = model_folders(job)
    return repeat.Provenance(
        model_hash=model_hash(target),
        drafter_hash=model_hash(drafter) if drafter is not None else None,
        versions=versions(),
        dtype=job.options.dtype,
        weights=job.options.weights,
        device=job.options.device,
        threads=threads_of(job),
    )


@dataclass
class RunWriter:
    """The files of a run. earlier: what it resumes, if it does. show: is called with each answer of
    a run that is finished, once its line is written."""

    folder: RunFolder
    job: Job
    provenance: repeat.Provenance
    _: KW_ONLY
    earlier: EarlierRun | None
    show: Callable[[Answer], None]

    def __post_init__(self) -> None:
        kept = set() if self.earlier is None else {line["id"] for line in self.earlier.lines}
        self.prompts = [prompt for prompt in self.job.prompts if prompt.key not in kept]
        options = self.job.options
        names = ("graph", "model", "drafter_model")
        shown: dict[str, Any] = {name: redact(getattr(options, name)) for name in names}
        self.options = replace(options, threads=self.provenance.threads, **shown)

    def begin(self, environ: Mapping[str, str], stop_ids: Sequence[int]) -> None:
        """manifest.json and run.yaml, before the first step; the prompts and the user's template go
        into files of their own. stop_ids: all token ids that end an answer."""
        job = self.job
        graph = job.program.graph
        options = self.options
        provenance = self.provenance
        # Only the variables of specsot: others can hold secrets.
        variables = {k: redact(v) for k, v in sorted(environ.items()) if k.startswith("SPECSOT_")}
        drafter = {"name": options.drafter_model, "hash": provenance.drafter_hash}
        target = {"name": options.model, "hash": provenance.model_hash, "stop_ids": list(stop_ids)}
        self._manifest: dict[str, Any] = {
            "schema_version": SCHEMA,
            "status": Status.RUNNING,
            "argv": [redact(word) for word in options.argv],
            "environment": variables,
            "started": _now(),
            "graph": {
                "name": graph.name,
                "file": options.graph,
                "hash": repeat.graph_hash(graph),
                "resolved": graph.model_dump(by_alias=True, exclude_none=True),
            },
            "models": {"target": target, "drafter": drafter if provenance.drafter_hash else None},
            "versions": provenance.versions,
            **{name: getattr(options, name) for name in ("profile", *MANIFEST_SETTINGS)},
            "requests": len(job.prompts),
            "prompt": shortened(job.prompts[0].text, PROMPT_LENGTH),
            "machine": machine(),
        }
        made_with = provenance
        if self.earlier is None:
            self.folder.lock()
        else:
            made_with = job.made_with or provenance
            self._manifest = self.earlier.continued(self._manifest)
        document = repeat.run_document(options, graph, job.prompts, job.outline)
        skeleton = document["graph"].get("skeleton")
        if skeleton is not None and Path(skeleton["template"]).is_file():  # a file of the user
            text = Path(skeleton["template"]).read_text(encoding="utf-8")
            self.folder.write_text(repeat.TEMPLATE_FILE, text)
            skeleton["template"] = repeat.TEMPLATE_FILE
        self.folder.write_lines(repeat.PROMPTS_FILE, document["prompts"])
        document["prompts"] = repeat.PROMPTS_FILE
        self._document = {**document, "made_with": made_with.model_dump(exclude_none=True)}
        self._write()
        for item in self.earlier.answers if self.earlier is not None else ():
            self.show(item)

    def _write(self) -> None:
        """The manifest last: its status says that the other files are complete."""
        self.folder.write_text(repeat.FILE, repeat.to_yaml(self._document))
        self.folder.write_json("manifest.json", self._manifest)

    def answers(self, core: EngineCore, recorder: Recorder) -> Callable[[Event], None]:
        """What listens to a run and writes every answer once it is finished."""
        unwritten = core.requests
        ended = 0
        prompts = core.board["prompts"]

        def listen(event: Event) -> None:
            nonlocal unwritten, ended
            if not isinstance(event, Moved) or core.manager.ended == ended:
                return
            start = perf_counter_ns()
            ended = core.manager.ended
            finished = [request for request in unwritten if request.finished]
            unwritten = [request for request in unwritten if not request.finished]
            answers = answers_of(finished, prompts)
            for line in outputs(answers, finished, prompts, recorder.meter):
                self.folder.append(OUTPUTS, line)
            for item in answers:
                self.show(item)
            recorder.exclude(perf_counter_ns() - start)

        return listen

    def end(
        self, core: EngineCore, recorder: Recorder, status: Status, error: BaseException | None
    ) -> RunOutcome:
        recorder.close()
        prompts = core.board["prompts"]
        answers = answers_of(core.requests, prompts)
        metrics = recorder.figures(core.board)
        lines = outputs(answers, core.requests, prompts, recorder.meter)
        if self.earlier is not None:
            place = {prompt.key: number for number, prompt in enumerate(self.job.prompts)}
            lines = sorted([*self.earlier.lines, *lines], key=lambda line: place[line["id"]])
            both = [*self.earlier.answers, *answers]
            answers = tuple(sorted(both, key=lambda item: place[item.key]))
        digest = output_digest(answers)
        self.folder.write_lines(OUTPUTS, lines)
        self.folder.write_json("metrics.json", {"status": status, **metrics})
        self._manifest |= {"status": status, "ended": _now(), "digest": digest}
        if error is not None:
            self._manifest["error"] = redact(f"{type(error).__name__}: {error}")
        self._document["result"] = {"status": str(status), "digest": digest}
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
        page = summary_page(f"Run {graph.name}", answers, metrics, facts)
        self.folder.write_text("summary.md", page)
        self._write()
        return RunOutcome(status, answers, metrics, digest, outputs=lines)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


# -- documents ------------------------------------------------------------------------------------


def answers_of(requests: Sequence[Request], prompts: PromptBook) -> tuple[Answer, ...]:
    return tuple(answer(request, prompts) for request in requests)


def output_digest(answers: Iterable[Answer]) -> str:
    """sha256 over all generated ids in reading order: equal if and only if the tokens of two runs
    are."""
    lines = []
    for item in answers:
        branches = (item.outline_tokens, *(section.tokens for section in _all(item)))
        lines.append(f"{item.key}:{';'.join(' '.join(map(str, ids)) for ids in branches)}")
    return sha256("\n".join(lines).encode()).hexdigest()


def _all(item: Answer) -> tuple[Section, ...]:
    return item.sections if item.combined is None else (*item.sections, item.combined)


def refusals(answers: Iterable[Answer]) -> list[str]:
    return [
        f"request {a.key}{f', part {s.index + 1}' if s.title else ''} {s.finish}: {s.note}"
        for a in answers
        for s in a.sections
        if s.finish in ("refused", "failed")
    ]


def uncombined(answers: Iterable[Answer]) -> list[str]:
    return [
        f"request {a.key}: the parts are not combined: {a.combined.note}"
        for a in answers
        if a.combined is not None and a.combined.finish == "refused"
    ]


def outputs(
    answers: Sequence[Answer], requests: Sequence[Request], prompts: PromptBook, meter: Meter
) -> list[dict[str, Any]]:
    """The lines of outputs.jsonl; `context_segments` of a combined answer that does not see all of
    its context: [tokens, position, [sees]] each. `unfinished`: a resumed run decodes it again."""
    lines = []
    for item, request in zip(answers, requests, strict=True):
        ids = {branch.index: [*before] for branch, before in contexts(request, prompts)}
        marks = asdict(meter.marks.get(item.key, Marks()))
        line = {
            **item.to_dict(),
            "finish_reason": finish_of(item),
            "outline_finish_reason": item.outline_finish or None,
            "outline_context_ids": ids.get(OUTLINE, []),
            "seconds": {f"to_{k}": None if n is None else n / NS for k, n in marks.items()},
        }
        for part in (*line["parts"], *filter(None, [line["combined"]])):
            part["context_ids"] = ids.get(part["index"], [])
        if item.combined is not None:
            branch = next(b for b in request.branches if b.index == item.combined.index)
            line["combined"]["context_segments"] = context_segments(branch) or None
        lines.append(line if request.finished else {**line, UNFINISHED: True})
    return lines


def answer_text(answers: Sequence[Answer]) -> str:
    if len(answers) == 1:
        return printable(answers[0].text) + "\n"
    return "\n".join(map(titled_text, answers))


def titled_text(item: Answer) -> str:
    """An answer after its question, as one of several."""
    return f"[{printable(item.key, '')}] {printable(item.question, '')}\n\n{printable(item.text)}\n"


def closing_lines(answers: Sequence[Answer], metrics: Mapping[str, Any], status: str) -> list[str]:
    """For stderr at the end of a run."""
    parts = sum(len(a.sections) for a in answers)
    kv = metrics["kv"]["target"]
    length = number_of(metrics["tokens"], "token")
    where = f" in {parts} parts" if parts > 1 else ""
    return [
        f"{status}: {length}{where}, "
        f"{metrics['seconds']['total']:.2f} s, {metrics['tokens_per_second']:.0f} tokens/s",
        f"tokens per target forward {metrics['tokens_per_target_forward']:.2f}, "
        f"tau_step {metrics['tau_step']:.2f}, acceptance {100 * metrics['acceptance_rate']:.0f} %, "
        f"KV peak {kv['peak_slots']}/{kv['capacity_slots']} slots, "
        f"moved {sum(kv['moved_bytes'].values())} bytes, "
        f"overhead {100 * metrics['overhead_share']:.1f} %",
    ]


def summary_page(
    title: str, answers: Sequence[Answer], metrics: Mapping[str, Any], facts: Mapping[str, str]
) -> str:
    """summary.md."""
    states = [
        (name, s["visits"], f"{s['milliseconds']:.1f}", f"{s['milliseconds_per_visit']:.2f}")
        for name, s in metrics["states"].items()
    ]
    sections = [(item.key, section) for item in answers for section in _all(item)]
    parts = [(k, s.index + 1, s.title, len(s.tokens), s.finish, s.note) for k, s in sections]
    tables: tuple[tuple[str, Sequence[str], Iterable[Sequence[Any]]], ...] = (
        (f"# {title}", ("", ""), facts.items()),
        ("## Figures", ("metric", "value"), _figures(metrics)),
        ("## States", ("state", "visits", "ms", "ms per visit"), states),
        ("## Parts", ("request", "part", "title", "tokens", "finish", "note"), parts),
    )
    lines: list[str] = []
    for heading, columns, rows in tables:
        lines += [heading, "", *markdown_table(columns, rows), ""]
    return "\n".join(lines)


def _figures(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    blend = metrics["blend"] or {}
    nested = {"": metrics, "seconds": metrics["seconds"], "host_reads": metrics["host_reads"]}
    nested["blend"] = blend
    nested |= {f"blend.{name}": value for name, value in blend.items() if isinstance(value, dict)}
    nested["prefix_cache"] = metrics["prefix_cache"] or {}
    for name, pool in metrics["kv"].items():
        if pool is not None:
            moved = sum(pool["moved_bytes"].values())
            nested[f"kv.{name}"] = {"peak_bytes": pool["peak_bytes"], "moved_bytes": moved}
    for block, values in nested.items():
        for name, value in values.items():
            if isinstance(value, int | float | list):  # a list has a value for every layer
                yield f"{block}.{name}".lstrip("."), _number(value)


def _number(value: float | list[float]) -> str:
    if isinstance(value, list):
        return " ".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)

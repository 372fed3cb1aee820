"""A run of the command line: driven with its view, saved in any case, and its result printed."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from ...states.phases.merge import Answer
from ...states.yaml.source import number_of
from ..errors import Code, UnequalError
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..record.metrics import drafter_warnings
from ..record.recorder import Recorder, Write
from ..record.run_folder import OUTPUTS, TRACE
from ..record.run_view import scene_of
from ..run import writer
from ..run.core import STATUS_CODES, EngineCore, Pause, Status, StopSignal, delay, drive
from ..run.scoring import probe_blends
from ..run.session import Session, recorded
from ..run.writer import RunOutcome, RunWriter
from ..shell import Writer, complain, deliver, json_text, usable
from ..view.lines import PlainView, rounds_view
from ..view.step import Inspector, LiveStepper, PlainStepper
from ..view.tui import LiveView, leaving_screen

Starts = Callable[[Session, Sequence[Prompt], Write | None], tuple[EngineCore, Recorder]]


class AnswerStream:
    """Writes the answers to several prompts to stdout in the order of the prompts, each once it and
    those before it are finished; none before the end of the run to a terminal, which the live view
    may use, or where one JSON document has all."""

    def __init__(self, job: Job) -> None:
        self.out = Writer(sys.stdout)
        self.written = 0  # characters
        self._waits = job.options.as_json or sys.stdout.isatty() or len(job.prompts) == 1
        self._texts: dict[str, str] = {}
        self._keys = [prompt.key for prompt in reversed(job.prompts)]

    def show(self, item: Answer) -> None:
        self._texts[item.key] = writer.titled_text(item)
        while not self._waits and self._keys and self._keys[-1] in self._texts:
            text = "\n" * bool(self.written) + self._texts.pop(self._keys.pop())
            self.written += len(text)
            self.out(text)


def perform(session: Session, files: RunWriter, starts: Starts = recorded) -> RunOutcome:
    """The run from its first transition to its last file; a failed run is saved as far as it got.
    starts: creates a run of prompts and its recorder."""
    job = files.job
    options = job.options
    folder = files.folder
    console = Console(stderr=True)
    with closing(folder), ExitStack() as stack:
        files.begin(os.environ, session.models.stop_ids)
        trace = partial(folder.append, TRACE)
        run, recorder = starts(session, files.prompts, trace)  # a signal ends the process
        stack.enter_context(leaving_screen(console))
        stop = stack.enter_context(StopSignal())
        recorder.listeners.append(files.answers(run, recorder))
        if options.explain_rounds and not options.quiet:
            view = rounds_view(recorder, run, Writer(sys.stderr), options.explains)
            recorder.listeners.append(view)
        if options.probe_blend:
            probe_blends(run, recorder)
        rounds = job.program.graph.limits.max_rounds
        try:
            with _watched(job, run, recorder, stop=stop, console=console) as pauses:
                pause = (lambda run: all(pause(run) for pause in pauses)) if pauses else None
                status = drive(run, recorder, max_rounds=rounds, stop=stop, pause=pause)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            files.end(run, recorder, Status.INTERRUPTED if stopped else Status.FAILED, error)
            raise
        outcome = files.end(run, recorder, status, None)
        run.close()
        return outcome


@contextmanager
def _watched(
    job: Job, run: EngineCore, recorder: Recorder, *, stop: StopSignal, console: Console
) -> Iterator[list[Pause]]:
    """The live view on a terminal, plain lines elsewhere, nothing under -q; yields what pauses the
    run. A live view has no room for explained rounds; plain steps need no other lines."""
    options = job.options
    lines = options.no_tui or options.explain_rounds or options.workers is not None
    live = not (lines or options.quiet) and usable(console, dict(os.environ))
    pauses: list[Pause] = [delay(options.step_delay, recorder, stop)] if options.step_delay else []
    halts: Any = {}
    if options.step or options.breaks:
        live = live and sys.stdin.isatty()
        halts["inspector"] = Inspector(job.program, recorder, run)
        halts["breaks"] = frozenset(options.breaks)
    if live:
        graph = job.program.graph.model_dump(by_alias=True)
        scene = scene_of(graph, options.model, len(run.requests))
        with LiveView(recorder, scene, console) as view:
            if halts:
                halts |= {"view": view, "stopped": lambda: stop.status is not None}
                pauses.append(LiveStepper(**halts))
            yield pauses
    elif halts:
        yield [*pauses, PlainStepper(**halts, source=sys.stdin, out=Writer(sys.stderr))]
    elif options.quiet:
        yield pauses
    else:
        plain = PlainView(recorder, run, Writer(sys.stderr))
        recorder.listeners.append(plain)
        try:
            yield pauses
        finally:
            plain.announce()


def print_result(files: RunWriter, outcome: RunOutcome, stream: AnswerStream) -> bool:
    """The answer, or a JSON document with all results, to stdout, how the run went to stderr; False
    if stdout does not take the answer, which then is in the run folder or goes to stderr."""
    job = files.job
    folder = files.folder
    threads = files.provenance.threads
    place = "" if folder.faults else str(folder.path / OUTPUTS)
    path = str(folder.path) if folder.exists else None
    text = writer.answer_text(outcome.answers)
    if job.options.as_json:
        document = {"schema_version": 1, "status": str(outcome.status)}
        document |= {"answers": outcome.outputs, "metrics": outcome.metrics}
        text = json_text(document | {"digest": outcome.digest, "run_folder": path})
    elif sys.stdout.isatty():
        console = Console(highlight=False)  # breaks lines between words
        with console.capture() as capture:
            console.print(Text(text), end="")
        text = capture.get()
    delivered = deliver(text, place, "answer", out=stream.out, start=stream.written)
    say = Writer(sys.stderr)
    if not job.options.quiet:
        drafter = job.program.graph.drafter
        where = f"run folder {path}" if path else "no run folder"
        keys = {prompt.key for prompt in files.prompts}
        new = [item for item in outcome.answers if item.key in keys]
        kept = len(job.prompts) - len(keys)
        lines = writer.closing_lines(new, outcome.metrics, str(outcome.status))
        lines[0] += f", {number_of(threads, 'thread')}"
        lines += [f"warning: {line}" for line in drafter_warnings(outcome.metrics, drafter)]
        lines += [f"resumed after {number_of(kept, 'answer')}"] if files.earlier else []
        for line in (*lines, where, f"digest {outcome.digest}"):
            say(f"{line}\n")
    return delivered


def exit_code(job: Job, outcome: RunOutcome) -> int:
    """The exit code of a run that came to some end; raises UnequalError for another digest."""
    if outcome.status is Status.LIMIT:
        most = number_of(job.program.graph.limits.max_rounds, "round")
        complain(f"stopped after {most} (limits.max_rounds); the answer is incomplete")
    if outcome.status is not Status.OK:
        return STATUS_CODES[outcome.status]
    refused = writer.refusals(outcome.answers)
    for line in (*refused, *writer.uncombined(outcome.answers)):
        complain(line)
    digest = outcome.digest
    if not digest.startswith(expected := (job.options.expect_digest or "").lower()):
        raise UnequalError(f"the digest is {digest}, expected was {expected}")
    before = job.result
    if before is not None and before.status == Status.OK and before.digest != digest:
        raise UnequalError(f"the digest is {digest}, the repeated run had {before.digest}")
    return Code.FAILED if refused else Code.OK

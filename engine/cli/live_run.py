"""A run that somebody watches: driven with its view, kept whatever happens."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from rich.console import Console

from ...states.machine import Run
from ...states.trace import Event
from ..prepare.job import Job
from ..prepare.repeat import Provenance
from ..record.kv_trace import trace_pools
from ..record.recorder import Recorder
from ..record.run_folder import RunFolder
from ..record.snapshot import scene_of
from ..run.blend_probe import probe_blends
from ..run.runner import Halt, Status, drive
from ..run.session import Session
from ..run.writer import RunOutcome, RunWriter
from ..shell import writer
from ..terminal import usable
from ..view.plain import PlainView
from ..view.rounds_view import RoundsView
from ..view.stepper import Stepper
from ..view.tui import LiveView


def perform(job: Job, session: Session, made: Provenance, folder: RunFolder) -> RunOutcome:
    """The run from its first transition to its last file; what it made is kept if it fails."""
    with closing(folder):
        files = RunWriter(folder, job, made)
        files.begin(os.environ)
        recorder = Recorder(session.prompts.decode, folder.trace, tuple(job.program.graph.states))
        plain = PlainView(recorder, writer(sys.stderr))
        run = _started(job, session, recorder, plain)
        try:
            status = _drive(job, run, recorder, plain)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            files.end(run, recorder, Status.INTERRUPTED if interrupted else Status.FAILED, error)
            raise
        outcome = files.end(run, recorder, status, None)
        run.close()
        return outcome


def _started(job: Job, session: Session, recorder: Recorder, plain: PlainView) -> Run:
    """The run with everything that listens to it."""
    options, rounds = job.options, RoundsView(recorder, writer(sys.stderr))

    def sink(event: Event) -> None:
        for view in (recorder, plain, rounds):
            view(event)

    run = session.start(job.prompts, sink)
    if options.explain_rounds and not options.quiet:
        rounds.attach(run)
    if options.trace == "kv":
        trace_pools(run.board, recorder.tell)
    if options.probe_blend:
        recorder.meter.probed = probe_blends(run)
    recorder.attach(run)
    return run


def _drive(job: Job, run: Run, recorder: Recorder, plain: PlainView) -> Status:
    rounds = job.program.graph.limits.max_rounds
    stepper = Stepper(job.program, sys.stdin, writer(sys.stderr)) if job.options.step else None
    with Halt() as halt, _view(job, run, recorder, plain):
        return drive(run, recorder, max_rounds=rounds, halt=halt, pause=stepper)


@contextmanager
def _view(job: Job, run: Run, recorder: Recorder, plain: PlainView) -> Iterator[None]:
    """The live view on a terminal, plain lines elsewhere, nothing under -q or --step.

    Explained rounds are lines, and a live view leaves no room for lines.
    """
    console, options = Console(stderr=True), job.options
    silent = options.quiet or options.step
    if not (silent or options.no_tui or options.explain_rounds) and usable(
        console, dict(os.environ)
    ):
        scene = scene_of(job.program.graph, options.model, len(job.prompts))
        with LiveView(recorder, scene, console):
            yield
        return
    if not silent:
        plain.attach(run)
    try:
        yield
    finally:
        plain.look()

"""A run that somebody watches: models loaded, driven with its view, kept whatever happens."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from ...states.machine import Run
from ...states.trace import Event
from ..chunks.cache import CHUNK_BYTES
from ..chunks.store import ChunkStore
from ..prepare.environment import model_folders, set_up_torch
from ..prepare.job import Job
from ..prepare.options import RunOptions
from ..prepare.repeat import Provenance
from ..record.kv_trace import trace_pools
from ..record.recorder import Recorder
from ..record.run_folder import RunFolder
from ..record.snapshot import scene_of
from ..run.api import build
from ..run.blend_probe import probe_blends
from ..run.runner import Halt, Status, drive
from ..run.session import Session
from ..run.writer import RunOutcome, RunWriter, made_with
from ..shell import writer
from ..terminal import usable
from ..view.plain import PlainView
from ..view.rounds_view import RoundsView
from ..view.stepper import Stepper
from ..view.tui import LiveView


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job with its models.

    notes: what the loaders found worth telling.
    """

    session: Session
    made: Provenance
    notes: tuple[str, ...]


def load(job: Job, cache_dir: Path | None = None) -> LoadedJob:
    """Set torch up and load the models; raises UsageError, ModelError, GraphError.

    Args:
        cache_dir: a folder of cached chunks; None keeps them in memory.
    """
    set_up_torch(job.threads, job.config.device)
    target, drafter = model_folders(job)
    session = build(job, target, drafter, _chunks(job, cache_dir))
    found = (session.models.target, session.models.drafter)
    notes = tuple(note for model in found if model is not None for note in model.notes)
    return LoadedJob(session, made_with(job, target, drafter), notes)


def _chunks(job: Job, folder: Path | None) -> ChunkStore | None:
    """The folder's store, if the graph reuses any chunks."""
    if folder is None or job.program.graph.blend is None:
        return None
    return ChunkStore(CHUNK_BYTES, folder, torch.device(job.config.device))


def perform(options: RunOptions, job: Job, loaded: LoadedJob, folder: RunFolder) -> RunOutcome:
    """The run from its first transition to its last file."""
    with folder:
        keeper = RunWriter(folder, job, loaded.made)
        keeper.begin(options, dict(os.environ))
        return _perform(options, job, loaded.session, keeper)


def _perform(options: RunOptions, job: Job, session: Session, keeper: RunWriter) -> RunOutcome:
    """Drive the run with its view; what it made is kept even if it fails."""
    recorder = Recorder(
        session.prompts.decode, keeper.folder.trace, tuple(job.program.graph.states)
    )
    plain = PlainView(recorder, writer(sys.stderr))
    rounds = RoundsView(recorder, writer(sys.stderr))

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
    try:
        status = _drive(options, job, run, recorder, plain)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        keeper.end(run, recorder, Status.INTERRUPTED if interrupted else Status.FAILED, error)
        raise
    outcome = keeper.end(run, recorder, status, None)
    run.close()
    return outcome


def _drive(options: RunOptions, job: Job, run: Run, recorder: Recorder, plain: PlainView) -> Status:
    rounds = job.program.graph.limits.max_rounds
    pause = Stepper(job.program, sys.stdin, writer(sys.stderr)) if options.step else None
    with Halt() as halt, _view(options, job, run, recorder, plain):
        return drive(run, recorder, max_rounds=rounds, halt=halt, pause=pause)


@contextmanager
def _view(
    options: RunOptions, job: Job, run: Run, recorder: Recorder, plain: PlainView
) -> Iterator[None]:
    """The live view on a terminal, plain lines elsewhere, nothing under -q or --step.

    Explained rounds are lines, and a live view leaves no room for lines.
    """
    console = Console(stderr=True)
    wanted = not (options.no_tui or options.quiet or options.step or options.explain_rounds)
    if wanted and usable(console, dict(os.environ)):
        scene = scene_of(job.program.graph, job.config.model, len(job.prompts))
        with LiveView(recorder, scene, console):
            yield
        return
    if not (options.quiet or options.step):
        plain.attach(run)
    try:
        yield
    finally:
        plain.look()

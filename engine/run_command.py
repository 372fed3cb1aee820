"""`specsot run`: prepare, load, drive, keep what was made, and say how it ended."""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from ..states.machine import Run
from ..states.trace import Event
from .api import build
from .errors import Code, UnequalError, code_of, is_ours, message_of
from .job import Job, prepare
from .keeper import Keeper, Outcome, made_with
from .kv_trace import trace_pools
from .options import RunOptions
from .place import model_folders, set_up_torch
from .plain import PlainView
from .recorder import Recorder
from .repeat import Made, differences
from .report import answer_text, closing_lines, refusals
from .run_folder import RunFolder, redact
from .runner import Halt, Status, drive
from .session import Session
from .shell import complain, writer
from .snapshot import scene_of
from .stepper import Stepper
from .tui import LiveView, usable

SCHEMA = 1
CODES = {
    Status.OK: Code.OK,
    Status.FAILED: Code.FAILED,
    Status.LIMIT: Code.FAILED,
    Status.INTERRUPTED: Code.INTERRUPTED,
    Status.TERMINATED: Code.TERMINATED,
}


def run_command(options: RunOptions) -> int:
    """Run and return the exit code; whatever goes wrong ends as one message."""
    folders: list[RunFolder] = []
    try:
        return _run(options, folders)
    except (Exception, KeyboardInterrupt) as error:
        return _fail(error, options, folders)


def _fail(error: BaseException, options: RunOptions, folders: list[RunFolder]) -> int:
    code = code_of(error)
    if isinstance(error, KeyboardInterrupt):
        complain("interrupted")
        return code
    complain(message_of(error))
    if not is_ours(error):
        _keep_traceback(error, options, folders)
    return code


def _keep_traceback(error: BaseException, options: RunOptions, folders: list[RunFolder]) -> None:
    """A fault of the program: where it happened goes into the run folder, not onto the screen."""
    try:
        folder = folders[0] if folders else RunFolder.create(options.runs_dir, "failed")
        text = "".join(traceback.format_exception(error))
        folder.write_text("traceback.txt", redact(text))
        complain(f"this is a fault of specsot; see {folder.path / 'traceback.txt'}")
    except (OSError, ValueError):
        complain("this is a fault of specsot; its traceback could not be written")


def _run(options: RunOptions, folders: list[RunFolder]) -> int:
    job = prepare(options)
    for note in job.notes:
        complain(f"note: {note}")
    set_up_torch(job.threads, job.config.device)
    target, drafter = model_folders(job)
    session, made = build(job, target, drafter), made_with(job, target, drafter)
    _tell_differences(job, made)
    folder = RunFolder.create(options.runs_dir, job.program.graph.name)
    folders.append(folder)
    with folder:
        keeper = Keeper(folder, job, made)
        keeper.begin(options, dict(os.environ))
        outcome = _perform(options, job, session, keeper)
    _hand_over(options, folder, outcome)
    return _verdict(options, job, outcome)


def _tell_differences(job: Job, made: Made) -> None:
    for line in differences(job.made_with, made) if job.made_with is not None else ():
        complain(f"warning: {line}")


def _perform(options: RunOptions, job: Job, session: Session, keeper: Keeper) -> Outcome:
    """Drive the run with its view; what it made is kept even if it fails."""
    recorder = Recorder(
        session.prompts.decode, keeper.folder.trace, tuple(job.program.graph.states)
    )
    plain = PlainView(recorder, writer(sys.stderr))

    def sink(event: Event) -> None:
        recorder(event)
        plain(event)

    run = session.start(job.prompts, sink)
    if options.trace == "kv":
        trace_pools(run.board, keeper.folder.trace)
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
    """The live view on a terminal, plain lines elsewhere, nothing under -q or --step."""
    console = Console(stderr=True)
    wanted = not (options.no_tui or options.quiet or options.step)
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


def _hand_over(options: RunOptions, folder: RunFolder, outcome: Outcome) -> None:
    """The answer to stdout; how the run went to stderr."""
    out, say = writer(sys.stdout), writer(sys.stderr)
    if options.as_json:
        out(json.dumps(document(folder, outcome), indent=2, ensure_ascii=False) + "\n")
    else:
        out(answer_text(outcome.answers))
    if not options.quiet:
        for line in closing_lines(outcome.answers, outcome.metrics, str(outcome.status)):
            say(f"{line}\n")
        say(f"run folder {folder.path}\ndigest {outcome.digest}\n")


def document(folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """The one JSON document of `--json`."""
    return {
        "schema_version": SCHEMA,
        "status": str(outcome.status),
        "answers": outcome.outputs,
        "metrics": outcome.metrics,
        "digest": outcome.digest,
        "run_folder": str(folder.path),
    }


def _verdict(options: RunOptions, job: Job, outcome: Outcome) -> int:
    """The exit code of a run that came to some end.

    Raises:
        UnequalError: its digest is not the one that was asked for.
    """
    if outcome.status is Status.LIMIT:
        most = job.program.graph.limits.max_rounds
        complain(f"stopped after {most} rounds (limits.max_rounds); the answer is incomplete")
    if outcome.status is not Status.OK:
        return CODES[outcome.status]
    refused = refusals(outcome.answers)
    for line in refused:
        complain(line)
    wanted = (options.expect_digest or "").lower()
    if wanted and not outcome.digest.startswith(wanted):
        raise UnequalError(f"the digest is {outcome.digest}, expected was {wanted}")
    before = job.result
    if before is not None and before.status == Status.OK and before.digest != outcome.digest:
        raise UnequalError(f"the digest is {outcome.digest}, the repeated run had {before.digest}")
    return Code.FAILED if refused else Code.OK

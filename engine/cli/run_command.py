"""`specsot run`: check everything, load, perform, hand over. Imports torch only when it must."""

import sys
import traceback
from contextlib import AbstractContextManager, nullcontext

from ..errors import Code, fault_of, is_ours, message_of
from ..prepare.environment import redact
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..prepare.repeat import differences
from ..record.run_folder import RunFolder
from ..shell import complain, ended


def run_command(options: RunOptions) -> int:
    """Run and return the exit code; whatever goes wrong ends as one message."""
    folder: RunFolder | None = None
    try:
        job = prepare(options)
        with _loading(job):
            # Here and not above: a mistyped graph is told at once, torch takes seconds to import.
            from ..run.api import load, notes_of
            from ..run.writer import made_with
            from .live_run import exit_code, perform, print_result

            session, provenance = load(job), made_with(job)
        sampling = job.program.graph.sampling
        lines = [f"note: {note}" for note in (*job.notes, *notes_of(session.models))]
        lines += [] if sampling.lossless else [f"warning: not lossless: {sampling.words()}"]
        if job.made_with is not None:
            lines += [f"warning: {line}" for line in differences(job.made_with, provenance)]
        for line in lines if not options.quiet else ():
            complain(line)
        folder = RunFolder.create(options.runs_dir, job.program.graph.name)
        outcome = perform(job, session, provenance, folder)
        print_result(job, folder, outcome)
        return exit_code(job, outcome)
    except (Exception, KeyboardInterrupt) as error:
        if is_ours(error):
            return ended(error)
        complain(message_of(error))
        _keep_traceback(error, options, folder)
        return Code.FAILED


def _keep_traceback(error: BaseException, options: RunOptions, folder: RunFolder | None) -> None:
    """A fault of the program: where it happened goes into the run folder, not onto the screen."""
    try:
        folder = folder or RunFolder.create(options.runs_dir, "failed")
        text = "".join(traceback.format_exception(error))
        folder.write_text("traceback.txt", redact(text))
        complain(f"this is a fault of {fault_of(error)}; see {folder.path / 'traceback.txt'}")
    except (OSError, ValueError):
        complain(f"this is a fault of {fault_of(error)}; its traceback could not be written")


def _loading(job: Job) -> AbstractContextManager[object]:
    """A sign of life while models load; only where somebody watches."""
    if job.options.quiet or not sys.stderr.isatty():
        return nullcontext()
    from ..terminal import working

    return working(f"loading {job.options.model} for {job.program.graph.name} ...")

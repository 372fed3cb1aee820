"""`specsot run`: check everything, load, perform, hand over. Imports torch only when it must."""

import sys
import traceback
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from ..errors import Code, fault_of, is_told, message_of
from ..prepare.environment import redact
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..prepare.repeat import differences
from ..record.run_folder import BestEffortRunFolder, RunFolder
from ..shell import complain, ended

if TYPE_CHECKING:
    from ..run.session import Session
    from .live_run import Starts

FILE = "traceback.txt"


def run_command(options: RunOptions) -> int:
    """Run and return the exit code; whatever goes wrong ends as one message."""
    folder: BestEffortRunFolder | None = None
    try:
        job = prepare(options)
        with ExitStack() as stack:
            with _loading(job):
                # Imported late: errors in a graph are reported before torch is imported (seconds).
                from ..models import notes_of
                from ..run.writer import made_with
                from .live_run import exit_code, perform, print_result

                job, session, starts = _open_session(job, stack)
                provenance = made_with(job)
            sampling = job.program.graph.sampling
            lines = [f"note: {note}" for note in (*job.notes, *notes_of(session.models))]
            lines += [] if sampling.lossless else [f"warning: not lossless: {sampling.words()}"]
            if job.made_with is not None:
                lines += [f"warning: {line}" for line in differences(job.made_with, provenance)]
            for line in lines if not options.quiet else ():
                complain(line)
            folder = BestEffortRunFolder.create(options.runs_dir, job.program.graph.name)
            outcome = perform(job, session, provenance, folder, starts)
        delivered = print_result(job, folder, outcome, provenance.threads)
        whole = delivered and not folder.faults
        return exit_code(job, outcome) or (Code.OK if whole else Code.FAILED)
    except (Exception, KeyboardInterrupt) as error:
        if is_told(error):
            return ended(error)
        complain(message_of(error))
        where = _save_traceback(error, options, folder)
        complain(f"this is a fault of {fault_of(error)}; {where}")
        return Code.FAILED
    finally:
        for fault in folder.faults if folder is not None else ():
            complain(fault)


def _open_session(job: Job, stack: ExitStack) -> tuple[Job, "Session", "Starts"]:
    """The session of a job and the function that starts its runs, in this process or on workers.

    The stack ends the workers.
    """
    if job.options.workers is not None:
        from ..workers.start import divided, on_workers

        job = divided(job)
        return job, *stack.enter_context(on_workers(job))
    from ..run.runner import recorded
    from ..run.session import load

    return job, load(job), recorded


def _save_traceback(
    error: BaseException, options: RunOptions, folder: BestEffortRunFolder | None
) -> str:
    """Write the traceback to the run folder; returns a message with its path."""
    try:
        there = folder if folder is not None and folder.exists else None
        run_folder: RunFolder = there or RunFolder.create(options.runs_dir, "failed")
        text = "".join(traceback.format_exception(error))
        RunFolder(run_folder.path).write_text(FILE, redact(text))
        return f"see {run_folder.path / FILE}"
    except (OSError, ValueError):
        return "its traceback could not be written"


def _loading(job: Job) -> AbstractContextManager[object]:
    """A spinner while models load, if stderr is a terminal."""
    if job.options.quiet or not sys.stderr.isatty():
        return nullcontext()
    from ..terminal import working

    return working(f"loading {job.options.model} for {job.program.graph.name} ...")

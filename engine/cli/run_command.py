"""`specsot run`: check everything, load, perform, print. Imports torch as late as possible."""

import sys
import traceback
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import Code, fault_of, is_told, message_of
from ..prepare.job import prepare, redact
from ..prepare.options import OPTIONS, RunOptions
from ..prepare.repeat import differences
from ..record.run_folder import RunFolder, write_whole
from ..shell import complain, ended, working
from .options import takes

if TYPE_CHECKING:
    from ..run.resume import EarlierRun

FILE = "traceback.txt"


def run_command(options: RunOptions) -> int:
    """Answer a prompt: outline, parallel branches, speculative decoding, live.

    Examples: `specsot run`, `specsot run graphs/bim_eagle.yaml "How do bees make honey?"`,
    `specsot run eagle --prompts questions.jsonl --json`, `specsot run runs/latest/run.yaml`."""
    folder: RunFolder | None = None
    try:
        earlier: EarlierRun | None = None
        if options.resume is None:
            job = prepare(options)
        else:
            from ..run import resume

            options, folder = resume.reopened(options)
            job = prepare(options)
            earlier = resume.EarlierRun.of(job, folder.path)
        with ExitStack() as stack:
            text = f"loading {job.options.model} for {job.program.graph.name} ..."
            is_seen = not options.quiet and sys.stderr.isatty()
            with working(text) if is_seen else nullcontext():
                # Imported late: errors in a graph are reported before torch is imported (seconds).
                from ..models import notes_of
                from ..run.session import load, recorded
                from ..run.writer import RunWriter, made_with
                from .live_run import AnswerStream, Starts, exit_code, perform, print_result

                if job.options.workers is None:
                    session = load(job)
                    starts: Starts = recorded
                else:
                    from ..workers.start import divided, on_workers

                    job = divided(job)
                    session, starts = stack.enter_context(on_workers(job))
                provenance = made_with(job)
                if earlier is not None:
                    earlier.check_weights(job.made_with, provenance)
            sampling = job.program.graph.sampling
            lines = [f"note: {note}" for note in (*job.notes, *notes_of(session.models))]
            lines += [] if sampling.lossless else [f"warning: not lossless: {sampling.words()}"]
            if job.made_with is not None:
                lines += [f"warning: {line}" for line in differences(job.made_with, provenance)]
            for line in lines if not options.quiet else ():
                complain(line)
            folder = folder or RunFolder.create(options.runs_dir, job.program.graph.name)
            job = replace(job, program=session.program)  # with settings of the drafter's checkpoint
            stream = AnswerStream(job)
            files = RunWriter(folder, job, provenance, earlier=earlier, show=stream.show)
            outcome = perform(session, files, starts)
        whole = print_result(files, outcome, stream) and not folder.faults
        return exit_code(job, outcome) or (Code.OK if whole else Code.FAILED)
    except (Exception, KeyboardInterrupt) as error:
        if is_told(error):
            return ended(error)
        complain(message_of(error))
        where = _save_traceback(error, options, folder)
        complain(f"this is a fault of {fault_of(error)}; {where}")
        return Code.FAILED
    finally:
        if folder is not None:
            folder.close()
            for fault in folder.faults:
                complain(fault)


run = takes(*OPTIONS)(run_command)


def _save_traceback(error: BaseException, options: RunOptions, folder: RunFolder | None) -> str:
    """Write the traceback to the run folder; returns a message with its path."""
    try:
        if folder is None or not folder.exists:
            folder = RunFolder.create(options.runs_dir, "failed")
        write_whole(folder.path / FILE, redact("".join(traceback.format_exception(error))))
        return f"see {folder.path / FILE}"
    except (OSError, ValueError):
        return "its traceback could not be written"

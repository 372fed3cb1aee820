"""`specsot run`: check everything, load, perform, hand over. Imports torch only when it must."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import code_of, is_ours, message_of
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..prepare.repeat import differences
from ..prepare.texts import redact
from ..record.run_folder import RunFolder
from ..shell import complain


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
    with _loading(options, job):
        # Here and not above: a mistyped graph is told at once, torch takes seconds to import.
        from .live_run import load, perform
        from .print_result import print_result, verdict

        loaded = load(job, options.cache_dir)
    _tell(options, [*job.notes, *loaded.notes], "note")
    if not job.program.graph.sampling.lossless:
        _tell(options, [f"not lossless: {job.program.graph.sampling.words()}"], "warning")
    if job.made_with is not None:
        _tell(options, list(differences(job.made_with, loaded.made)), "warning")
    folder = RunFolder.create(options.runs_dir, job.program.graph.name)
    folders.append(folder)
    outcome = perform(options, job, loaded, folder)
    print_result(options, folder, outcome)
    return verdict(options, job, outcome)


def _tell(options: RunOptions, lines: list[str], kind: str) -> None:
    for line in lines if not options.quiet else ():
        complain(f"{kind}: {line}")


@contextmanager
def _loading(options: RunOptions, job: Job) -> Iterator[None]:
    """A sign of life while models load; only where somebody watches."""
    if options.quiet or not sys.stderr.isatty():
        yield
        return
    from ..terminal import working

    with working(f"loading {job.config.model} for {job.program.graph.name} ..."):
        yield

"""What a run says in the end: the answer, how it went, and its exit code."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from ..errors import Code, UnequalError
from ..prepare.job import Job
from ..record.report import answer_text, closing_lines, left_apart, refusals
from ..record.run_folder import RunFolder
from ..run.runner import STATUS_CODES, Status
from ..run.writer import RunOutcome
from ..shell import complain, writer

SCHEMA = 1


def print_result(job: Job, folder: RunFolder, outcome: RunOutcome) -> None:
    """The answer to stdout; how the run went to stderr."""
    out, say = writer(sys.stdout), writer(sys.stderr)
    if job.options.as_json:
        out(json.dumps(document(folder, outcome), indent=2, ensure_ascii=False) + "\n")
    elif sys.stdout.isatty():
        Console(highlight=False).print(Text(answer_text(outcome.answers)), end="")  # whole words
    else:
        out(answer_text(outcome.answers))
    if not job.options.quiet:
        for line in closing_lines(outcome.answers, outcome.metrics, str(outcome.status)):
            say(f"{line}\n")
        say(f"run folder {folder.path}\ndigest {outcome.digest}\n")


def document(folder: RunFolder, outcome: RunOutcome) -> dict[str, Any]:
    """The one JSON document of `--json`."""
    return {
        "schema_version": SCHEMA,
        "status": str(outcome.status),
        "answers": outcome.outputs,
        "metrics": outcome.metrics,
        "digest": outcome.digest,
        "run_folder": str(folder.path),
    }


def exit_code(job: Job, outcome: RunOutcome) -> int:
    """The exit code of a run that came to some end.

    Raises:
        UnequalError: its digest is not the one that was asked for.
    """
    if outcome.status is Status.LIMIT:
        most = job.program.graph.limits.max_rounds
        complain(f"stopped after {most} rounds (limits.max_rounds); the answer is incomplete")
    if outcome.status is not Status.OK:
        return STATUS_CODES[outcome.status]
    refused = refusals(outcome.answers)
    for line in (*refused, *left_apart(outcome.answers)):
        complain(line)
    digest, expected = outcome.digest, (job.options.expect_digest or "").lower()
    if not digest.startswith(expected):
        raise UnequalError(f"the digest is {digest}, expected was {expected}")
    before = job.result
    if before is not None and before.status == Status.OK and before.digest != digest:
        raise UnequalError(f"the digest is {digest}, the repeated run had {before.digest}")
    return Code.FAILED if refused else Code.OK

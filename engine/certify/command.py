"""`specsot certify`: whether a graph's text is its target's own, and the proof."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ...models.files import ModelError
from ..bench.command import ten_prompts
from ..errors import Code, UsageError
from ..prepare.files import graph_names
from ..prepare.inputs import read_file
from ..prepare.job import Job, prepare
from ..prepare.options import SESSION, RunOptions, flag_of
from ..prepare.texts import redact
from ..record.run_folder import RunFolder
from ..shell import complain, ended, writer

if TYPE_CHECKING:
    from .report import Certificate, Part
    from .toys import Check
    from .workbench import Bench

PROMISED = ("float32", "float64")


def certify_command(
    graphs: tuple[str, ...],
    options: RunOptions,
    *,
    quick: bool = False,
    out: Path | None = None,
    every: bool = False,
) -> int:
    """Certify graphs one after another and return the exit code; errors end as one message.

    Args:
        options: of every graph, as of `specsot run`.
        out: where `<graph>.md` and `<graph>.json` go; None prints the page.
        every: all shipped graphs; one whose models are not there is told and left out.
    """
    try:
        return _certify(graphs, options, quick, out, every)
    except (Exception, KeyboardInterrupt) as error:
        return ended(error)


def _certify(
    graphs: tuple[str, ...], options: RunOptions, quick: bool, out: Path | None, every: bool
) -> int:
    if bool(graphs) == every:
        raise UsageError("name the graphs to certify, or give --all")
    jobs = [_prepared(name, options) for name in (graph_names() if every else graphs)]
    folder = None if out is None else _folder(out)
    found: list[Certificate] = []
    missing = False
    for job in jobs:
        try:
            found.append(certificate(job, options, quick))
        except ModelError as error:
            if not every:
                raise
            complain(f"{job.program.graph.name} is not certified: {error}")
            missing = True
            continue
        _hand_over(found[-1], folder, options.as_json)
    if options.as_json:
        _print_json(found)
    if any(not one.passed for one in found):
        return Code.UNEQUAL
    return Code.MODEL if missing else Code.OK


def _prepared(graph: str, options: RunOptions) -> Job:
    """A graph checked, without torch."""
    prompts = read_file(options.prompts or ten_prompts())
    job = prepare(replace(options, graph=graph), prompts=prompts)
    if job.options.dtype not in PROMISED:
        raise UsageError(
            f"--dtype {job.options.dtype}: tokens are promised in {' and '.join(PROMISED)} only"
        )
    own = job.program.graph
    searched = own.skeleton is not None and own.skeleton.documents == "branches"
    if any(prompt.documents for prompt in job.prompts) and (own.blend is not None or searched):
        raise UsageError(
            f"{own.name} reads documents in a way of its own: certify it with prompts without any"
        )
    return job


def _folder(out: Path) -> RunFolder:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: no folder can be made there: {error.strerror or error}") from None
    return RunFolder(out)


def certificate(job: Job, options: RunOptions, quick: bool) -> "Certificate":
    """Everything found out about one graph.

    Raises:
        UsageError, ModelError, GraphError, PromptError: as `specsot run` does.
    """
    from ..terminal import working

    name = job.program.graph.name
    with working(f"{name}: loading models ...") as tell:
        # Here and not above: a mistyped graph is told at once, torch takes seconds to import.
        from .report import Certificate, facts_of

        bench = _bench(job, quick, lambda text: tell(f"{name}: {text}"))
        parts = tuple(_told(name, part) for part in _parts(bench))
        facts = facts_of(bench, command_of(name, job, options, quick))
        return Certificate(name, quick, facts, parts, tuple(_notes(bench)))


def _bench(job: Job, quick: bool, tell: Callable[[str], None]) -> "Bench":
    from ...states.graph.load import op_table
    from ..bench.sides import SharedModels
    from ..prepare.environment import model_folders
    from .reference import Transformers
    from .workbench import FULL, QUICK, Bench

    target, drafter = model_folders(job)
    bench = Bench(
        job,
        target,
        drafter,
        QUICK if quick else FULL,
        SharedModels(),
        Transformers(target, job.options.device),
        op_table(),
        tell,
    )
    bench.side(bench.changed())  # says at once what cannot be loaded
    bench.reference.model(job.options.dtype)
    return bench


def _parts(bench: "Bench") -> Iterator[tuple["Part", float]]:
    """Each group of checks with the seconds that it took."""
    from .beam import beam_checks
    from .gates import gate_checks
    from .greedy import greedy_checks
    from .rejection import rejection_checks
    from .report import Part
    from .sampled import sampled_checks

    def part(name: str, title: str, checks: "Iterator[Check]") -> tuple[Part, float]:
        began = perf_counter()
        return Part(name, title, tuple(checks)), perf_counter() - began

    if bench.job.program.graph.beam is not None:
        yield part("beam", "Beam search", beam_checks(bench))
        for name, title in (("sampled", "Sampled text"), ("rejection", "Accepting drafts")):
            yield Part(name, title, (), "beam search draws nothing and drafts nothing"), 0.0
    else:
        yield part("greedy", "Greedy decoding", greedy_checks(bench))
        yield part("sampled", "Sampled text, one seed and one text", sampled_checks(bench))
        yield part("rejection", "Accepting drafts, on toy models", rejection_checks(bench))
    yield part("gates", "Structural gates", gate_checks(bench))


def _told(graph: str, done: tuple["Part", float]) -> "Part":
    """A line of progress for every part."""
    part, seconds = done
    if part.why_not:
        return part
    failed = [check for check in part.checks if not check.passed]
    good = f"{len(part.checks) - len(failed)} of {len(part.checks)} checks passed"
    complain(f"{graph}: {part.title}: {good} ({seconds:.0f} s)")
    for check in failed:
        complain(f"{graph}: {check.name} FAILED: {check.text}")
    return part


def _notes(bench: "Bench") -> Iterator[str]:
    """What a reader should know beside the findings."""
    graph = bench.job.program.graph
    if graph.sampling.accept == "rejection" and graph.sampling.temperature > 0:
        yield (
            "The graph accepts drafts by rejection: its text has the target's distribution, and "
            "one seed gives another text with another drafter. For the sampled runs above it "
            "accepted by match."
        )
    if not graph.sampling.lossless:
        yield "skip_sample_adjustment is there to be looked at: such a graph is never lossless."
    if graph.skeleton is not None and graph.skeleton.merge == "blend":
        yield (
            "Combined answers stand behind parts that were computed anew (skeleton.merge=plain), "
            "except where a check says that the fold was blended."
        )
    if graph.blend is not None:
        yield (
            "Nothing was reused from cached documents here: with them the reference is plain "
            "decoding on the same blended cache, not this one."
        )


def command_of(graph: str, job: Job, options: RunOptions, quick: bool) -> str:
    """The command that makes this certificate again."""
    names = [name for name in ("prompts", *SESSION) if name != "sets"]
    given = {flag_of(name): getattr(options, name) for name in names}
    words = ["specsot", "certify", redact(job.options.graph)]
    words += ["--quick"] if quick else []
    words += [f"{name} {redact(str(value))}" for name, value in given.items() if value is not None]
    words += [f"--set {one}" for one in options.sets]
    return " ".join(words)


def _hand_over(found: "Certificate", folder: RunFolder | None, as_json: bool) -> None:
    from .report import document, page

    if folder is not None:
        folder.write_text(f"{found.graph}.md", page(found))
        folder.write_json(f"{found.graph}.json", document(found))
    elif not as_json:
        writer(sys.stdout)(page(found))
    complain(f"{found.graph}: {found.verdict}")


def _print_json(found: "list[Certificate]") -> None:
    from .report import SCHEMA, document

    code = Code.OK if all(one.passed for one in found) else Code.UNEQUAL
    made = {
        "schema_version": SCHEMA,
        "exit_code": int(code),
        "certificates": [document(one) for one in found],
    }
    writer(sys.stdout)(json.dumps(made, indent=2, ensure_ascii=False) + "\n")

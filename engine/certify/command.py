"""`specsot certify`: whether a graph's text is its target's own, and the proof."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ...models.files import ModelError
from ..bench.command import ten_prompts
from ..errors import Code, UsageError
from ..prepare.files import graph_names
from ..prepare.inputs import read_file
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..prepare.texts import redact
from ..record.run_folder import RunFolder
from ..shell import complain, ended, writer

if TYPE_CHECKING:
    from .report import Certificate, Part
    from .workbench import Bench, Check

PROMISED = ("float32", "float64")
REPEATED = (
    *("prompts", "model", "drafter_model", "seed", "device", "dtype", "threads"),
    *("max_new_tokens", "outline"),
)
"""Options that a certificate's own command repeats."""


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
    certificates: list[Certificate] = []
    code = Code.OK
    for job in jobs:
        try:
            made = certificate(job, options, quick)
        except ModelError as error:
            if not every:
                raise
            complain(f"{job.program.graph.name} is not certified: {error}")
            code = Code.MODEL
            continue
        certificates.append(made)
        _show(made, folder, options.as_json)
    if not all(made.passed for made in certificates):
        code = Code.UNEQUAL
    if options.as_json:
        _print_json(certificates)
    return code


def _prepared(graph: str, options: RunOptions) -> Job:
    """A graph checked, without torch."""
    prompts = read_file(options.prompts or ten_prompts())
    job = prepare(replace(options, graph=graph), prompts=prompts)
    if job.config.dtype not in PROMISED:
        raise UsageError(
            f"--dtype {job.config.dtype}: tokens are promised in {' and '.join(PROMISED)} only"
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
    """Everything that was seen of one graph.

    Raises:
        UsageError, ModelError, GraphError, PromptError: as `specsot run` does.
    """
    from ..terminal import working

    name = job.program.graph.name
    with working(f"{name}: loading models ...") as tell:
        # Here and not above: a mistyped graph is an error at once, torch takes seconds to import.
        from .report import Certificate, facts_of

        bench = _bench(job, quick, lambda text: tell(f"{name}: {text}"))
        parts = tuple(_parts(bench))
        facts = facts_of(bench, command_of(job, options, quick))
        return Certificate(name, quick, facts, parts, tuple(_notes(bench)))


def _bench(job: Job, quick: bool, tell: Callable[[str], None]) -> "Bench":
    from ...states.graph.load import op_table
    from ..bench.sides import SharedModels
    from ..prepare.environment import model_folders
    from .reference import Transformers
    from .workbench import FULL, QUICK, Bench

    target, drafter = model_folders(job)
    reference = Transformers(target, job.config.device)
    extent = QUICK if quick else FULL
    bench = Bench(job, target, drafter, extent, SharedModels(), reference, op_table(), tell)
    bench.side(bench.changed())  # says at once what cannot be loaded
    bench.reference.model(job.config.dtype)
    return bench


def _parts(bench: "Bench") -> Iterator["Part"]:
    """Each group of checks, or why there is none."""
    from .beam import beam_checks
    from .gates import gate_checks
    from .greedy import greedy_checks
    from .report import Part
    from .sampled import sampled_checks
    from .whole import acceptance_checks

    graph = bench.job.program.graph
    rejection = ("rejection", "Accepting drafts")
    if graph.beam is not None:
        yield _part(bench, "beam", "Beam search", beam_checks)
        for name, title in (("sampled", "Sampled text"), rejection):
            yield Part(name, title, "beam search draws nothing and drafts nothing")
    else:
        yield _part(bench, "greedy", "Greedy decoding", greedy_checks)
        yield _part(bench, "sampled", "Sampled text, one seed and one text", sampled_checks)
        if graph.sampling.exact and graph.sampling.lossless:
            why = "drafts are accepted where they match what the target draws, as the text above"
            yield Part(*rejection, why if graph.drafter.drafts else "nothing is drafted")
        else:
            yield _part(bench, *rejection, acceptance_checks)
    yield _part(bench, "gates", "Structural gates", gate_checks)


def _part(
    bench: "Bench", name: str, title: str, checks_of: "Callable[[Bench], Iterator[Check]]"
) -> "Part":
    """A group of checks, and a line of progress."""
    from .report import Part

    began, graph = perf_counter(), bench.job.program.graph.name
    part = Part(name, title, checks=tuple(checks_of(bench)))
    failed = [check for check in part.checks if not check.passed]
    good = f"{len(part.checks) - len(failed)} of {len(part.checks)} checks passed"
    complain(f"{graph}: {title}: {good} ({perf_counter() - began:.0f} s)")
    for check in failed:
        complain(f"{graph}: {check.name} FAILED: {check.text}")
    return part


def _notes(bench: "Bench") -> Iterator[str]:
    """What a reader should know beside the findings."""
    graph = bench.job.program.graph
    if graph.drafter.drafts:
        yield (
            "The rules by which drafts are accepted have the target's law, exactly: held by the "
            f"project's tests (tests/laws), specsot {version('specsot')}."
        )
    if not graph.sampling.exact:
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


def command_of(job: Job, options: RunOptions, quick: bool) -> str:
    """The command that makes this certificate again."""
    words = ["specsot", "certify", redact(job.graph_file), *(["--quick"] if quick else [])]
    for name in REPEATED:
        value = getattr(options, name)
        if value is not None:
            words.append(f"--{name.replace('_', '-')} {redact(str(value))}")
    return " ".join([*words, *(f"--set {one}" for one in options.sets)])


def _show(made: "Certificate", folder: RunFolder | None, as_json: bool) -> None:
    from .report import document, page

    if folder is not None:
        folder.write_text(f"{made.graph}.md", page(made))
        folder.write_json(f"{made.graph}.json", document(made))
    elif not as_json:
        writer(sys.stdout)(page(made))
    complain(f"{made.graph}: {made.verdict}")


def _print_json(certificates: "list[Certificate]") -> None:
    from .report import SCHEMA, document

    code = Code.OK if all(made.passed for made in certificates) else Code.UNEQUAL
    documents = [document(made) for made in certificates]
    made = {"schema_version": SCHEMA, "exit_code": int(code), "certificates": documents}
    writer(sys.stdout)(json.dumps(made, indent=2, ensure_ascii=False) + "\n")

"""Making one graph's certificate: its checks one after another, and what to know beside them."""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from time import perf_counter

from ...states.graph.load import op_table
from ..bench.sides import SharedModels
from ..prepare.environment import model_folders
from ..prepare.job import Job
from ..prepare.options import SESSION, RunOptions, flag_of
from ..prepare.texts import redact
from ..shell import complain
from ..terminal import working
from . import workbench
from .beam import beam_checks
from .gates import gate_checks
from .greedy import greedy_checks
from .reference import Transformers
from .report import Certificate, Part, facts_of
from .sampled import sampled_checks
from .whole import acceptance_checks
from .workbench import Bench, Check, Tell

"""Options that a certificate's own command repeats."""


def certificate(job: Job, options: RunOptions, quick: bool) -> Certificate:
    """Everything that was seen of one graph.

    Raises:
        UsageError, ModelError, GraphError, PromptError: as `specsot run` does.
    """
    name = job.program.graph.name
    with working(f"{name}: loading models ...") as tell:
        bench = bench_of(job, quick, lambda text: tell(f"{name}: {text}"))
        parts = tuple(_parts(bench))
        facts = facts_of(bench, command_of(job, options, quick))
        return Certificate(name, quick, facts, parts, tuple(_notes(bench)))


def bench_of(job: Job, quick: bool, tell: Tell) -> Bench:
    target, drafter = model_folders(job)
    reference = Transformers(target, job.options.device)
    extent = workbench.QUICK if quick else workbench.FULL
    bench = Bench(job, target, drafter, extent, SharedModels(), reference, op_table(), tell)
    bench.side(bench.changed())  # says at once what cannot be loaded
    bench.reference.model(job.options.dtype)
    return bench


def _parts(bench: Bench) -> Iterator[Part]:
    """Each group of checks, or why there is none."""
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
    bench: Bench, name: str, title: str, checks_of: Callable[[Bench], Iterator[Check]]
) -> Part:
    """A group of checks, and a line of progress."""
    began, graph = perf_counter(), bench.job.program.graph.name
    part = Part(name, title, checks=tuple(checks_of(bench)))
    failed = [check for check in part.checks if not check.passed]
    good = f"{len(part.checks) - len(failed)} of {len(part.checks)} checks passed"
    complain(f"{graph}: {title}: {good} ({perf_counter() - began:.0f} s)")
    for check in failed:
        complain(f"{graph}: {check.name} FAILED: {check.text}")
    return part


def _notes(bench: Bench) -> Iterator[str]:
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
    words = ["specsot", "certify", redact(job.options.graph), *(["--quick"] if quick else [])]
    for name in ("prompts", *SESSION):
        value = getattr(options, name)
        if name != "sets" and value is not None:
            words.append(f"{flag_of(name)} {redact(str(value))}")
    return " ".join([*words, *(f"--set {one}" for one in options.sets)])

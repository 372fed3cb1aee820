"""The part of `specsot doctor` that decodes: equal answers where they must be, and the overhead."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from ..prepare.job import EMBEDDED
from ..record.metrics import Meter
from ..record.report import answers_of, output_digest
from ..record.run_folder import RunFolder
from ..run.api import Prompt, open_session
from ..run.runner import perform
from ..run.session import Session

QUESTION = "Explain how volcanoes work."
GRAPHS = ("autoregressive", "eagle", "bim_plain", "bim_eagle")
EQUAL = (("autoregressive", "eagle"), ("bim_plain", "bim_eagle"))
TOKENS = 32


@dataclass(frozen=True, slots=True)
class SelfTestRun:
    """One graph of the self-test."""

    graph: str
    digest: str
    tokens: int
    seconds: float
    tau_step: float
    load_seconds: float


def try_graphs(threads: int | None, max_new_tokens: int = TOKENS) -> Iterator[SelfTestRun]:
    """Answer one question with every shipped graph on the embedded models."""
    for graph in GRAPHS:
        start_time = perf_counter()
        session = _session(graph, threads, max_new_tokens)
        load_seconds = perf_counter() - start_time
        run, recorder, _ = perform(session, [Prompt("1", QUESTION)])
        digest = output_digest(answers_of(run.board["branches"].requests, run.board["prompts"]))
        meter = recorder.meter
        yield SelfTestRun(graph, digest, meter.tokens, meter.seconds, meter.tau_step, load_seconds)
        run.close()


def _session(graph: str, threads: int | None, budget: int | None) -> Session:
    return open_session(
        graph, model=EMBEDDED, drafter_model=EMBEDDED, threads=threads, max_new_tokens=budget
    )


def unequal(runs: Sequence[SelfTestRun]) -> list[str]:
    """Pairs of graphs whose answers differ though they must not."""
    digests = {run.graph: run.digest for run in runs}
    pairs = [(a, b) for a, b in EQUAL if a in digests and b in digests]
    return [f"{a} and {b} give different tokens" for a, b in pairs if digests[a] != digests[b]]


def measure_overhead(threads: int | None, rounds: int) -> Meter:
    """The sums of at least `rounds` rounds, with the trace written as in `specsot run`."""
    session = _session("bim_eagle", threads, None)
    total = Meter()
    with TemporaryDirectory() as folder, closing(RunFolder(Path(folder))) as files:
        while total.rounds < rounds:
            run, recorder, _ = perform(session, [Prompt("1", QUESTION)], write=files.trace)
            run.close()
            total.add(recorder.meter)
            if not recorder.meter.rounds:
                break  # or it would go on for ever
    return total

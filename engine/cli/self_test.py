"""The part of `specsot doctor` that decodes: equal answers where they must be, and the overhead."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from ..record.metrics import Meter
from ..record.report import answers_of, output_digest
from ..record.run_folder import RunFolder
from ..run.api import Prompt, open_session
from ..run.runner import perform

QUESTION = "Explain how volcanoes work."
GRAPHS = ("autoregressive", "eagle", "bim_plain", "bim_eagle")
EQUAL = (("autoregressive", "eagle"), ("bim_plain", "bim_eagle"))
TOKENS = 32
ROUNDS = 200


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
        began = perf_counter()
        session = open_session(
            graph,
            model="embedded",
            drafter_model="embedded",
            threads=threads,
            max_new_tokens=max_new_tokens,
        )
        loaded = perf_counter() - began
        run, recorder, _ = perform(session, [Prompt("1", QUESTION)])
        answers = answers_of(run.board["branches"].requests, run.board["prompts"])
        meter = recorder.meter
        yield SelfTestRun(
            graph, output_digest(answers), meter.tokens, meter.seconds, meter.tau_step, loaded
        )
        run.close()


def unequal(runs: Sequence[SelfTestRun]) -> list[str]:
    """Pairs of graphs whose answers differ though they must not."""
    digests = {run.graph: run.digest for run in runs}
    pairs = [(a, b) for a, b in EQUAL if a in digests and b in digests]
    return [f"{a} and {b} give different tokens" for a, b in pairs if digests[a] != digests[b]]


def measure_overhead(threads: int | None, rounds: int = ROUNDS, graph: str = "bim_eagle") -> Meter:
    """Runs until there were that many rounds, with the trace written as in `specsot run`.

    Returns:
        A meter with the sums: wall time of the runs, and time inside ops.
    """
    session = open_session(graph, model="embedded", drafter_model="embedded", threads=threads)
    total = Meter()
    with TemporaryDirectory() as folder, closing(RunFolder(Path(folder))) as files:
        while total.rounds < rounds:
            run, recorder, _ = perform(session, [Prompt("1", QUESTION)], write=files.trace)
            run.close()
            total.add(recorder.meter)
            if not recorder.meter.rounds:
                break  # or it would go on for ever
    return total

"""The program from Python: a session from a graph, runs from a session.

from specsot.engine.run.api import Prompt, Recorder, open_session, token_digest

session = open_session("bim_eagle", sets=["drafter.nodes=6"])
run = session.start([Prompt("1", "How do bees make honey?")], print)
while not run.finished:
    run.advance()                  # run.state, run.board["branches"], ...
print(run.board["answers"][0].text, token_digest(run.board["answers"]))
"""

from collections.abc import Iterable
from pathlib import Path

from ..chunks.store import ChunkStore
from ..models import Models, load_models
from ..prepare.environment import model_folders, set_up_torch
from ..prepare.inputs import Prompt
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions
from ..record.recorder import Recorder
from ..record.report import output_digest as token_digest
from .session import Session

__all__ = ["Prompt", "Recorder", "Session", "build", "open_session", "token_digest"]


def open_session(
    graph: str = "bim_eagle",
    *,
    sets: Iterable[str] = (),
    model: str | None = None,
    drafter_model: str | None = None,
    seed: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    max_new_tokens: int | None = None,
    outline: Path | None = None,
) -> Session:
    """A checked graph with its models loaded; arguments are those of `specsot run`.

    None takes what specsot.yaml says. Sets the number of torch threads of the process.

    Raises:
        GraphError, ModelError, UsageError, OutlineError: what cannot be used, and where.
    """
    options = RunOptions(
        graph=graph,
        model=model,
        drafter_model=drafter_model,
        seed=seed,
        device=device,
        dtype=dtype,
        threads=threads,
        max_new_tokens=max_new_tokens,
        outline=outline,
        sets=tuple(sets),
    )
    job = prepare(options)
    set_up_torch(job.threads, job.config.device)
    return build(job, *model_folders(job))


def build(
    job: Job, target: Path, drafter: Path | None, chunks: ChunkStore | None = None
) -> Session:
    """Load a job's models and tie them to its graph; chunks as in `Session`."""
    config = job.config
    kind = job.program.graph.drafter.kind
    models = load_models(target, drafter, kind, device=config.device, dtype=config.dtype)
    return tie(job, models, chunks)


def tie(job: Job, models: Models, chunks: ChunkStore | None = None) -> Session:
    """A job's graph with models that are loaded already."""
    return Session(
        job.program,
        models,
        seed=job.config.seed,
        max_new_tokens=job.config.max_new_tokens,
        outline=job.outline,
        chunks=chunks,
    )

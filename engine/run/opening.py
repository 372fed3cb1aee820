"""A session from options: torch set up, models loaded and tied to the graph."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import ParamSpec, TypedDict

import torch

from ...models.files import ModelError
from ..chunks.store import CHUNK_BYTES, ChunkStore
from ..errors import UsageError
from ..models import Models, assumed, load_models
from ..prepare.environment import model_folders, set_up_torch, threads_of
from ..prepare.job import Job, prepare
from ..prepare.options import RunOptions, SessionOptions
from .session import Session

P = ParamSpec("P")


def _opener(kind: Callable[P, SessionOptions]) -> Callable[P, Session]:
    """`open_session`, which takes options one by one as their class does."""

    def open_session(*args: P.args, **kwargs: P.kwargs) -> Session:
        """A checked graph with its models loaded; arguments are the options of `specsot run`.

        What is not given is as specsot.yaml says. Sets the number of torch threads of the process.

        Raises:
            GraphError, ModelError, UsageError, OutlineError: what cannot be used, and where.
        """
        return load(prepare(RunOptions(**asdict(kind(*args, **kwargs)))))

    open_session.__signature__ = signature(kind)  # type: ignore[attr-defined]
    return open_session


open_session = _opener(SessionOptions)


class EngineOptions(TypedDict, total=False):
    """The options of `open_session`, but for the graph; a test holds the two together."""

    profile: str | None
    model: str
    drafter_model: str
    seed: int
    device: str
    dtype: str
    weights: str
    threads: int | None
    max_new_tokens: int | None
    stop_ids: Sequence[int] | None
    outline: Path | None
    sets: Sequence[str]


def opened(graph: str | None, options: EngineOptions) -> Session:
    """`open_session` for a graph that may be left to specsot.yaml."""
    return open_session(**options) if graph is None else open_session(graph, **options)


def load(job: Job, *, packed: bool = True, part: tuple[int, int] = (0, 1)) -> Session:
    """Set torch up, load a job's models and tie them to its graph.

    Args:
        packed, part: as for `load_models`.

    Raises:
        UsageError, ModelError, GraphError: what cannot be used, and where.
    """
    set_up_torch(threads_of(job), job.options.device)
    target, drafter = model_folders(job)
    kind = job.program.graph.drafter.kind
    options = job.options
    place = {"device": options.device, "dtype": options.dtype, "weights": options.weights}
    scan = not options.skip_scan
    models = load_models(target, drafter, kind, **place, scan=scan, packed=packed, part=part)
    if options.strict and (found := assumed(models)):
        raise ModelError(target, f"--strict: {'; '.join(found)}")
    return tie(job, models)


def tie(job: Job, models: Models) -> Session:
    """A job's graph with models that are loaded already; raises UsageError, ModelError."""
    options = job.options
    folder = job.options.cache_dir
    chunks = None
    if more := options.stop_ids:
        if max(more) >= models.target.vocab_size:
            size = models.target.vocab_size
            raise UsageError(f"--stop-id {max(more)}: the model has {size} tokens")
        models = replace(models, stop_ids=tuple(sorted({*models.stop_ids, *more})))
    if folder is not None and job.program.graph.blend is not None:
        chunks = ChunkStore(CHUNK_BYTES, folder, torch.device(options.device))
    return Session(
        job.program,
        models,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        outline=job.outline,
        chunks=chunks,
    )

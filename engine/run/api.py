"""The program from Python: sessions, engines, and answers in one line."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models.load.weights import model_hash
from ...states.phases.merge import Answer
from ...states.prompt_builder import chunks_of
from ...states.text.tokens import PromptTokens
from ..chunks.files import ChunkFiles, ChunkInfo
from ..chunks.store import ChunkLibrary, ChunkStore
from ..errors import UsageError
from ..events import (
    AnswerReady,
    BranchFinished,
    BranchOpened,
    OutlineRead,
    PromptReused,
    StreamEvent,
    TextWritten,
)
from ..models import notes_of
from ..prepare.inputs import Prompt, read_documents
from ..prepare.job import model_folders, prepare
from ..prepare.options import RunOptions
from ..record.recorder import Recorder
from .engine import Engine, EngineError, Handle
from .session import Session, load, open_session, perform, tie
from .writer import answers_of
from .writer import output_digest as token_digest

__all__ = ["Answer", "Generated", "Prompt", "Recorder", "Session", "generate", "open_session"]
__all__ += ["BranchOpened", "Engine", "EngineError", "Handle", "OutlineRead", "StreamEvent"]
__all__ += ["AnswerReady", "BranchFinished", "PromptReused", "TextWritten"]
__all__ += ["autoregressive_generate", "beam_search_generate", "speculative_generate"]
__all__ += ["load", "notes_of", "tie", "token_digest"]


def generate(
    source: Session | str, prompt: str | None = None, *, graph: str | None = None, **options: Any
) -> Answer:
    """The answer to one prompt: ``generate("…", graph="eagle")``, or ``generate(session, "…")``. A
    run of its own, to its end or to `limits.max_rounds`; its `metrics` are the run's. The sections
    of a prompt that does not fit have the finish reason refused. graph, options: as for
    `open_session`, not with a session. Raises PromptError if the text cannot be a prompt."""
    if not isinstance(source, Session):
        if prompt is not None:
            raise TypeError("generate takes one prompt; the graph is a keyword")
        return generate(open_session(**{"graph": graph, **options}), source)
    if prompt is None or graph is not None or options:
        raise TypeError("with a session, generate takes the prompt and nothing else")
    core, recorder, _ = perform(source, [Prompt("1", prompt)])
    (answer,) = answers_of(core.requests, source.prompts)
    return replace(answer, metrics=recorder.figures(core.board))


# -- the methods of three papers, under the names of their authors' functions ---------------------


@dataclass(frozen=True, slots=True)
class Generated:
    """tokens: the new ids, without a stop token. acceptance_rate: accepted / offered drafts."""

    tokens: tuple[int, ...]
    text: str
    finish: str
    acceptance_rate: float


def autoregressive_generate(
    inputs: str | Sequence[int],
    *,
    max_gen_len: int = 40,
    eos_tokens_id: int | Sequence[int] | None = None,
    temperature: float = 0.0,
    **options: Any,
) -> Generated:
    """One token per forward (the graph `autoregressive`). inputs: a question, encoded in the
    model's chat format, or token ids. eos_tokens_id: replaces the model's own stop tokens. options:
    as for `open_session`."""
    options["max_new_tokens"] = max_gen_len
    sets = {"sampling.temperature": temperature}
    return _generated("autoregressive", inputs, sets, options, stops=eos_tokens_id)


def speculative_generate(
    inputs: str | Sequence[int],
    *,
    gamma: int = 5,
    use_egag: bool = False,
    gamma_min: int = 1,
    gamma_max: int | None = None,
    egag_ema_beta: float = 0.0,
    max_gen_len: int = 40,
    eos_tokens_id: int | Sequence[int] | None = None,
    temperature: float = 0.0,
    skip_sample_adjustment: bool = False,
    **options: Any,
) -> Generated:
    """A small model drafts `gamma` tokens, the target accepts them by p / q (`speculative`).
    use_egag: draft lengths from the drafter's entropy, between gamma_min and gamma_max.
    skip_sample_adjustment: not lossless; for comparison only."""
    sets: dict[str, Any] = {
        "drafter.gamma": gamma,
        "drafter.gamma_policy": "egag" if use_egag else "fixed",
        "drafter.gamma_min": gamma_min,
        "drafter.egag_ema_beta": egag_ema_beta,
        "sampling.temperature": temperature,
        "sampling.skip_sample_adjustment": skip_sample_adjustment,
    }
    if gamma_max is not None:
        sets["drafter.gamma_max"] = gamma_max
    options["max_new_tokens"] = max_gen_len
    return _generated("speculative", inputs, sets, options, stops=eos_tokens_id)


def beam_search_generate(
    inputs: str | Sequence[int],
    *,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    max_gen_len: int = 40,
    eos_tokens_id: int | Sequence[int] | None = None,
    **options: Any,
) -> Generated:
    """The most likely text of a beam search, as in transformers (`beam`)."""
    sets = {
        "beam.num_beams": num_beams,
        "beam.length_penalty": float(length_penalty),
        "beam.early_stopping": early_stopping,
    }
    options["max_new_tokens"] = max_gen_len
    return _generated("beam", inputs, sets, options, stops=eos_tokens_id)


def _generated(
    graph: str,
    inputs: str | Sequence[int],
    sets: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    stops: int | Sequence[int] | None,
) -> Generated:
    """One run of its own; sets: settings of the graph, before those of the options."""
    settings = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in sets.items()]
    session = open_session(graph, **{**options, "sets": [*settings, *options.get("sets", ())]})
    request = session.request(Prompt("1", inputs if isinstance(inputs, str) else "ids"))
    if not isinstance(inputs, str):
        request = replace(request, prefix=PromptTokens(), tail=PromptTokens(tuple(inputs)))
    if stops is not None:
        request = replace(request, stop_ids=frozenset([stops] if isinstance(stops, int) else stops))
    core, recorder, _ = perform(session, [request])
    (branch,) = request.branches
    core.close()
    return Generated(
        tokens=tuple(branch.tokens),
        text=session.prompts.decode(branch.tokens),
        finish=str(branch.finish),
        acceptance_rate=recorder.meter.acceptance_rate,
    )


def add_documents(
    files: Iterable[Path], options: RunOptions, folder: Path, max_bytes: int, max_tokens: int
) -> Iterator[tuple[ChunkInfo, bool]]:
    """Store the chunks, of at most `max_tokens` tokens, of all documents: each, and if it is new.
    Raises UsageError, PromptError, GraphError, ModelError: what cannot be used, and where."""
    documents = read_documents(files)
    job = prepare(options)
    session = load(job)
    store = ChunkStore(max_bytes, folder)
    library = ChunkLibrary.of(store, session.models, model_hash(model_folders(job)[0]))
    for document in documents:
        for name, ids in chunks_of(document, session.prompts, max_tokens):
            chunk, is_new = library.chunk(ids, name)
            if chunk.bytes > max_bytes:
                raise UsageError(f"--max-bytes {max_bytes}: {name} needs {chunk.bytes}")
            try:
                yield ChunkFiles(folder).read_info(library.key(ids).digest), is_new
            except FileNotFoundError:
                why = store.notes[-1] if store.notes else f"--max-bytes {max_bytes} is too little"
                raise UsageError(f"{name} could not be stored: {why}") from None

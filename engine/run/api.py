"""The program from Python: sessions, engines, and answers in one line. README shows how."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models.load.checkpoint import model_hash
from ...states.phases.merge import Answer
from ...states.prompt_builder import chunks_of
from ...states.text.tokens import PromptTokens
from ..chunks.files import ChunkFiles, ChunkInfo
from ..chunks.store import ChunkMaker, ChunkStore, chunk_maker
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
from ..prepare.environment import model_folders
from ..prepare.inputs import Prompt, read_documents
from ..prepare.job import prepare
from ..prepare.options import RunOptions
from ..record.recorder import Recorder
from ..record.report import answers_of
from ..record.report import output_digest as token_digest
from .engine import Engine, EngineError, Handle
from .runner import perform
from .session import Session, load, open_session, opened, tie

__all__ = [
    "Answer",
    "AnswerReady",
    "BranchFinished",
    "BranchOpened",
    "Engine",
    "EngineError",
    "Generated",
    "Handle",
    "OutlineRead",
    "Prompt",
    "PromptReused",
    "Recorder",
    "Session",
    "StreamEvent",
    "TextWritten",
    "autoregressive_generate",
    "beam_search_generate",
    "generate",
    "load",
    "notes_of",
    "open_session",
    "speculative_generate",
    "tie",
    "token_digest",
]


def generate(
    source: Session | str,
    prompt: str | None = None,
    *,
    graph: str | None = None,
    **options: Any,
) -> Answer:
    """The answer to one prompt: ``generate("…", graph="eagle")``, or ``generate(session, "…")``.

    A run of its own, to its end or to `limits.max_rounds`. A prompt that does not fit is refused in
    the answer: its sections have the finish reason.

    Args:
        graph, options: as for `open_session`; not with a session.

    Raises:
        PromptError: the text cannot be a prompt.
    """
    if isinstance(source, Session):
        if prompt is None or graph is not None or options:
            raise TypeError("with a session, generate takes the prompt and nothing else")
        session = source
        text = prompt
    else:
        if prompt is not None:
            raise TypeError("generate takes one prompt; the graph is a keyword")
        session = opened(graph, options)
        text = source
    core, _, _ = perform(session, [Prompt("1", text)])
    (answer,) = answers_of(core.requests, session.prompts)
    return answer


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
    """One token per forward (the graph `autoregressive`).

    Args:
        inputs: a question, encoded in the model's chat format, or token ids.
        eos_tokens_id: replaces the model's own stop tokens.
        options: as for `open_session`.
    """
    sets = {"sampling.temperature": temperature}
    session = _session("autoregressive", sets, max_gen_len, options)
    return _generated(session, inputs, eos_tokens_id)


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

    Args:
        use_egag: draft lengths from the drafter's entropy, between gamma_min and gamma_max.
        skip_sample_adjustment: not lossless; for comparison only.
    """
    sets = {
        "drafter.gamma": gamma,
        "drafter.gamma_policy": "egag" if use_egag else "fixed",
        "drafter.gamma_min": gamma_min,
        "drafter.egag_ema_beta": egag_ema_beta,
        "sampling.temperature": temperature,
        "sampling.skip_sample_adjustment": skip_sample_adjustment,
    }
    if gamma_max is not None:
        sets["drafter.gamma_max"] = gamma_max
    session = _session("speculative", sets, max_gen_len, options)
    return _generated(session, inputs, eos_tokens_id)


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
    return _generated(_session("beam", sets, max_gen_len, options), inputs, eos_tokens_id)


def _session(
    graph: str, sets: Mapping[str, Any], max_gen_len: int, options: Mapping[str, Any]
) -> Session:
    settings = [f"{path}={_yaml(value)}" for path, value in sets.items()]
    settings += options.get("sets", ())
    return opened(graph, {**options, "sets": settings, "max_new_tokens": max_gen_len})


def _generated(
    session: Session, inputs: str | Sequence[int], eos_tokens_id: int | Sequence[int] | None
) -> Generated:
    """One run of its own."""
    request = session.request(Prompt("1", inputs if isinstance(inputs, str) else "ids"))
    if not isinstance(inputs, str):
        request = replace(request, prefix=PromptTokens(), tail=PromptTokens(tuple(inputs)))
    if eos_tokens_id is not None:
        stops = (eos_tokens_id,) if isinstance(eos_tokens_id, int) else eos_tokens_id
        request = replace(request, stop_ids=frozenset(stops))
    core, recorder, _ = perform(session, [request])
    (branch,) = request.branches
    core.close()
    return Generated(
        tokens=tuple(branch.tokens),
        text=session.prompts.decode(branch.tokens),
        finish=str(branch.finish),
        acceptance_rate=recorder.meter.acceptance_rate,
    )


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- chunks of documents --------------------------------------------------------------------------


AddedChunk = tuple[ChunkInfo, bool]  # a chunk in the folder, and whether it is new


def add_documents(
    files: Iterable[Path], options: RunOptions, folder: Path, max_bytes: int, max_tokens: int
) -> list[AddedChunk]:
    """Compute the chunks, of at most `max_tokens` tokens, of all documents, and store them.

    Raises:
        UsageError, PromptError, GraphError, ModelError: what cannot be used, and where.
    """
    documents = read_documents(files)
    job = prepare(options)
    session = load(job)
    maker = chunk_maker(
        ChunkStore(max_bytes, folder), session.models, model_hash(model_folders(job)[0])
    )
    return [
        _add_chunk(folder, maker, name, ids)
        for document in documents
        for name, ids in chunks_of(document, session.prompts, max_tokens)
    ]


def _add_chunk(folder: Path, maker: ChunkMaker, name: str, ids: tuple[int, ...]) -> AddedChunk:
    store = maker.store
    chunk, is_new = maker.chunk(ids, name)
    if chunk.bytes > store.max_bytes:
        raise UsageError(f"--max-bytes {store.max_bytes}: {name} needs {chunk.bytes}")
    try:
        return ChunkFiles(folder).read_info(maker.key(ids).digest), is_new
    except FileNotFoundError:
        why = store.notes[-1] if store.notes else f"--max-bytes {store.max_bytes} is too little"
        raise UsageError(f"{name} could not be kept: {why}") from None

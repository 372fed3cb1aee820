"""The program from Python: sessions, engines, and answers in one line. README shows how."""

from typing import Unpack, overload

from ...states.phases.outline_ops import Answer
from ..models import notes_of
from ..prepare.inputs import Prompt
from ..record.recorder import Recorder
from ..record.report import answers_of
from ..record.report import output_digest as token_digest
from .classic import Generated, autoregressive_generate, beam_search_generate, speculative_generate
from .engine import Engine
from .events import (
    AnswerReady,
    BranchFinished,
    BranchOpened,
    OutlineRead,
    PromptReused,
    StreamEvent,
    TextWritten,
)
from .handle import EngineError, Handle
from .opening import EngineOptions, load, open_session, opened, tie
from .runner import perform
from .session import Session

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


@overload
def generate(source: Session, prompt: str) -> Answer: ...


@overload
def generate(source: str, *, graph: str = ..., **options: Unpack[EngineOptions]) -> Answer: ...


def generate(
    source: Session | str,
    prompt: str | None = None,
    *,
    graph: str | None = None,
    **options: Unpack[EngineOptions],
) -> Answer:
    """The answer to one prompt: ``generate("…", graph="eagle")``, or ``generate(session, "…")``.

    It is a run of its own, to its end or to `limits.max_rounds`. A prompt that does not fit is
    refused in the answer: its sections say why they finished.

    Args:
        graph, options: as for `open_session`; a session has its own.

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
    run, _, _ = perform(session, [Prompt("1", text)])
    (answer,) = answers_of(run.board["branches"].requests, session.prompts)
    return answer

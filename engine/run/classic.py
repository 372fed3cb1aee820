"""Speculative, plain and beam-search decoding of one text, under the names of their first authors'
functions; each is a graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from ...states.request import Request
from ...states.text.prompt_tokens import PromptTokens
from ..prepare.inputs import Prompt
from ..record.recorder import Recorder
from .opening import EngineOptions, opened
from .runner import drive
from .session import Session


@dataclass(frozen=True, slots=True)
class Generated:
    """tokens: the new ids, no stop token. acceptance_rate: drafts accepted / drafts offered."""

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
    **options: Unpack[EngineOptions],
) -> Generated:
    """One token after another (the graph `autoregressive`).

    Args:
        inputs: a question, which is asked in the model's chat format, or the token ids themselves.
        eos_tokens_id: what ends the text, instead of the model's own stop tokens.
        options: as for `open_session`.
    """
    sets = {"sampling.temperature": temperature}
    return _generated("autoregressive", sets, inputs, max_gen_len, eos_tokens_id, options)


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
    **options: Unpack[EngineOptions],
) -> Generated:
    """A small model drafts `gamma` tokens, the target accepts them by p / q (`speculative`).

    Args:
        use_egag: draft lengths from the drafter's entropy, between gamma_min and gamma_max.
        skip_sample_adjustment: for looking at it, not lossless.
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
    return _generated("speculative", sets, inputs, max_gen_len, eos_tokens_id, options)


def beam_search_generate(
    inputs: str | Sequence[int],
    *,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    max_gen_len: int = 40,
    eos_tokens_id: int | Sequence[int] | None = None,
    **options: Unpack[EngineOptions],
) -> Generated:
    """The likeliest text that a search of so many beams finds, as transformers (`beam`)."""
    sets = {
        "beam.num_beams": num_beams,
        "beam.length_penalty": float(length_penalty),
        "beam.early_stopping": early_stopping,
    }
    return _generated("beam", sets, inputs, max_gen_len, eos_tokens_id, options)


def _generated(
    graph: str,
    sets: Mapping[str, Any],
    inputs: str | Sequence[int],
    max_gen_len: int,
    eos_tokens_id: int | Sequence[int] | None,
    options: EngineOptions,
) -> Generated:
    """A run of its own."""
    own = [f"{path}={_yaml(value)}" for path, value in sets.items()]
    more: EngineOptions = {**options, "sets": (*own, *options.get("sets", ()))}
    session = opened(graph, {**more, "max_new_tokens": max_gen_len})
    stops = (eos_tokens_id,) if isinstance(eos_tokens_id, int) else eos_tokens_id
    request = _request(session, inputs, stops)
    recorder = Recorder(session.prompts.decode)
    run = session.start([], recorder)
    recorder.attach(run)
    run.board["branches"].submit(request)
    drive(run, recorder, max_rounds=session.program.graph.limits.max_rounds)
    (branch,) = request.branches
    rate = recorder.meter.acceptance_rate
    run.close()
    tokens = tuple(branch.tokens)
    return Generated(tokens, session.prompts.decode(tokens), str(branch.finish), rate)


def _request(session: Session, inputs: str | Sequence[int], stops: Sequence[int] | None) -> Request:
    request = session.request(Prompt("1", inputs if isinstance(inputs, str) else "ids"))
    if not isinstance(inputs, str):
        request = replace(request, prefix=PromptTokens(), tail=PromptTokens(tuple(inputs)))
    return request if stops is None else replace(request, stop_ids=frozenset(stops))


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

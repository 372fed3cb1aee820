"""From a message to what an engine is asked: prompt and settings, checked against the model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....ops.sampling.settings import SamplingRules
from ....states.text.chat_format import PastTurn, leading_id
from ....states.text.documents import Document
from ....states.text.encoder import Encoder, check_question
from ....states.text.grammar import GrammarError
from ...prepare.inputs import Prompt
from ...prepare.request_settings import RequestSettings
from ...run.engine import Engine
from ...run.session import derive_seed
from ..wire.protocol import Encode, Submit

FIRST = "1"  # the key of the only prompt of a run, from which its coins follow
TOO_LONG = "context_length_exceeded"


class Refusal(ValueError):
    """A request that cannot be; param: the field to blame, code: what clients know it by."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """What `Engine.submit` takes; prompt_tokens: of its first prompt."""

    prompt: Prompt
    settings: RequestSettings
    prompt_tokens: int


class Asking:
    """Makes requests for one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.session = engine.session
        self._encoder = Encoder(self.session.models.tokenizer)
        first = leading_id(self.session.models.tokenizer)
        self._leading = () if first is None else (first,)

    def ready(self, asked: Submit) -> ReadyRequest:
        """Prompt and settings of a request.

        Raises:
            Refusal, PromptError, GrammarError: what it asks for cannot be.
        """
        prompt = self._prompt(asked)
        settings = self._settings(asked)
        try:
            fit = self.engine.fit(prompt, settings)
        except GrammarError as error:
            raise Refusal(str(error), "response_format", "invalid_schema") from None
        plain = settings.plain or self.session.program.graph.skeleton is None
        if fit.why and asked.max_tokens is None and plain and fit.room > 0:
            prompt = replace(prompt, max_new_tokens=fit.room)
            fit = self.engine.fit(prompt, settings)
        if fit.why:
            wanted = asked.max_tokens or self.session.budget
            what = f"{fit.prompt} tokens of prompt and {wanted} to be written: {fit.why}"
            limit = fit.prompt + fit.room
            raise Refusal(f"{what} (at most {limit} together)", "messages", TOO_LONG)
        return ReadyRequest(prompt, settings, fit.prompt)

    def encode(self, asked: Encode) -> list[int]:
        """The ids of a text, or of the whole prompt that it stands in; raises PromptError."""
        if not asked.chat:
            return self._raw(asked.text)
        prompt = Prompt(FIRST, asked.text, past=_turns(asked.past), rules=asked.rules)
        request = self.session.request(prompt, RequestSettings(skeleton=False))
        return [*request.prefix, *request.tail]

    def _raw(self, text: str) -> list[int]:
        """A text's ids, behind what this tokenizer begins every text with; it may be blank."""
        check_question(f"{text}.")
        return [*self._leading, *self._encoder.text(text)]

    def _prompt(self, asked: Submit) -> Prompt:
        text = asked.question if asked.text is None else asked.text
        documents = tuple(Document(title, body) for title, body in asked.documents)
        budget = None if asked.max_tokens is None else max(asked.max_tokens, 1)
        seed = derive_seed(asked.seed, FIRST)
        return Prompt(
            asked.id,
            text,
            seed,
            budget,
            documents,
            cache_salt=asked.cache_salt,
            past=_turns(asked.past),
            rules=asked.rules,
        )

    def _settings(self, asked: Submit) -> RequestSettings:
        size = self.session.models.target.vocab_size
        ids = tuple(asked.token_ids)
        self._check_ids("prompt", ids, size)
        self._check_ids("stop_token_ids", asked.stop_ids, size)
        if asked.text is not None:
            ids = tuple(self._raw(asked.text))
        sampling = self._sampling(asked, size)
        plain = bool(ids) or not asked.skeleton or asked.schema is not None
        self._check_skeleton(asked, plain=plain)
        return RequestSettings(
            sampling,
            ids,
            asked.skeleton,
            tuple(asked.stop_ids),
            asked.ignore_eos,
            asked.schema,
            contexts=asked.logprobs >= 0,
            begun={index: tuple(tokens) for index, tokens in self._begun(asked)},
        )

    def _begun(self, asked: Submit) -> Sequence[Sequence[Any]]:
        """What is written of it, where an engine can go on behind that; else it begins anew."""
        graph = self.session.program.graph
        several = graph.skeleton is not None and graph.skeleton.merge != "concat"
        one_by_one = graph.beam is None and graph.blend is None and graph.limits.n == 1
        return asked.begun if one_by_one and not several else ()

    def _sampling(self, asked: Submit, size: int) -> SamplingRules | None:
        if not asked.sampling:
            return None
        values = dict(asked.sampling)
        if bias := values.get("logit_bias"):
            self._check_ids("logit_bias", [token for token, _ in bias], size)
            values["logit_bias"] = tuple((int(token), float(add)) for token, add in bias)
        return replace(self.session.sampling, **values)

    def _check_ids(self, param: str, ids: Sequence[int], size: int) -> None:
        if wrong := [one for one in ids if not 0 <= one < size]:
            raise Refusal(f"{param}: no token {wrong[0]}: the model has {size} of them", param)

    def _check_skeleton(self, asked: Submit, *, plain: bool) -> None:
        """What has a meaning for one plain answer only."""
        graph = self.session.program.graph
        if graph.beam is not None and (asked.sampling or asked.schema):
            field = "response_format" if asked.schema else next(iter(asked.sampling))
            raise Refusal(f"graph {graph.name!r} searches with beams: no {field}", field)
        if plain or graph.skeleton is None:
            return
        if asked.logprobs >= 0 and graph.skeleton.merge == "attend":
            what = f"graph {graph.name!r} reads parts where they lie, which no plain forward does"
            raise Refusal(f"logprobs: {what} (specsot.skeleton: false)", "logprobs")


def _turns(past: Sequence[Sequence[str]]) -> tuple[PastTurn, ...]:
    return tuple(PastTurn(question, answer) for question, answer in past)

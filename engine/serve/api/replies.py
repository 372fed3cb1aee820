"""Answers in OpenAI's shapes."""

from collections.abc import Mapping, Sequence
from time import time
from typing import Any
from uuid import uuid4

from ...workers.protocol import Ended

FINISHED = {"stop": "stop", "length": "length", "refused": "length"}


def usage_of(ended: Sequence[Ended], prompts: Sequence[int]) -> dict[str, Any]:
    """Tokens of all choices; outlines were written, so they count.

    Args:
        prompts: tokens of each prompt, counted once however many choices it has.
    """
    cached = sum(one.usage["cached"] for one in ended)
    outline = sum(one.usage["outline"] for one in ended)
    written = sum(one.usage["answer"] for one in ended) + outline
    prompt = sum(prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
        "completion_tokens_details": {"skeleton_tokens": outline},
    }


def usage_so_far(prompt: int, written: int) -> dict[str, Any]:
    """The same while an answer is written."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def speculation_of(ended: Sequence[Ended], *, detailed: bool = False) -> dict[str, Any] | None:
    """How drafts of the only choice fared, in the words that vLLM and AIPerf have for it."""
    if len(ended) != 1 or not sum(ended[0].drafted):
        return {"speculative_decoding": None}
    accepted = ended[0].accepted
    drafted = ended[0].drafted
    histogram = [0] * (max(accepted) + 1)
    for count in accepted:
        histogram[count] += 1
    figures: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": max(drafted),
    }
    if detailed:
        figures |= {"per_step_accepted": list(accepted), "per_step_drafted": list(drafted)}
    return {"speculative_decoding": figures}


class Shape:
    """The envelope of one request's answer: the same id, time and model on every chunk."""

    def __init__(self, *, chat: bool, model: str) -> None:
        self.chat = chat
        self.model = model
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self.created = int(time())

    def _envelope(self, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and stream:
            kind += ".chunk"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(
        self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any], **more: Any
    ) -> dict[str, Any]:
        return {**self._envelope(stream=False), "choices": list(choices), "usage": usage, **more}

    def choice(
        self, index: int, text: str, ended: Ended, scores: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """A finished choice of an answer that is not streamed."""
        end = {"finish_reason": FINISHED[ended.finish], "stop_reason": ended.stop}
        if self.chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": scores, **end}
        return {"index": index, "text": text, "logprobs": scores, **end}

    def chunk(
        self,
        index: int,
        text: str | None = None,
        *,
        first: bool = False,
        ended: Ended | None = None,
        vendor: Mapping[str, Any] | None = None,
        scores: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A piece of one choice: its beginning, a text, or its end."""
        finish = None if ended is None else FINISHED[ended.finish]
        choice: dict[str, Any] = {"index": index, "logprobs": scores, "finish_reason": finish}
        if ended is not None:
            choice["stop_reason"] = ended.stop
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
            choice["delta"] = delta if text is None else {**delta, "content": text}
        else:
            choice["text"] = text or ""
        chunk = {**self._envelope(stream=True), "choices": [choice]}
        return chunk if vendor is None else {**chunk, "specsot": vendor}

    def last(self, usage: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """The chunk behind all choices that says what they took."""
        return {**self._envelope(stream=True), "choices": [], "usage": usage, **more}

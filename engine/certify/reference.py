"""The target as transformers reads it: what every token is held to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.files import ModelError
from ...states.requests.branch import Branch


@dataclass(frozen=True, slots=True)
class Transformers:
    """The checkpoint of a folder in transformers, loaded once for each dtype."""

    folder: Path
    device: str
    _loaded: dict[str, Any] = field(default_factory=dict)

    def model(self, dtype: str) -> Any:
        """Raises ModelError: transformers cannot load it."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        if dtype not in self._loaded:
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    self.folder, dtype=getattr(torch, dtype)
                )
            except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
                reason = str(error).strip().split("\n", 1)[0]
                message = f"transformers cannot load it, so nothing can be held to it: {reason}"
                raise ModelError(self.folder, message) from None
            self._loaded[dtype] = model.train(False).to(self.device)
        return self._loaded[dtype]

    def logits(self, ids: Sequence[int], dtype: str) -> Tensor:
        """[Q, V] behind every one of these ids, in one forward."""
        with torch.inference_mode():
            logits: Tensor = self.model(dtype)(self._ids(ids), use_cache=False).logits[0]
        return logits

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.device)

    def generate(
        self, branch: Branch, context: Sequence[int], dtype: str, **beams: Any
    ) -> tuple[list[int], float | None]:
        """What `generate` writes for a branch, the stop token included, and a beam search's score.

        A branch under a grammar is written with the grammar as a logits processor.

        Args:
            beams: num_beams, length_penalty, early_stopping of a beam search.
        """
        ids, grammar = self._ids(context), grammar_of(branch)
        with torch.inference_mode():
            output = self.model(dtype).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=branch.budget,
                eos_token_id=sorted(branch.request.stop_ids) or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                logits_processor=[] if grammar is None else [_only_legal(grammar, len(context))],
                **beams,
            )
        scores = getattr(output, "sequences_scores", None)
        tokens: list[int] = output.sequences[0, len(context) :].tolist()
        return tokens, None if scores is None else float(scores[0])


def grammar_of(branch: Branch) -> Any:
    """What an answer was written under (states.grammar.Matcher), at its beginning, or None."""
    new = branch.request.new_matcher
    return new() if new is not None and branch.matcher is not None else None


def _only_legal(matcher: Any, start: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A logits processor that leaves the tokens that a grammar allows; start: ids before it."""

    def process(ids_1Q: Tensor, scores_1V: Tensor) -> Tensor:
        for token in ids_1Q[0, start + matcher.consumed :].tolist():
            matcher.advance(token)
        legal_V = torch.from_numpy(matcher.legal_mask()).to(scores_1V.device)
        return scores_1V.masked_fill(~legal_V, -torch.inf)

    return process

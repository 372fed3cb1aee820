"""transformers' own `generate` on a side's prompts and weights: greedy or drawn, alone or assisted.

What it writes becomes a request of ours, so that its tokens are held to the graphs' as theirs are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from ...models.quantise import Weights, quantise_
from ...states.graph.graph import Sampling
from ..bench.sides import Peer, Side, SideRun
from ..errors import UsageError
from ..prepare.environment import model_folders
from ..prepare.inputs import Prompt
from ..record.report import answers_of, output_digest
from ..run.runner import Status
from .peer_answers import Steps, answered, cost_of
from .peer_names import ASSISTED, LLAMA_CPP, LOOKUP

# tokens that a look-up proposes, and that must match at most
LOOKED_UP = 10
MATCHED = 3
DRAWN = ("temperature", "top_k", "top_p")  # what of `sampling` both have


@dataclass(frozen=True, slots=True)
class TransformersPeer:
    """A peer; extra: what it gives `generate` beside what all are given.

    drafts: whether its first forward proposes too; else that is a prefill, and no round.
    """

    name: str
    model: Any
    extra: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False
    codes: str = ""

    def answer(self, side: Side, prompt: Prompt, budget: int | None) -> SideRun:
        """One prompt; at most `budget` tokens, if there is one."""
        request = side.session.request(prompt)
        most = budget or request.budget
        steps = Steps()
        sampling = side.job.program.graph.sampling
        ids = torch.tensor([[*request.prefix, *request.tail]], device=self.model.device)
        config = _config(sampling, sorted(request.stop_ids), most)
        began = perf_counter_ns()
        with torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(request.seed)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=steps,
                **self.extra,
            )
        whole = perf_counter_ns() - began
        written = out[0, ids.shape[1] :].tolist()
        answered(request, written, most)
        cost = cost_of(steps, whole, request, self.drafts)
        digest = output_digest(answers_of([request], side.session.prompts))
        return SideRun(Status.OK, cost, (), request, digest)


def _config(sampling: Sampling, stops: list[int], most: int) -> GenerationConfig:
    given: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        given |= {"temperature": sampling.temperature, "top_k": sampling.top_k}
        given |= {"top_p": sampling.top_p}
    return _settings(max_new_tokens=most, eos_token_id=stops, pad_token_id=0, **given)


def _settings(**given: Any) -> GenerationConfig:
    made: Any = GenerationConfig  # its constructor has no types
    settings: GenerationConfig = made(**given)
    return settings


def dressed(names: "list[str]") -> Callable[[list[Side]], list[Side]]:
    """What makes peers of those loaded sides that have a name here; models are loaded once.

    Raises:
        UsageError: the graphs draw as transformers cannot.
    """

    def dress(sides: list[Side]) -> list[Side]:
        load = cache(_load)
        return [
            replace(side, peer=_peer(name, side, load)) if name else side
            for side, name in zip(sides, names, strict=True)
        ]

    return dress


def _peer(name: str, side: Side, load: Callable[..., Any]) -> Peer:
    graph = side.job.program.graph
    options = side.job.options
    usual = Sampling.model_validate({}).model_copy(
        update={one: getattr(graph.sampling, one) for one in DRAWN}
    )
    if usual != graph.sampling.model_copy(update={"accept": usual.accept, "rule": usual.rule}):
        raise UsageError(f"{name}: of `sampling` it knows {', '.join(DRAWN)} only")
    target, drafter = model_folders(side.job)
    if name == LLAMA_CPP:
        from .llama_cpp import LlamaCppPeer

        if graph.sampling.temperature > 0:
            raise UsageError(f"{name}: it is measured without a temperature only")
        return LlamaCppPeer(side, target)
    model = load(target, options.dtype, options.device, options.weights)
    if name == LOOKUP:
        looked = {"prompt_lookup_num_tokens": LOOKED_UP, "max_matching_ngram_size": MATCHED}
        return TransformersPeer(name, model, looked, drafts=True)
    if name != ASSISTED or drafter is None:
        return TransformersPeer(name, model)
    assistant = load(drafter, options.dtype, options.device)
    config = assistant.generation_config
    config.num_assistant_tokens = getattr(graph.drafter, "gamma", None)
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return TransformersPeer(name, model, {"assistant_model": assistant}, drafts=True)


def _load(folder: Path, dtype: str, device: str, weights: str = "full") -> Any:
    silent: Any = logging.disable_progress_bar  # it has no types
    silent()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    quantise_(model, Weights.of(weights).kind)
    model.generation_config = _settings()  # what a checkpoint suggests is not asked for
    return model.to(device).train(False)

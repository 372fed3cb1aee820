"""transformers' own `generate` on a side's prompts and weights: greedy or drawn, alone or assisted.

What it writes becomes a request of ours, so that its tokens are held to the graphs' as theirs are.
"""

from collections import Counter
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
from ...states.graph.blocks import Sampling
from ...states.requests.branch import Branch, Finish, Request
from ...states.requests.lifecycles import move
from ..bench.costs import Cost, Moments
from ..bench.sides import Peer, Side, SideRun
from ..errors import UsageError
from ..prepare.environment import model_folders
from ..prepare.inputs import Prompt
from ..record.metrics import Marks, Meter
from ..record.report import answers_of, output_digest
from ..run.runner import Status
from .peer_names import ASSISTED, LLAMA_CPP, LOOKUP

LOOKED_UP, MATCHED = 10, 3  # tokens that a look-up proposes, and that must match at most
DRAWN = ("temperature", "top_k", "top_p")  # what of `sampling` both have


@dataclass
class Steps:
    """A streamer of transformers: when tokens came, and how many at once."""

    began: int = field(default_factory=perf_counter_ns)
    times: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    _prompt: bool = True

    def put(self, value: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times.append(perf_counter_ns() - self.began)
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is left over."""


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
        steps, sampling = Steps(), side.job.program.graph.sampling
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


def answered(request: Request, written: list[int], most: int) -> None:
    """Make it a request that one branch has answered."""
    stopped = bool(written) and written[-1] in request.stop_ids
    branch = Branch(request, 0, 0, most, prompt=request.tail)
    branch.tokens = written[:-1] if stopped else written
    branch.end(Finish.STOP if stopped else Finish.LENGTH)
    request.branches = [branch]
    move("request", request, "run")
    move("request", request, "finish")


def cost_of(steps: Steps, whole: int, request: Request, drafts: bool) -> Cost:
    """Its figures under our names; the stop token is not counted."""
    (branch,) = request.branches
    counts, times = [*steps.counts], steps.times
    counts[-1] -= branch.finish is Finish.STOP
    lengths = Counter(counts if drafts else counts[1:])
    meter = Meter(forwards=len(counts), rounds=lengths.total(), tokens=sum(counts), lengths=lengths)
    meter.in_run = meter.in_ops = whole
    meter.marks[request.key] = Marks(times[0], None, times[-1])
    return Cost(meter, {}, Moments(times[0], times[-1], sum(counts[1:])))


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
    graph, options = side.job.program.graph, side.job.options
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

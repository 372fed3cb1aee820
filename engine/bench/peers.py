"""Other programs as sides: `generate` of transformers, and llama.cpp.

Their answers become requests of ours, so that the same comparison of tokens covers them.
llama.cpp (llama-cpp-python, optional) takes and returns token ids. Its weights are written into a
GGUF file first; those of a quantised side in llama.cpp's own codes, Q8_0 or Q4_0.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Stored
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from ...models.config import DecoderConfig
from ...models.files import ModelError
from ...models.load.weights import load_target
from ...models.quantise import FULL, Weights, quantise_
from ...states.graph.graph import Sampling
from ...states.request import Branch, Finish, Request, move
from ..errors import UsageError
from ..prepare.environment import model_folders
from ..prepare.inputs import Prompt
from ..record.metrics import Marks, Meter
from ..record.report import answers_of, output_digest
from ..run.runner import Status
from .experiment import ASSISTED, LLAMA_CPP, LOOKUP
from .sides import Cost, Moments, Peer, Side, SideRun


@dataclass
class Steps:
    """A streamer of transformers: when tokens came, and how many at once."""

    start_time: int = field(default_factory=perf_counter_ns)
    times: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    _prompt: bool = True

    def put(self, value: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times.append(perf_counter_ns() - self.start_time)
        self.counts.append(value.numel())

    def end(self) -> None:
        """The end of a stream; required by the protocol of transformers."""


def answered(request: Request, written: list[int], most: int) -> None:
    """Make it a request that one branch has answered."""
    stopped = bool(written) and written[-1] in request.stop_ids
    branch = Branch(request, 0, 0, most, prompt=request.tail)
    branch.tokens = written[:-1] if stopped else written
    branch.end(Finish.STOP if stopped else Finish.LENGTH)
    request.branches = [branch]
    move(request, "run")
    move(request, "finish")


def cost_of(steps: Steps, whole: int, request: Request, drafts: bool) -> Cost:
    """Its figures under our names; the stop token is not counted."""
    (branch,) = request.branches
    counts = [*steps.counts]
    times = steps.times
    counts[-1] -= branch.finish is Finish.STOP
    lengths = Counter(counts if drafts else counts[1:])
    meter = Meter(forwards=len(counts), rounds=lengths.total(), tokens=sum(counts), lengths=lengths)
    meter.in_run = meter.in_ops = whole
    meter.marks[request.key] = Marks(times[0], None, times[-1])
    return Cost(meter, {}, Moments(times[0], times[-1], sum(counts[1:])))


# tokens that a look-up proposes, and that must match at most
LOOKED_UP = 10
MATCHED = 3
DRAWN = ("temperature", "top_k", "top_p")  # what of `sampling` both have


@dataclass(frozen=True, slots=True)
class TransformersPeer:
    """A peer; extra: further arguments of `generate`.

    drafts: whether its first forward proposes tokens; otherwise it is a prefill, not a round.
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
        config = _generation(sampling, sorted(request.stop_ids), most)
        start_time = perf_counter_ns()
        with torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(request.seed)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=steps,
                **self.extra,
            )
        whole = perf_counter_ns() - start_time
        written = out[0, ids.shape[1] :].tolist()
        answered(request, written, most)
        cost = cost_of(steps, whole, request, self.drafts)
        digest = output_digest(answers_of([request], side.session.prompts))
        return SideRun(Status.OK, cost, (), request, digest)


def _generation(sampling: Sampling, stops: list[int], most: int) -> GenerationConfig:
    arguments: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        arguments |= {"temperature": sampling.temperature, "top_k": sampling.top_k}
        arguments |= {"top_p": sampling.top_p}
    return _settings(max_new_tokens=most, eos_token_id=stops, pad_token_id=0, **arguments)


def _settings(**arguments: Any) -> GenerationConfig:
    constructor: Any = GenerationConfig  # its constructor has no types
    settings: GenerationConfig = constructor(**arguments)
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
        update={filter_name: getattr(graph.sampling, filter_name) for filter_name in DRAWN}
    )
    if usual != graph.sampling.model_copy(update={"accept": usual.accept, "rule": usual.rule}):
        raise UsageError(f"{name}: of `sampling` it knows {', '.join(DRAWN)} only")
    target, drafter = model_folders(side.job)
    if name == LLAMA_CPP:
        if graph.sampling.temperature > 0:
            raise UsageError(f"{name}: it is measured without a temperature only")
        return LlamaCppPeer(side, target)
    model = load(target, options.dtype, options.device, options.weights)
    if name == LOOKUP:
        lookup = {"prompt_lookup_num_tokens": LOOKED_UP, "max_matching_ngram_size": MATCHED}
        return TransformersPeer(name, model, lookup, drafts=True)
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


KINDS = {"int8": Stored.Q8_0, "int4": Stored.Q4_0}
DTYPES = {"float32": Stored.F32, "bfloat16": Stored.BF16, "float16": Stored.F16}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
BLOCK = 32  # numbers of a row that llama.cpp's codes share a scale


class LlamaCppPeer:
    """A peer: greedy decoding of one sequence by llama.cpp. codes: of its own weights, if any."""

    name = LLAMA_CPP
    codes = ""

    def __init__(self, side: Side, folder: Path) -> None:
        try:
            binding: Any = import_module("llama_cpp")
        except ImportError as error:
            raise UsageError(f"{LLAMA_CPP}: llama-cpp-python cannot be imported: {error}") from None
        options = side.job.options
        config = side.session.models.target.config
        kind = Weights.of(options.weights).kind
        stored = DTYPES.get(options.dtype) if kind == FULL else KINDS[kind]
        if stored is None or options.device != "cpu":
            raise UsageError(f"{LLAMA_CPP}: not in {options.dtype} on {options.device}")
        self.codes = "" if kind == FULL else stored.name
        self._kept = TemporaryDirectory(prefix="specsot-gguf-")
        file = write_gguf(Path(self._kept.name) / "model.gguf", folder, stored)
        size = min(config.rope.limit, 4096)
        threads = options.threads
        arguments = {"n_ctx": size, "n_threads": threads, "n_threads_batch": threads}
        self._model: Any = binding.Llama(str(file), verbose=False, **arguments)

    def answer(self, side: Side, prompt: Prompt, budget: int | None) -> SideRun:
        """One prompt; at most `budget` tokens, if there is one."""
        request = side.session.request(prompt)
        ids = [*request.prefix, *request.tail]
        most = budget or request.budget
        steps = Steps()
        written = list[int]()
        steps.put(ids)
        start_time = perf_counter_ns()
        self._model.reset()
        for token in self._model.generate(ids, temp=0.0, reset=True):
            written.append(int(token))
            steps.put(torch.tensor(written[-1:]))
            if token in request.stop_ids or len(written) == most:
                break
        whole = perf_counter_ns() - start_time
        answered(request, written, most)
        digest = output_digest(answers_of([request], side.session.prompts))
        return SideRun(Status.OK, cost_of(steps, whole, request, False), (), request, digest)


def write_gguf(file: Path, folder: Path, stored: Stored) -> Path:
    """A checkpoint's weights as llama.cpp reads them, without a tokenizer.

    Raises:
        ModelError: of a family or a scaling of positions that is not written here.
    """
    target = load_target(folder, torch.float32)
    config = target.config
    if config.rope.kind != "default" or config.window:
        raise ModelError(config.path, "positions or windows that are not written as GGUF here")
    arch = ARCHITECTURES[config.family]
    writer = gguf.GGUFWriter(file, arch)
    _describe(writer, config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_layers)
    for name, value in target.published().items():
        stem, _, suffix = name.rpartition(".")
        if config.tied and stem == "lm_head":
            continue
        values = value.detach().numpy()
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            values = _paired(values, config.head_dim)
        kind = stored if values.ndim == 2 and values.shape[1] % BLOCK == 0 else Stored.F32
        data = gguf.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _describe(writer: Any, config: DecoderConfig) -> None:
    writer.add_context_length(config.rope.limit)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _paired(values: Any, head_dim: int) -> Any:
    """The two numbers of a rotated pair side by side, as llama.cpp has them for Llama."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
